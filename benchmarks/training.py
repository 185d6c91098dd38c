"""PAT-T steps end to end, beside the published way to take them and beside what the network alone costs.

    python benchmarks/training.py --backbones resnet101 tresnet_l resnet50 --out result.json

Three ways, one after the other, on the same generated JPEG files (640 x 480):

- published: five views of a sample through PIL in workers, NCHW, fp16 autocast with a scaled loss, an average of the
  weights tensor by tensor, and a look at the loss after each step;
- ours: the project's loader, step and average with the defaults of `pivotpatch train`: it decides itself whether to
  compile and where images are held, and says so (--set data.hold=nothing decodes them for every step);
- floor: forward and backward of the same network, compiled and rewritten as ours, on augmented views of some of those
  pictures that lie on the device, nothing else.

On a machine without a GPU it runs too (bfloat16 and fp16 are then left out), for a trial: give --size 64.
"""

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from loading import make_published_pipeline, write_photographs
from recording import describe_machine, now, write_json
from torch import Tensor

from pivotpatch import AsymmetricLoss, PatchClassifier
from pivotpatch.accel import quicken_training
from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.data.augment import AugmentPolicy, draw_augmentation
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.views import Views, make_views
from pivotpatch.training.config import load_config
from pivotpatch.training.task import make_task

LABELS = 80
PROFILED = 3  # steps in a profile
RUN_STEPS = 50_000  # left of the run whose steps are timed: 80 epochs of COCO with 128 images per step
LOOKED_AT = 8  # steps whose sections are timed, after the others


class Speed(NamedTuple):
    """What a way of training costs.

    Attributes:
        samples_per_second: pictures a second, five views each.
        memory: most bytes that tensors held at once on the device.
        waiting: share of the time in which the loop waited for its next batch.
        sections: milliseconds of each section of a step, where they were asked for.
    """

    samples_per_second: float
    memory: int
    waiting: float
    sections: dict[str, float] | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbones", nargs="+", default=["resnet101", "tresnet_l", "resnet50"], help="timm models")
    parser.add_argument("--ways", nargs="+", default=["published", "ours", "floor"])
    parser.add_argument("--size", type=int, default=448, help="pixels a side (448)")
    parser.add_argument("--batch", type=int, default=64, help="samples a step")
    parser.add_argument("--pictures", type=int, help="JPEG files to draw; so many that no epoch ends by default")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed, after some that are not")
    parser.add_argument(
        "--warm",
        type=int,
        help="steps that are not; by default more than workers load ahead, so that the pace is settled",
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of our configuration")
    parser.add_argument("--sections", action="store_true", help="tell the time of each section of a step, too")
    parser.add_argument("--profile", type=Path, help="write tables of the kernels of our step and of the floor here")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    args.warm = 2 * args.workers + 4 if args.warm is None else args.warm
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ways: dict[str, Callable[..., Iterator[Speed]]] = {"published": run_published, "ours": run_ours, "floor": run_floor}
    results: dict[str, Any] = {
        **describe_machine(device),
        **{name: getattr(args, name) for name in ("size", "batch", "workers", "warm", "steps", "set")},
        "backbones": {},
    }
    with tempfile.TemporaryDirectory() as name:
        steps = args.warm + args.steps + (LOOKED_AT if args.sections else 0) + (PROFILED if args.profile else 0)
        paths = write_photographs(Path(name), args.pictures or steps * args.batch)
        for backbone in args.backbones:
            found = results["backbones"][backbone] = {}
            for way in args.ways:
                forget(device)
                for speed in ways[way](backbone, paths, args, device=device):
                    found[way] = speed._asdict()
                    write_json(args.out, results)  # now, for whoever stops it
                    print(tell(backbone, way, speed), flush=True)
            print(tell_ratios(found), flush=True)


def tell(backbone: str, way: str, speed: Speed) -> str:
    if speed.sections is not None:
        return "\n".join(f"{'':12s} {name:10s} {time:8.2f} ms" for name, time in speed.sections.items())
    costs = f"{speed.memory / 1e9:6.1f} GB  {speed.waiting:6.1%} waiting"
    return f"{backbone:12s} {way:10s} {speed.samples_per_second:8.1f} samples/s {costs}"


def tell_ratios(found: dict[str, dict[str, float]]) -> str:
    if "ours" not in found:
        return ""
    ours = found["ours"]
    parts = [
        f"{ours['samples_per_second'] / found[way]['samples_per_second']:.2f} of {way}"
        for way in ("published", "floor")
        if way in found
    ]
    if "published" in found and found["published"]["memory"]:
        parts.append(f"{ours['memory'] / found['published']['memory']:.2f} of the published way's memory")
    return f"{'':12s} ours: {', '.join(parts)}" if parts else ""


def forget(device: torch.device) -> None:
    """Begin anew: nothing compiled, nothing cached, the peak of memory forgotten."""
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Clock:
    """Times steps after some that warm up, and how much of that was waiting for data."""

    def __init__(self, device: torch.device, *, steps: int, warm: int) -> None:
        self.device, self.steps, self.warm = device, steps, warm
        self.began = self.waited = 0.0

    def run(self, batches: Iterator[Any], step: Callable[[Any], object], *, batch: int) -> Speed:
        """Take the steps; batches never end."""
        for number in range(self.warm + self.steps):
            if number == self.warm:
                self.began, self.waited = now(self.device), 0.0
            asked = time.perf_counter()
            given = next(batches)
            self.waited += time.perf_counter() - asked
            step(given)
        seconds = now(self.device) - self.began
        memory = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return Speed(self.steps * batch / seconds, memory, self.waited / seconds)


class SectionClock:
    """Times sections by name: on a GPU what the device does in them, for the host is far ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what happens within."""
        began = self._mark()
        yield
        self.marks.append((name, began, self._mark()))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, *, steps: int) -> dict[str, float]:
        """Milliseconds a step of each section."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for name, began, ended in self.marks:
            spent = began.elapsed_time(ended) if self.device.type == "cuda" else 1e3 * (ended - began)
            total[name] = total.get(name, 0.0) + spent / steps
        return total


class _PublishedSet(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, paths: list[Path], *, size: int) -> None:
        self.paths = paths
        self.load = make_published_pipeline((size, size), "torchvision")  # as ours by default

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        target = torch.zeros(LABELS)
        target[index % LABELS] = 1
        return self.load(self.paths[index]), target


def run_published(
    backbone: str, paths: list[Path], args: argparse.Namespace, *, device: torch.device
) -> Iterator[Speed]:
    """The published way to take a step."""
    model = make_network(backbone, args.size).to(device).train()
    average = deepcopy(model)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=1e-4, total_steps=10_000, pct_start=0.2)
    loss = AsymmetricLoss()
    loader = torch.utils.data.DataLoader(
        _PublishedSet(paths, size=args.size),
        batch_size=args.batch,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
        drop_last=True,
        persistent_workers=args.workers > 0,
    )

    def step(given: tuple[Tensor, Tensor]) -> None:
        views, target = (part.to(device, non_blocking=True) for part in given)
        with torch.autocast(device.type, torch.float16, enabled=device.type == "cuda"):
            embedding = model.head.embed(model.backbone(views.flatten(0, 1))).unflatten(0, views.shape[:2])
            p = model.head.project(embedding[:, 0])
            q, w = (
                project(embedding[:, 1:].flatten(0, 1)).unflatten(0, (len(views), -1))
                for project in (model.patch_projection, model.weight_projection)
            )
        out = combine_logits(p.float(), q.float(), weight_logits=w.float())
        cost = loss(out.image_logits, target) + loss(out.pooled_logits, target)
        optimiser.zero_grad()
        scaler.scale(cost).backward()
        scaler.step(optimiser)
        scaler.update()
        schedule.step()
        with torch.no_grad():
            for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                mean.copy_(0.9997 * mean + (1 - 0.9997) * value if value.is_floating_point() else value)
        cost.item()

    yield Clock(device, steps=args.steps, warm=args.warm).run(
        itertools.chain.from_iterable(itertools.repeat(loader)), step, batch=args.batch
    )


def make_network(backbone: str, size: int) -> PatchClassifier:
    torch.manual_seed(0)
    return PatchClassifier(backbone, [f"label {index}" for index in range(LABELS)], image_size=size)


def run_ours(backbone: str, paths: list[Path], args: argparse.Namespace, *, device: torch.device) -> Iterator[Speed]:
    """The project's loader and step, as `pivotpatch train` runs them; its speed, then that and its sections."""
    from pivotpatch.training import step as steps
    from pivotpatch.training.build import build_run
    from pivotpatch.training.config import load_config
    from pivotpatch.training.processes import make_accelerator, own_settings
    from pivotpatch.training.step import compile_run, take_step

    table = paths[0].parent / "pictures.csv"
    rows = [f"{path.name},label {index % LABELS}" for index, path in enumerate(paths)]
    table.write_text("\n".join(["image,labels", *rows]) + "\n", "utf-8")
    config = load_config(
        None,
        [
            f"data.train=table:{table}",
            "data.val_fraction=0",
            f"data.workers={args.workers}",
            f"model.backbone={backbone}",
            "model.pretrained=false",
            f"model.image_size={args.size}",
            f"train.batch_size={args.batch}",
            "output.trackers=[]",
            *args.set,
        ],
    )
    accelerator = make_accelerator(config, paths[0].parent / "run")
    with own_settings(accelerator.device):
        run = build_run(config, accelerator)
        compile_run(run, steps_left=RUN_STEPS)
        print("\n".join(run.choices.values()), flush=True)
        count = 0

        def batches() -> Iterator[Any]:
            epoch = 0
            sampler = run.loader.epoch_sampler
            while True:
                sampler.set_epoch(epoch)
                for batch in run.loader:
                    if len(batch.indices) == args.batch:  # not the last, smaller one, which would be compiled again
                        yield batch
                epoch += 1

        def step(batch: Any) -> None:
            nonlocal count
            take_step(run, batch, step=count, rows=np.arange(args.batch))
            count += 1

        supply = batches()
        speed = Clock(device, steps=args.steps, warm=args.warm).run(supply, step, batch=args.batch)
        yield speed
        if args.sections:
            clock = SectionClock(device)
            with patch.object(steps, "record_function", clock):
                for _ in range(LOOKED_AT):
                    step(next(supply))
            yield speed._replace(sections=clock.read(steps=LOOKED_AT))
        if args.profile is not None:
            profile(lambda: step(next(supply)), args.profile.with_stem(f"{args.profile.stem}-{backbone}"))


def profile(step: Callable[[], object], path: Path) -> None:
    """Write where the time of a few steps goes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(PROFILED):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    path.write_text(seen.key_averages().table(sort_by=by, row_limit=60, max_name_column_width=90) + "\n", "utf-8")


def run_floor(backbone: str, paths: list[Path], args: argparse.Namespace, *, device: torch.device) -> Iterator[Speed]:
    """Forward and backward on views that are there already, with the settings of our own way; as `run_ours`."""
    from pivotpatch.runtime.decoding import decode_image
    from pivotpatch.training.processes import own_settings

    model = make_network(backbone, args.size).to(device)
    if device.type == "cuda":
        quicken_training(model)
    chosen = itertools.islice(itertools.cycle(paths), args.batch)
    pixels = np.stack([decode_image(path, size=(args.size, args.size)) for path in chosen])
    # Augmented as ours are: the same kernels take longer on some pictures than on others, where power is short.
    drawn = draw_augmentation(5 * args.batch, policy=AugmentPolicy(), generator=torch.Generator().manual_seed(0))
    views = make_views(model, torch.from_numpy(pixels).permute(0, 3, 1, 2).to(device), augmentation=drawn)
    with own_settings(device):
        step = make_floor_step(model, batch=args.batch, compiler={} if device.type == "cuda" else None, views=views)
        speed = Clock(device, steps=args.steps, warm=min(8, args.warm)).run(
            itertools.repeat(None), step, batch=args.batch
        )
        yield speed
        if args.sections:
            clock = SectionClock(device)
            for _ in range(LOOKED_AT):
                step(None, watch=clock)
            yield speed._replace(sections=clock.read(steps=LOOKED_AT))
        if args.profile is not None:
            profile(lambda: step(None), args.profile.with_stem(f"{args.profile.stem}-{backbone}-floor"))


def make_floor_step(
    model: Classifier,
    *,
    batch: int,
    compiler: Mapping[str, Any] | None,
    dtype: torch.dtype = torch.bfloat16,
    channels_last: bool = True,
    views: Views | None = None,
) -> Callable[..., Tensor]:
    """A step forward and backward on views that lie on the network's device; it gives the loss.

    Args:
        model: the network, which is put in training mode.
        batch: samples a step.
        compiler: arguments of `torch.compile`; None does not compile.
        dtype: of autocast on a GPU; on a CPU there is none.
        channels_last: memory order of weights and images.
        views: of `batch` samples; random ones by default.
    """
    order = torch.channels_last if channels_last else torch.contiguous_format
    patches = model.patching.count if isinstance(model, PatchClassifier) else 0
    task = make_task(
        model.to(memory_format=order).train(),
        load_config(None, ["data.train=none", f"task.kind={'patch' if patches else 'image'}"]),
    )
    device, size = next(model.parameters()).device, model.preprocessing.image_size
    small = model.patching.patch_size or size if isinstance(model, PatchClassifier) else size
    if views is None:
        image = torch.randn(batch, 3, size, size, device=device)
        views = Views(image, torch.randn(batch, patches, 3, small, small, device=device))
    target = (torch.rand(batch, len(model.labels), device=device) < 0.04).float()
    with torch.no_grad():  # as after some steps: a new network multiplies by zeros, for which a GPU needs less power
        for weight in model.parameters():
            weight.add_(1e-3 * torch.randn_like(weight))
    if compiler is not None:
        task.compile(dynamic=False, **compiler)

    def step(_nothing: None, *, watch: Callable[[str], Any] = torch.profiler.record_function) -> Tensor:
        with watch("forward"), torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
            cost: Tensor = task(views, target).sum()
        with watch("backward"):
            cost.backward()
        for weight in model.parameters():
            weight.grad = None
        return cost.detach()

    return step


if __name__ == "__main__":
    random.seed(0)
    main()
