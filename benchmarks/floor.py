"""What share of the measured matrix peak a network's forward and backward pass reaches, and what raises it.

    python benchmarks/floor.py --backbones resnet50 --out result.json

Every variant takes the floor's step of `training.py` (an image and four patches a sample, on the device already) with
one thing changed from "compile". Its FLOPs are counted in eager mode, without what checkpointing computes twice; the
peak is that of one large matrix product. The first step's time is mostly compilation, less where an earlier variant
compiled the same kernels. The loss of the first step tells whether variants of equal batch compute the same.

On a machine without a GPU it runs too (in float32), for a trial: give --size 64 --batch 4.
"""

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from recording import describe_machine, write_json
from torch.utils.flop_counter import FlopCounterMode
from training import LABELS, Clock, forget, make_floor_step

from pivotpatch import PatchClassifier
from pivotpatch.accel import quicken_training
from pivotpatch.runtime.values import Patching
from pivotpatch.training.processes import own_settings


@dataclass(frozen=True)
class Variant:
    """One way to take the floor's step.

    Attributes:
        compiler: arguments of `torch.compile`; None does not compile.
        batch: samples a step, in those of --batch.
        dtype: of autocast.
        channels_last: memory order of weights and images.
        cudnn_benchmark: whether cuDNN chooses its kernels by trial.
        half_patches: whether patches are seen at half the side of the image.
        checkpointing: whether the backbone's blocks are computed again on the way back.
        rewritten: whether the network is rewritten before, by `quicken_training`, as training does.
    """

    compiler: Mapping[str, Any] | None = field(default_factory=dict)
    batch: float = 1
    dtype: torch.dtype = torch.bfloat16
    channels_last: bool = True
    cudnn_benchmark: bool = True
    half_patches: bool = False
    checkpointing: bool = False
    rewritten: bool = False


VARIANTS = {
    "eager": Variant(None),
    "compile": Variant(),
    "rewritten": Variant(rewritten=True),
    "tuned": Variant({"options": {"max_autotune_pointwise": True}}, rewritten=True),
    "coordinate-descent": Variant({"options": {"coordinate_descent_tuning": True}}, rewritten=True),
    "cudagraphs": Variant({"mode": "reduce-overhead"}),
    "conv1x1-as-product": Variant({"options": {"conv_1x1_as_mm": True}}),
    "max-autotune": Variant({"mode": "max-autotune-no-cudagraphs"}),
    "half-batch": Variant(batch=0.5),
    "double-batch": Variant(batch=2),
    "quadruple-batch": Variant(batch=4),
    "checkpointing": Variant(batch=4, checkpointing=True),
    "half-patches": Variant(half_patches=True),
    "fp16": Variant(dtype=torch.float16),
    "nchw": Variant(channels_last=False),
    "benchmark-off": Variant(cudnn_benchmark=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbones", nargs="+", default=["resnet50"], help="timm models")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="NAME")
    parser.add_argument("--size", type=int, default=448, help="pixels a side")
    parser.add_argument("--batch", type=int, default=64, help="samples a step")
    parser.add_argument(
        "--steps", type=int, default=12, help="steps of that batch that are timed, after 4 that are not"
    )
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file, after each variant")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = measure_peak(device)
    results: dict[str, Any] = {
        **describe_machine(device),
        **{name: getattr(args, name) for name in ("size", "batch", "steps")},
        "peak_tflops": peak / 1e12,
        "backbones": {},
    }
    print(f"{results['device']}, torch {results['torch']}: matrix peak {peak / 1e12:.1f} TFLOP/s")
    print(f"{'':32} batch  samples/s  TFLOP/s   peak      GB  first step  loss")
    for backbone in args.backbones:
        found = results["backbones"][backbone] = {}
        for name in args.variants:
            found[name] = attempt(partial(measure, backbone, name, args, device=device), device)
            if "error" not in found[name]:
                tflops = found[name]["samples_per_second"] * found[name]["gflop_per_sample"] / 1e3
                found[name] |= {"tflops": tflops, "share_of_peak": tflops * 1e12 / peak}
            print(f"{backbone:12s} {name:18s} {tell(found[name])}", flush=True)
            write_json(args.out, results)


def tell(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return f"{found['error'][:100]} after {found['seconds']:.0f} s"
    return (
        f"{found['batch']:5d} {found['samples_per_second']:10.1f} {found['tflops']:8.1f} {found['share_of_peak']:6.1%} "
        f"{found['memory_gb']:7.1f} {found['first_step_seconds']:9.1f} s  {found['loss']:.4f}"
    )


def attempt(work: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """What work finds, or the error that ended it; either way nothing of it is left on the device."""
    began = time.perf_counter()
    try:
        found = work()
    except Exception as error:
        reason = " ".join(str(error).split())
        found = {"error": f"{type(error).__name__}: {reason[:300]}", "seconds": time.perf_counter() - began}
    gc.collect()
    forget(device)
    return found


def measure_peak(device: torch.device) -> float:
    """FLOP/s of a large matrix product, the best of six rounds."""
    on_gpu = device.type == "cuda"
    side, count, dtype = (8192, 20, torch.bfloat16) if on_gpu else (1024, 2, torch.float32)
    one, other = torch.randn(2, side, side, device=device, dtype=dtype)
    seconds = [time_call(lambda: [one @ other for _ in range(count)], device) for _ in range(6)]
    return count * 2 * side**3 / min(seconds)


def time_call(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that work takes, until the device has done it."""
    clock = Clock(device, steps=1, warm=0)
    return 1 / clock.run(itertools.repeat(None), lambda _nothing: work(), batch=1).samples_per_second


def measure(backbone: str, name: str, args: argparse.Namespace, *, device: torch.device) -> dict[str, Any]:
    """What a variant costs; its share of the peak is left to the caller."""
    variant = VARIANTS[name]
    batch = max(round(args.batch * variant.batch), 2)
    labels = [f"label {index}" for index in range(LABELS)]
    torch.manual_seed(0)
    with device:
        cut = Patching(patch_size=args.size // 2 if variant.half_patches else None)
        model = PatchClassifier(backbone, labels, image_size=args.size, patching=cut)
    flops = count_flops(model)
    if variant.rewritten:
        quicken_training(model)
    if variant.checkpointing:
        model.backbone.network.set_grad_checkpointing(True)
    forget(device)
    with own_settings(device):
        torch.backends.cudnn.benchmark = variant.cudnn_benchmark
        torch.manual_seed(0)
        step = make_floor_step(
            model, batch=batch, compiler=variant.compiler, dtype=variant.dtype, channels_last=variant.channels_last
        )
        losses: list[float] = []
        first = time_call(lambda: losses.append(step(None).item()), device)
        steps = max(round(args.steps / variant.batch), 3)
        speed = Clock(device, steps=steps, warm=3).run(itertools.repeat(None), step, batch=batch)
    return {
        "batch": batch,
        "samples_per_second": speed.samples_per_second,
        "gflop_per_sample": flops / 1e9,
        "memory_gb": speed.memory / 1e9,
        "first_step_seconds": first,
        "loss": losses[0] / batch,
    }


def count_flops(model: PatchClassifier) -> int:
    """FLOPs forward and backward of one sample; a product and a sum are two."""
    step = make_floor_step(model, batch=1, compiler=None)
    with FlopCounterMode(display=False) as counter:
        step(None)
    return int(counter.get_total_flops())


if __name__ == "__main__":
    main()
