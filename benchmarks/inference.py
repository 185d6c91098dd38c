"""PAT inference beside the published way and beside the same network's plain forward pass, pictures a second.

    python benchmarks/inference.py --backbones resnet101 tresnet_l resnet50 --out result.json

Pictures lie decoded on the device, as bytes; answers come back to the host. Ways, the network in evaluation mode:

- plain: the whole image alone, as `Predictor` asks a network with effort 0;
- published: five views, resized one after the other from the resized image, NCHW, fp16 autocast on a GPU;
- ours: image and patches, as `Predictor` asks: batch norms folded, on a GPU bfloat16 and few passes over memory;
- adaptive: the same with an effort, the share of pictures whose patches are looked at (--effort);
- closer: the same, and a closer look of 1.5 times the side in place of the patches, at the effort of equal cost;
- native: as ours, patches cut from a source of twice the side.

What torch.compile would make of the same network: craft.py.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from recording import describe_machine, now, write_json
from torch import Tensor
from training import profile

from pivotpatch import PatchClassifier
from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.core.patches import resize_images
from pivotpatch.inference.engine import open_engine
from pivotpatch.runtime.engine import Pixels
from pivotpatch.runtime.values import Adaptive, Calibration, Patching, patch_boxes
from pivotpatch.training.processes import own_settings
from pivotpatch.tuning.tune import find_cutoffs

LABELS = 80
WAYS = ("plain", "published", "ours", "adaptive", "closer", "native")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbones", nargs="+", default=["resnet101", "tresnet_l", "resnet50"], help="timm models")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--size", type=int, default=448, help="pixels a side of the network's input")
    parser.add_argument("--batch", type=int, default=64, help="pictures at once")
    parser.add_argument("--rounds", type=int, default=20, help="batches that are timed, after 3 that are not")
    parser.add_argument("--effort", type=float, default=0.33, help="share of pictures with patches (0.33)")
    parser.add_argument("--trial", action="store_true", help="let cuDNN choose its kernels by trial, in all ways")
    parser.add_argument("--profile", type=Path, help="write a table of each way's kernels here")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, Any] = {
        **describe_machine(device),
        **{name: getattr(args, name) for name in ("size", "batch", "rounds", "effort", "trial")},
        "backbones": {},
    }
    for backbone in args.backbones:
        found = results["backbones"][backbone] = {}
        for way in args.ways:
            found[way] = measure(way, backbone, args, device=device)
            write_json(args.out, results)  # now, for whoever stops it
            beside = f"  {found['plain'] / found[way]:.2f} times the time of plain" if "plain" in found else ""
            print(f"{backbone:12s} {way:10s} {found[way]:8.1f} pictures/s{beside}", flush=True)
        if {"ours", "published"} <= set(found):
            print(f"{'':12s} ours: {found['ours'] / found['published']:.2f} times the published way", flush=True)


@torch.inference_mode()
def measure(way: str, backbone: str, args: argparse.Namespace, *, device: torch.device) -> float:
    """Pictures a second of one way."""
    torch.manual_seed(0)
    cut = Patching(
        source_size=2 * args.size if way == "native" else None,
        closer_size=args.size * 3 // 2 if way == "closer" else None,
    )
    names = [f"label {index}" for index in range(LABELS)]
    model = PatchClassifier(backbone, names, image_size=args.size, patching=cut)
    model.eval()
    side = model.picture_size
    pictures = torch.randint(256, (args.batch, side, side, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
    effort = {"plain": 0.0, "adaptive": args.effort, "closer": args.effort * model.patch_cost / 1.5**2}.get(way, 1.0)
    with own_settings(device) if args.trial else nullcontext():
        if way == "published":
            run: Callable[[Tensor], object] = make_published(model.to(device))
        else:
            if 0 < effort < 1:
                model.adaptive = order_pictures(model, pictures)
            engine, held = open_engine(model, device=device, effort=effort), _hold(pictures)
            run = lambda _: engine.ask(held)  # noqa: E731
        for _ in range(3):
            run(pictures)
        began = now(device)
        for _ in range(args.rounds):
            run(pictures)
        speed = float(args.rounds * args.batch / (now(device) - began))
        if args.profile is not None:
            profile(lambda: run(pictures), args.profile.with_stem(f"{args.profile.stem}-{backbone}-{way}"))
        return speed


def _hold(pictures: Tensor) -> Pixels:
    """What an engine takes, of pictures (B,3,H,W) on any device."""
    return pictures.permute(0, 2, 3, 1).cpu().numpy()


def order_pictures(model: PatchClassifier, pictures: Tensor) -> Adaptive:
    """Random weights doubt all pictures nearly alike: cutoffs by which an effort is the share of these."""
    engine = open_engine(model, device=pictures.device, effort=0)
    calibration = Calibration("image", "platt", (1.0,) * LABELS, (0.0,) * LABELS)
    return Adaptive(calibration, find_cutoffs(torch.from_numpy(engine.ask(_hold(pictures)).probs)))


def make_published(model: PatchClassifier) -> Callable[[Tensor], Tensor]:
    side, prepare = model.preprocessing.image_size, model.preprocessing
    device = next(model.parameters()).device
    mean, std = (torch.tensor(values, device=device).reshape(3, 1, 1) for values in (prepare.mean, prepare.std))

    def look(pictures: Tensor) -> Tensor:
        pixels = pictures.float() / 255
        cut = [pixels[..., box.top : box.bottom, box.left : box.right] for box in patch_boxes(side, side)]
        views = [(resize_images(view, (side, side)) - mean) / std for view in (pixels, *cut)]
        embedding = model.head.embed(model.backbone(torch.cat(views)))
        whole, *parts = embedding.chunk(len(views))
        q, w = (
            torch.stack([project(part) for part in parts], dim=1)
            for project in (model.patch_projection, model.weight_projection)
        )
        probs: Tensor = combine_logits(model.head.project(whole), q, weight_logits=w).probs
        return probs

    def run(pictures: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.float16, enabled=device.type == "cuda"):
            return look(pictures).float().cpu()

    return run


if __name__ == "__main__":
    main()
