"""What each part of our way of asking a network on a GPU is worth, beside batch norm folding and torch.compile.

    python benchmarks/craft.py --backbones resnet101 tresnet_l --out result.json

Every way is a `TorchEngine` in bfloat16, channels last, batch norms folded, and gives the same answers: image and four
patches of images that lie on the host as bytes, answers back on the host. They differ in what is done to the model:

- eager: nothing more;
- ours: the stem folded and channels padded (rewrites), convolutions fused with what follows (fusing), and kernels of
  ours for what cuDNN does not take in (kernels), as `Predictor` asks;
- ours less ...: without one of these;
- compiled: as eager, the model compiled by torch;
- compiled + rewrites: with these besides.

All ways are made first; then each is timed in turn, several times over, and the median counts. --trial adds each
again with cuDNN choosing its kernels by trial.
"""

import argparse
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from recording import describe_machine, now, write_json
from torch import nn

from pivotpatch import PatchClassifier
from pivotpatch.accel import fusing
from pivotpatch.accel.fusing import fuse_activations
from pivotpatch.accel.inference import fold_norms
from pivotpatch.accel.rewrites import rewrite_for_inference
from pivotpatch.inference.engine import TorchEngine
from pivotpatch.runtime.engine import Pixels

LABELS = 80


class Way(NamedTuple):
    """What is done to a folded network."""

    rewrites: bool = False
    fusing: bool = False
    kernels: bool = False
    compiled: bool = False


OURS = Way(rewrites=True, fusing=True, kernels=True)
WAYS = {
    "ours": OURS,
    "compiled": Way(compiled=True),
    "eager": Way(),
    "ours less rewrites": OURS._replace(rewrites=False),
    "ours less fusing": OURS._replace(fusing=False),
    "ours less kernels": OURS._replace(kernels=False),
    "compiled + rewrites": Way(compiled=True, rewrites=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbones", nargs="+", default=["resnet101", "tresnet_l"], help="timm models")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--size", type=int, default=448, help="pixels a side of the network's input")
    parser.add_argument("--batch", type=int, default=64, help="pictures at once")
    parser.add_argument("--rounds", type=int, default=10, help="batches of one timing")
    parser.add_argument("--turns", type=int, default=5, help="timings of each way")
    parser.add_argument("--trial", action="store_true", help="time each way with cuDNN's choice by trial, too")
    parser.add_argument("--commit", default="", help="of the code, for the record")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = ("size", "batch", "rounds", "turns", "commit")
    results: dict[str, Any] = {
        **describe_machine(device),
        **{name: getattr(args, name) for name in asked},
        "unit": "images/s",
        "backbones": {},
    }
    for backbone in args.backbones:
        torch.compiler.reset()
        results["backbones"][backbone] = compare(backbone, args, device=device)
        write_json(args.out, results)


@torch.inference_mode()
def compare(backbone: str, args: argparse.Namespace, *, device: torch.device) -> dict[str, Any]:
    """Images a second of each way with a backbone: the median, and how far timings lie apart."""
    torch.manual_seed(0)
    labels = [f"label {index}" for index in range(LABELS)]
    model = PatchClassifier(backbone, labels, image_size=args.size).eval()
    model.backbone = fold_norms(model.backbone, side=args.size)
    shape = (args.batch, args.size, args.size, 3)
    pictures = torch.randint(256, shape, dtype=torch.uint8).numpy()
    trials = (False, True) if args.trial else (False,)
    engines, answers, waits = {}, {}, {}
    for name in args.ways:
        began = now(device)
        engines[name] = make_engine(deepcopy(model), WAYS[name], device=device)
        with using(WAYS[name], trial=False):
            answers[name] = engines[name].ask(pictures).probs
        waits[name] = now(device) - began
        print(f"{backbone:10s} {name:20s} ready after {waits[name]:.1f} s", flush=True)
        for trial in trials:
            time_rounds(engines[name], pictures, WAYS[name], trial=trial, rounds=2)
    names = [(name, trial) for trial in trials for name in args.ways]
    speeds: dict[tuple[str, bool], list[float]] = {each: [] for each in names}
    for _ in range(args.turns):
        for name, trial in names:
            seconds = time_rounds(engines[name], pictures, WAYS[name], trial=trial, rounds=args.rounds)
            speeds[name, trial].append(args.rounds * args.batch / seconds)
    found = {}
    best = max(statistics.median(speeds[name, trial]) for name, trial in names if name == "compiled")
    for name, trial in names:
        median = statistics.median(speeds[name, trial])
        called = f"{name}, trial" if trial else name
        apart = abs(answers[name] - answers["eager"]).max().item() if "eager" in answers else None
        found[called] = {
            "images/s": round(median, 1),
            "slowest": round(min(speeds[name, trial]), 1),
            "fastest": round(max(speeds[name, trial]), 1),
            "beside the best compiled": round(median / best, 4),
            "seconds to be ready": round(waits[name], 1),
            "largest difference to eager": apart,
        }
        print(f"{backbone:10s} {called:28s} {median:8.1f} images/s  {median / best:.3f} of compiled", flush=True)
    return found


def make_engine(model: PatchClassifier, way: Way, *, device: torch.device) -> TorchEngine:
    """As `open_engine` does it with a folded network, but for what a way leaves out."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backbone = model.backbone
    if way.rewrites:
        rewrite_for_inference(backbone)
    if way.fusing:
        backbone.network = fuse_activations(backbone.network)
    for part in backbone.modules():
        if type(part) is nn.Conv2d:
            part.to(dtype)
    engine = TorchEngine(model.to(memory_format=torch.channels_last), device=device, dtype=dtype, effort=1)
    if way.compiled:
        model.forward_views = torch.compile(model.forward_views, dynamic=False)  # type: ignore[method-assign]
    return engine


@contextmanager
def using(way: Way, *, trial: bool) -> Iterator[None]:
    """Let kernels of ours run, or not."""
    before = torch.backends.cudnn.benchmark
    with ExitStack() as stack:
        if not way.kernels:
            stack.enter_context(patch.object(fusing, "can_run", lambda *_: False))
        torch.backends.cudnn.benchmark = trial
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


def time_rounds(engine: TorchEngine, pictures: Pixels, way: Way, *, trial: bool, rounds: int) -> float:
    """Seconds that so many batches take, after one that is not timed."""
    with using(way, trial=trial):
        engine.ask(pictures)
        began = now(engine.device)
        for _ in range(rounds):
            engine.ask(pictures)
        return now(engine.device) - began


if __name__ == "__main__":
    main()
