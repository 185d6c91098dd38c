"""PAT inference beside the published way and beside the same network's plain forward pass, pictures a second.

    python benchmarks/inference.py --backbones resnet101 tresnet_l resnet50 --out result.json

Pictures lie decoded on the device, as bytes. Ways, each with the network in evaluation mode:

- plain: the whole image alone; compiled, bfloat16 on a GPU, channels last, cuDNN chooses its kernels by trial;
- published: five views, resized one after the other from the resized image, NCHW, fp16 autocast on a GPU, not compiled;
- ours: the five views made in one batch on the device, one compiled pass, pooled;
- native: the same with patches cut from a source of twice the side;
- small: as native, patches seen at half the side of the image (`patch_size`).
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from recording import describe_machine, write_json
from torch import Tensor

from pivotpatch import PatchClassifier
from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.core.patches import patch_boxes, resize_images
from pivotpatch.inference.scoring import make_network_views
from pivotpatch.training.processes import own_settings

LABELS = 80
WAYS = ("plain", "published", "ours", "native", "small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbones", nargs="+", default=["resnet101", "tresnet_l", "resnet50"], help="timm models")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--size", type=int, default=448, help="pixels a side of the network's input")
    parser.add_argument("--batch", type=int, default=64, help="pictures at once")
    parser.add_argument("--rounds", type=int, default=20, help="batches that are timed, after 3 that are not")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, Any] = {
        **describe_machine(device),
        **{name: getattr(args, name) for name in ("size", "batch", "rounds")},
        "backbones": {},
    }
    for backbone in args.backbones:
        found = results["backbones"][backbone] = {}
        for way in args.ways:
            torch.compiler.reset()
            found[way] = measure(way, backbone, args, device=device)
            beside = f"  {found['plain'] / found[way]:.2f} times the time of plain" if "plain" in found else ""
            print(f"{backbone:12s} {way:10s} {found[way]:8.1f} pictures/s{beside}", flush=True)
        if {"ours", "published"} <= set(found):
            print(f"{'':12s} ours: {found['ours'] / found['published']:.2f} times the published way", flush=True)
        write_json(args.out, results)


@torch.inference_mode()
def measure(way: str, backbone: str, args: argparse.Namespace, *, device: torch.device) -> float:
    """Pictures a second of one way."""
    torch.manual_seed(0)
    larger = way in ("native", "small")
    model = PatchClassifier(
        backbone,
        [f"label {index}" for index in range(LABELS)],
        image_size=args.size,
        source_size=2 * args.size if larger else None,
        patch_size=args.size // 2 if way == "small" else None,
    )
    model = model.to(device).eval()
    side = model.picture_size
    pictures = torch.randint(256, (args.batch, side, side, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
    run = make_published(model) if way == "published" else make_ours(model, whole_image=way == "plain")
    half = torch.float16 if way == "published" else torch.bfloat16
    settings = nullcontext() if way == "published" else own_settings(device)
    with settings, torch.autocast(device.type, half, enabled=device.type == "cuda"):
        for _ in range(3):
            run(pictures)
        began = _now(device)
        for _ in range(args.rounds):
            run(pictures)
        return float(args.rounds * args.batch / (_now(device) - began))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def make_ours(model: PatchClassifier, *, whole_image: bool) -> Callable[[Tensor], Tensor]:
    model = model.to(memory_format=torch.channels_last)

    def look(image: Tensor, patches: Tensor) -> Tensor:
        if whole_image:
            return torch.sigmoid(model.head(model.backbone(image)))
        return model.forward_views(image, patches).probs

    compiled = next(model.parameters()).is_cuda
    if compiled:
        look = torch.compile(look, dynamic=False)

    def run(pictures: Tensor) -> Tensor:
        views = make_network_views(model, pictures, patches=not whole_image, compiled=compiled)
        return look(views.image, views.patches)

    return run


def make_published(model: PatchClassifier) -> Callable[[Tensor], Tensor]:
    side, prepare = model.preprocessing.image_size, model.preprocessing
    device = next(model.parameters()).device
    mean, std = (torch.tensor(values, device=device).reshape(3, 1, 1) for values in (prepare.mean, prepare.std))

    def run(pictures: Tensor) -> Tensor:
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
        return probs.float()

    return run


if __name__ == "__main__":
    main()
