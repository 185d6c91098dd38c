"""Intervals of mAP beside the plain loop over resampled rows, in one run: `python benchmarks/bootstrap.py`."""

import argparse
import platform
import time

import torch
from metrics import draw_scores
from torch import Tensor

from pivotpatch.core.bootstrap import resample_average_precision
from pivotpatch.core.metrics import average_precision

SIZES = {"coco256 test": (5_000, 80, 2.9), "COCO val2014": (40_137, 80, 2.9), "many labels": (5_000, 1_000, 10.0)}


def loop_over_rows(scores: Tensor, target: Tensor, *, resamples: int) -> list[float]:
    """The mAP of each resample, by sorting its rows again."""
    generator, means = torch.Generator().manual_seed(0), []
    for _ in range(resamples):
        rows = torch.randint(len(scores), (len(scores),), generator=generator)
        means.append(average_precision(scores[rows], target[rows]).mean)
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--looped", type=int, default=20, help="resamples of the loop, whose time is then scaled")
    args = parser.parse_args()
    threads = torch.get_num_threads()
    print(f"{platform.machine()}, {threads} threads, Python {platform.python_version()}, torch {torch.__version__}")
    print(f"{'scores':32}{'definition':>12}{'loop':>11}{'pivotpatch':>12}{'ratio':>8}{'95 % of mAP':>20}")
    for name, (images, labels, mean_labels) in SIZES.items():
        scores, target = draw_scores(images, labels, mean_labels=mean_labels)
        start = time.perf_counter()
        loop_over_rows(scores, target, resamples=args.looped)
        looped = (time.perf_counter() - start) / args.looped * args.resamples
        for definition in ("step", "envelope"):
            start = time.perf_counter()
            drawn = resample_average_precision(
                {"model": scores},
                target,
                resamples=args.resamples,
                definition=definition,
                generator=torch.Generator().manual_seed(0),
            )
            found = drawn.bound_mean("model")
            took = time.perf_counter() - start
            bounds = f"{100 * found.low:.2f} to {100 * found.high:.2f}"
            size = f"{name}, {images:,} x {labels:,}"
            print(f"{size:32}{definition:>12}{looped:>10.1f}s{took:>11.2f}s{looped / took:>7.0f}x{bounds:>20}")


if __name__ == "__main__":
    main()
