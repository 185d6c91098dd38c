"""Images per second against workers on Ray, and what a shard costs beside its images.

`python benchmarks/cluster.py --images photos/ --json out.json`. Each count of workers tags the same images with the
bundled tagger on a Ray cluster of this machine, started before the clock; one process without Ray is the measure. A
second pass with an engine that answers at once, and shards of one batch, leaves what a shard itself costs.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from pivotpatch.cluster import on_ray, tag_on_ray
from pivotpatch.errors import import_extra
from pivotpatch.runtime.bulk import Work, tag_pictures
from pivotpatch.runtime.engine import Answer, Array, Engine, Pixels
from pivotpatch.runtime.files import find_images
from pivotpatch.runtime.predictor import Predictor


class Instant:
    """Answers at once, so that the time is that of everything else."""

    name, labels = "instant", ("a", "b")
    thresholds: tuple[float, ...] | None = None
    preferences: ClassVar[dict[str, tuple[float, ...]]] = {}
    picture_size, grid, overlap, effort = 8, 0, 0.0, 1.0

    def ask(self, images: Pixels) -> Answer[Array]:
        """Half of everything."""
        probs = np.full((len(images), 2), 0.5, np.float32)
        return Answer(probs, probs)

    def digest(self) -> str:
        """Of the one that there is."""
        return "instant"


def load(effort: float) -> Engine:
    return Predictor.load(effort=effort, device="cpu").engine


def measure(engine: Engine, images: list[str], work: Work | None = None) -> float:
    """Seconds for all images, the models opened included."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        tag_pictures(engine, iter(images), Path(folder) / "tags.jsonl", work=work)
        return time.perf_counter() - begun


def repeat(images: list[str], count: int) -> Iterator[str]:
    yield from (images[place % len(images)] for place in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", required=True, help="a folder of photographs")
    parser.add_argument("--count", type=int, default=1024)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--effort", type=float, default=0.6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ray = import_extra("ray")
    images = list(repeat([str(Path(path).resolve()) for path in find_images([args.images])], args.count))
    ray.init(address="local", num_cpus=max(args.workers), include_dashboard=False, log_to_driver=False)
    results: dict[str, object] = {
        "cores": os.cpu_count(),
        "ray": ray.__version__,
        "images": args.count,
        "effort": args.effort,
    }
    seconds = measure(load(args.effort), images)
    print(f"one process: {args.count / seconds:.1f} images/s")
    rates = {"one process": args.count / seconds}
    for workers in args.workers:
        work = tag_on_ray(partial(load, args.effort), load(args.effort).digest(), workers=workers)
        seconds = measure(load(args.effort), images, work)
        rates[f"{workers} on Ray"] = args.count / seconds
        print(f"{workers} on Ray: {args.count / seconds:.1f} images/s ({seconds:.1f} s, models opened)")
    few = list(repeat(images, 640))
    times = []
    for size in (64, 640):  # ten shards or one, of the same images
        on_ray._SHARDS_EACH = 640 // size
        times.append(min(measure(Instant(), few, tag_on_ray(Instant, "instant", workers=1)) for _ in range(3)))
    results |= {"images_per_second": rates, "seconds_per_shard": (times[0] - times[1]) / 9}
    print(f"{(times[0] - times[1]) / 9 * 1000:.0f} ms a shard")
    ray.shutdown()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
