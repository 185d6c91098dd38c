"""How cost grows with the grid, the resolution, the number of labels and the number of processes.

    python benchmarks/growth.py --out result.json

Parts, each one curve or more:

- grid, resolution: forward and backward of PAT-T's network on views that lie on the device, the floor of `training.py`;
- labels: the same for each head; where a batch is too large for the device a quarter of it is tried, and so on;
- systems: the same for every head there is, of a plain model and of PAT-T, and for MCAR and HCP;
- metrics: the asymmetric loss on the device, average precision and the audit of pairs on the CPU, for 2,000 pictures;
- processes: `pivotpatch train` on drawn scenes with gloo on the CPU, one thread a process, the same batch in all.

On a machine without a GPU it runs too, for a trial: give --size 64 --sizes 64 96 --batch 4 --backbone resnet18.
"""

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from floor import attempt, time_call
from front import Cost, build
from recording import describe_machine, write_json
from torch import Tensor
from training import LABELS, Clock, forget, make_floor_step

from pivotpatch import AsymmetricLoss, PatchClassifier
from pivotpatch.audit import rank_pairs, rate_pairs
from pivotpatch.core.metrics import average_precision
from pivotpatch.inference.scores import Scores
from pivotpatch.models.heads import HEADS
from pivotpatch.models.limits import HEAD_NAMES
from pivotpatch.runtime.values import Patching
from pivotpatch.training.processes import own_settings

Points = Iterator[tuple[str, dict[str, Any]]]


def main() -> None:
    parts: dict[str, Callable[[argparse.Namespace, torch.device], Points]] = {
        "grid": grow_grid,
        "resolution": grow_resolution,
        "labels": grow_labels,
        "systems": list_systems,
        "metrics": grow_metrics,
        "processes": grow_processes,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=list(parts), choices=parts)
    parser.add_argument("--backbone", default="resnet50", help="a timm model")
    parser.add_argument("--size", type=int, default=224, help="pixels a side where not the resolution grows")
    parser.add_argument("--grids", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 336, 448])
    parser.add_argument("--labels", nargs="+", type=int, default=[80, 1000, 10000])
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=HEADS)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batch", type=int, default=32, help="samples a step")
    parser.add_argument("--pictures", type=int, default=2000, help="that loss, metrics and audit see")
    parser.add_argument("--steps", type=int, default=20, help="most steps that are timed; fewer where they are slow")
    parser.add_argument("--compile", action="store_true", help="compile the network")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file, after each point")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = {name: value for name, value in vars(args).items() if name not in ("out", "part")}
    results: dict[str, Any] = {**describe_machine(device), "threads": torch.get_num_threads(), **asked, "curves": {}}
    print(f"{results['device']}, torch {results['torch']}, {results['threads']} threads")
    for part in args.part:
        curve = results["curves"][part] = {}
        for point, found in parts[part](args, device):
            curve[point] = found
            print(f"{part:11s} {point:20s} {tell(found)}", flush=True)
            write_json(args.out, results)


def tell(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])[:100]
    return "  ".join(f"{name} {value:.4g}" for name, value in found.items() if value is not None)


def grow_grid(args: argparse.Namespace, device: torch.device) -> Points:
    for grid in args.grids:
        work = partial(measure_step, args, device, partial(make_model, args, grid=grid), batch=args.batch)
        yield str(grid), attempt(work, device)


def grow_resolution(args: argparse.Namespace, device: torch.device) -> Points:
    for size in args.sizes:
        work = partial(measure_step, args, device, partial(make_model, args, size=size), batch=args.batch)
        yield str(size), attempt(work, device)


def grow_labels(args: argparse.Namespace, device: torch.device) -> Points:
    for head, labels in itertools.product(args.heads, args.labels):
        batch, too_large = args.batch, None
        make = partial(make_model, args, head=head, labels=labels)
        while True:
            work = partial(measure_step, args, device, make, batch=batch)
            found = attempt(work, device)
            if batch == 1 or not found.get("error", "").startswith("OutOfMemoryError"):
                break
            batch, too_large = max(batch // 4, 1), batch
        yield f"{head} {labels}", found | ({} if too_large is None else {"too_large_batch": too_large})


def list_systems(args: argparse.Namespace, device: torch.device) -> Points:
    """A step of each head, with one look and with PAT-T's five, and of MCAR and HCP, which look again on their own."""
    costs = [Cost(head, args.size, patches) for head in HEAD_NAMES for patches in (False, True)]
    for cost in [*costs, *(Cost("linear", args.size, False, look=look) for look in ("crops", "windows"))]:
        work = partial(measure_step, args, device, partial(build, cost, args.backbone), batch=args.batch)
        yield str(cost), attempt(work, device)


def make_model(
    args: argparse.Namespace, *, size: int | None = None, grid: int = 2, head: str = "linear", labels: int = LABELS
) -> Any:
    """A PAT-T, new."""
    names = [f"label {index}" for index in range(labels)]
    return PatchClassifier(args.backbone, names, head=head, image_size=size or args.size, patching=Patching(grid))


def measure_step(
    args: argparse.Namespace, device: torch.device, make: Callable[[], Any], *, batch: int
) -> dict[str, Any]:
    """Samples a second forward and backward, and the most memory that it took."""
    with device:
        model = make().train()
    forget(device)
    with own_settings(device):
        step = make_floor_step(model, batch=batch, compiler={} if args.compile else None)
        step(None)
        steps = count_rounds(time_call(lambda: step(None), device), most=args.steps)
        speed = Clock(device, steps=steps, warm=0).run(itertools.repeat(None), step, batch=batch)
    return {"batch": batch, "samples_per_second": speed.samples_per_second, "memory_gb": speed.memory / 1e9}


def count_rounds(seconds: float, *, most: int) -> int:
    """How often to time what takes so long once: some second of it."""
    return min(max(round(1 / seconds), 1), most)


def grow_metrics(args: argparse.Namespace, device: torch.device) -> Points:
    for labels in args.labels:
        yield str(labels), attempt(partial(measure_metrics, args.pictures, labels, device), device)


def measure_metrics(pictures: int, labels: int, device: torch.device) -> dict[str, Any]:
    """Time of loss (forward and backward), metric and audit; what memory the audit adds, and all that is held then."""
    scores = draw_scores(pictures, labels)
    loss, logits, target = AsymmetricLoss(), scores.get("image").clone().to(device), scores.target.to(device)
    logits.requires_grad_()

    def compute_loss() -> Tensor:
        (gradient,) = torch.autograd.grad(loss(logits, target), logits)
        return gradient

    compute_loss()
    rounds = count_rounds(time_call(compute_loss, device), most=20)
    loss_seconds = time_call(lambda: [compute_loss() for _ in range(rounds)], device) / rounds
    cpu, pairs = torch.device("cpu"), []
    precision_seconds = time_call(lambda: average_precision(scores.get("image"), scores.target), cpu)
    before = watch_memory()
    audit_seconds = time_call(lambda: pairs.append(len(rank_pairs(rate_pairs(scores), by="gap"))), cpu)
    peak = read_memory("VmHWM")
    return {
        "loss_ms": 1000 * loss_seconds,
        "average_precision_seconds": precision_seconds,
        "audit_seconds": audit_seconds,
        "audit_gb": None if before is None or peak is None else (peak - before) / 1e9,
        "process_gb": None if peak is None else peak / 1e9,
        "pairs": pairs[0],
    }


def draw_scores(pictures: int, labels: int) -> Scores:
    """Scores of a fair model for pictures of some five labels each, most labels rare."""
    generator = torch.Generator().manual_seed(0)
    share = 1 / (1 + torch.arange(labels))
    present = torch.multinomial((share * torch.ones(pictures, 1)), 5, generator=generator)
    target = torch.zeros(pictures, labels).scatter_(1, present, 1.0)
    logits = torch.randn(pictures, labels, generator=generator) + 4 * target - 3
    names = [tuple(f"{kind} {index}" for index in range(count)) for kind, count in (("l", labels), ("p", pictures))]
    return Scores(names[0], names[1], target=target, logits={"image": logits})


def watch_memory() -> int | None:
    """Bytes that the process holds; from now on Linux notes the most anew."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
    except OSError:  # another system, or one that does not allow it
        return None
    return read_memory("VmRSS")


def read_memory(name: str) -> int | None:
    """A number of bytes from what Linux says of the process."""
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    except OSError:
        return None
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def grow_processes(args: argparse.Namespace, device: torch.device) -> Points:
    for count in args.processes:
        yield str(count), attempt(partial(train_scenes, count), device)


def train_scenes(processes: int) -> dict[str, Any]:
    """Samples a second of PAT-T on scenes that are drawn before; the batch is shared among the processes."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "run")
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "pivotpatch"]
        settings = [
            "scenes:?count=512&size=64",
            "data.val_fraction=0",
            "data.hold=memory",
            "data.workers=0",
            "model.backbone=test_resnet",
            "model.pretrained=false",
            "model.image_size=64",
            "train.batch_size=64",
            "train.epochs=4",
            "output.trackers=[]",
        ]
        quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", *launch, "train", *settings, "--out", str(out)]
        done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-300:])
        metrics = json.loads((out / "metrics.json").read_text("utf-8"))
    return {"samples_per_second": metrics["pictures_per_second"], "steps": metrics["steps"]}


if __name__ == "__main__":
    main()
