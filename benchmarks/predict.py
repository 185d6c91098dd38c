"""Pictures a second on the CPU, from JPEG files to tags: the whole image alone, PAT, adaptive efforts, ONNX Runtime.

    python benchmarks/predict.py [--model RUN] [--efforts 0.25 0.5 0.75] [--json [FILE]]

All ways but one run a `Predictor` of the same network and take turns, so that a busy moment hits all alike; times are
medians. The published way reads pictures with PIL and asks the network as it was trained about five views in NCHW.
The pictures are generated, 640 x 480 JPEG, and say nothing of a network's doubts: the cutoffs of the efforts are set by
the pictures themselves, so that each effort looks at the share of them that it names.
"""

import argparse
import json
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from inference import make_published
from loading import write_photographs
from PIL import Image
from recording import measure

from pivotpatch.export import export_onnx
from pivotpatch.inference.engine import TorchEngine, open_engine
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.process import keep_freed_memory
from pivotpatch.runtime.decoding import decode_image
from pivotpatch.runtime.engine import Engine, open_onnx
from pivotpatch.runtime.predictor import Predictor
from pivotpatch.runtime.values import Adaptive, Calibration
from pivotpatch.tuning.tune import find_cutoffs

RESULT = Path(__file__).parent / "results" / "predict_cpu.json"


class Way(NamedTuple):
    """Something to time, and its cost in passes over an image."""

    run: Callable[[], object]
    passes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tagger", help="a run or checkpoint with patches (the bundled tagger)")
    parser.add_argument("--efforts", type=float, nargs="*", default=[0.25, 0.5, 0.75])
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, nargs="?", const=RESULT, help="write the figures, too (%(const)s)")
    args = parser.parse_args()
    keep_freed_memory()  # as the command line does
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        ways = make_ways(args, Path(name))
        seconds = measure({name: way.run for name, way in ways.items()}, rounds=args.rounds)
    found = {
        name: {
            "passes": way.passes,
            "pictures a second": args.pictures / seconds[name],
            "ms a picture": 1000 * seconds[name] / args.pictures,
            "times the time of plain": seconds[name] / seconds["plain"],
        }
        for name, way in ways.items()
    }
    about = {
        "machine": f"{platform.machine()}, {args.threads} threads",
        "torch": torch.__version__,
        **{name: getattr(args, name) for name in ("model", "pictures", "batch_size", "rounds")},
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print_table(found)
    if args.json is not None:
        args.json.write_text(json.dumps({**about, "ways": found}, indent=1) + "\n", "utf-8")


def make_ways(args: argparse.Namespace, folder: Path) -> dict[str, Way]:
    """All that is to be timed, by name."""
    paths = write_photographs(folder, args.pictures)
    engine = open_engine(args.model, device="cpu", effort=1)
    if not isinstance(engine.model, PatchClassifier):
        raise SystemExit(f"{args.model} has no patches, so that there is nothing to compare")
    model, size = engine.model, (engine.picture_size, engine.picture_size)
    aim_efforts(model, paths)
    again = model.patch_cost if model.closer_size is None else model.closer_cost(model.closer_size)
    whole, looks = folder / "whole.onnx", folder / "looks.onnx"
    export_onnx(model, whole)
    export_onnx(model, looks, half=True, looks=True)
    engines: dict[str, tuple[Engine, float]] = {
        "plain": (TorchEngine(model, effort=0), 1.0),
        "PAT": (engine, 1 + model.patch_cost),
        **{f"effort {e:g}": (TorchEngine(model, effort=e), 1 + e * again) for e in args.efforts},
        "PAT, ONNX, whole": (open_onnx(whole, device="cpu", effort=1), 1 + model.patch_cost),
        "PAT, ONNX, looks": (open_onnx(looks, device="cpu", effort=1), 1 + model.patch_cost),
        **{f"effort {e:g}, looks": (open_onnx(looks, device="cpu", effort=e), 1 + e * again) for e in args.efforts},
    }
    ways = {
        "reading alone": Way(lambda: [decode_image(path, size=size) for path in paths], 0.0),
        "published": Way(make_published_way(args, paths), 1.0 + model.patching.count),
    }
    for name, (asked, passes) in engines.items():
        predictor = Predictor(asked, batch_size=args.batch_size)
        ways[name] = Way(lambda predictor=predictor: predictor(paths), passes)  # type: ignore[misc]
    return ways


def make_published_way(args: argparse.Namespace, paths: list[Path]) -> Callable[[], object]:
    engine = open_engine(args.model, device="cpu", effort=1, fold=False)
    assert isinstance(engine.model, PatchClassifier)
    model = engine.model.to(memory_format=torch.contiguous_format)
    look, side = make_published(model), model.preprocessing.image_size

    def read(path: Path) -> torch.Tensor:
        with Image.open(path) as picture:
            pixels = np.array(picture.convert("RGB").resize((side, side), Image.Resampling.BILINEAR))
        return torch.from_numpy(pixels).permute(2, 0, 1)

    @torch.inference_mode()
    def run() -> None:
        for start in range(0, len(paths), args.batch_size):
            look(torch.stack([read(path) for path in paths[start : start + args.batch_size]]))

    return run


def aim_efforts(model: PatchClassifier, paths: list[Path]) -> None:
    """Set the cutoffs by pictures, so that an effort looks at as many of them as it names."""
    nothing = Calibration("image", "none", (1.0,) * len(model.labels), (0.0,) * len(model.labels))
    calibration = nothing if model.adaptive is None else model.adaptive.calibration
    model.adaptive = Adaptive(calibration, (0.0, 1.0))
    said = Predictor(TorchEngine(model, effort=0))(paths)
    model.adaptive = Adaptive(calibration, find_cutoffs(torch.tensor(np.stack([each.probs for each in said]))))


def print_table(found: dict[str, dict[str, Any]]) -> None:
    print(f"{'':20}{'passes':>8}{'pictures/s':>12}{'ms a picture':>14}{'times plain':>13}")
    for name, row in found.items():
        passes, speed, spent, ratio = row.values()
        print(f"{name:20}{passes:8.2f}{speed:12.1f}{spent:14.1f}{ratio:13.2f}")


if __name__ == "__main__":
    main()
