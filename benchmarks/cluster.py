"""Images per second against workers on Ray, and what a shard costs beside its images.

`OMP_NUM_THREADS=1 python benchmarks/cluster.py --images photos/ --workers 1 2 4 8 --json out.json`. Each count of
workers tags that many times the same images with the bundled tagger on a Ray cluster of this machine, started before
the clock; one process without Ray is the measure. The rate is that from the first tags on, when models are open and
workers warm, the seconds are of the whole job. A second pass with an engine that answers at once, and shards of one
batch, leaves what a shard itself costs. `--gpus 0.5` gives each worker half a GPU.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pivotpatch.cluster import on_ray, tag_on_ray
from pivotpatch.errors import import_extra
from pivotpatch.runtime.bulk import Work, tag_pictures
from pivotpatch.runtime.engine import Answer, Array, Engine, Pixels
from pivotpatch.runtime.files import find_images
from pivotpatch.runtime.predictor import Predictor


class Instant:
    """Answers at once, so that the time is that of everything else."""

    name = "instant"
    labels: tuple[str, ...] = ("a", "b")
    thresholds: tuple[float, ...] | None = None
    picture_size, grid, overlap, effort, interpolation = 8, 0, 0.0, 1.0, "bilinear"

    def __init__(self) -> None:
        self.preferences: Mapping[str, tuple[float, ...]] = {}

    def ask(self, images: Pixels) -> Answer[Array]:
        """Half of everything."""
        probs = np.full((len(images), 2), 0.5, np.float32)
        return Answer(probs, probs)

    def digest(self) -> str:
        """Of the one that there is."""
        return "instant"


class Measured(NamedTuple):
    """How fast a job was."""

    images_per_second: float  # from the first tags on
    seconds: float  # in all, with models opened and files joined


def load(effort: float, device: str = "cpu") -> Engine:
    return Predictor.load(effort=effort, device=device).engine


def measure(engine: Engine, images: list[str], work: Work | None = None, *, batch_size: int = 64) -> Measured:
    """Tag all images."""
    told: list[tuple[float, int]] = []

    def listen(what: str, done: int, _total: int | None) -> None:
        if what == "tag" and done and (not told or told[-1][1] < done):
            told.append((time.perf_counter(), done))

    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        out = Path(folder) / "tags.jsonl"
        tag_pictures(engine, iter(images), out, work=work, progress=listen, batch_size=batch_size)
        seconds = time.perf_counter() - begun
    (first, few), (last, all_) = told[0], told[-1]
    return Measured((all_ - few) / (last - first) if last > first else len(images) / seconds, seconds)


def repeat(images: list[str], count: int) -> Iterator[str]:
    yield from (images[place % len(images)] for place in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", required=True, help="a folder of photographs")
    parser.add_argument("--count", type=int, default=512, help="images per worker")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cpus", type=int, default=1, help="cores per worker")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per worker")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--effort", type=float, default=0.6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ray = import_extra("ray")
    images = [str(Path(path).resolve()) for path in find_images([args.images])]
    cores = args.cpus * max(args.workers)
    ray.init(address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False)
    rates: dict[str, dict[str, float]] = {}
    results: dict[str, object] = {
        "cores": len(os.sched_getaffinity(0)),
        "ray": ray.__version__,
        "images_per_worker": args.count,
        "effort": args.effort,
        "cores_per_worker": args.cpus,
        "gpus_per_worker": args.gpus,
        "rates": rates,
    }

    def note(name: str, count: int, found: Measured) -> None:
        rates[name] = {"images": count, **found._asdict()}
        print(f"{name}: {found.images_per_second:.1f} images/s ({count} images in {found.seconds:.1f} s)", flush=True)
        if args.json:  # each as soon as it is known
            args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")

    if not args.gpus:
        engine = load(args.effort)
        note("one process", args.count, measure(engine, list(repeat(images, args.count))))
    for workers in args.workers:
        count = args.count * workers
        opened = partial(load, args.effort, "cuda" if args.gpus else "cpu")
        work = tag_on_ray(opened, load(args.effort).digest(), workers=workers, cpus=args.cpus, gpus=args.gpus)
        found = measure(load(args.effort), list(repeat(images, count)), work, batch_size=args.batch_size)
        note(f"{workers} on Ray", count, found)
    few = list(repeat(images, 640))
    times = []
    for size in (64, 640):  # ten shards or one, of the same images
        on_ray._SHARDS_EACH = 640 // size
        work = tag_on_ray(Instant, "instant", workers=1)
        times.append(min(measure(Instant(), few, work).seconds for _ in range(3)))
    results["seconds_per_shard"] = (times[0] - times[1]) / 9
    print(f"{(times[0] - times[1]) / 9 * 1000:.0f} ms a shard")
    ray.shutdown()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
