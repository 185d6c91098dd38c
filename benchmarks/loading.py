"""CPU time of loading a sample, against five PIL views a sample; and the cost of making the views on the device.

    python benchmarks/loading.py [--only loading|views] [--out result.json]

One core. The pictures are generated: 640 x 480 JPEG, quality 90. `views` needs neither files nor pyarrow.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
import torchvision
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor, nn

from pivotpatch.core.patches import stack_views
from pivotpatch.data.augment import AugmentPolicy, draw_augmentation
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.views import make_views
from pivotpatch.runtime.decoding import decode_image
from pivotpatch.runtime.values import Patching, patch_boxes

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for the published RandAugment by Pillow
from reference import randaugment

RandAugment = Literal["published", "torchvision"]
SIZE = (448, 448)
GRID = 2
LABELS = 80


def draw_photograph(rng: np.random.Generator, *, width: int = 640, height: int = 480) -> NDArray[np.uint8]:
    """Noise at four scales, objects with edges and some grain: (H,W,3), as many bytes in JPEG as a photograph."""
    scene = np.full((height, width, 3), 120.0)
    for columns, amplitude in ((5, 70), (20, 30), (80, 15), (320, 8)):
        noise = rng.normal(size=(columns * height // width + 1, columns, 3))
        noise = amplitude * (0.6 * noise.mean(axis=2, keepdims=True) + 0.4 * noise)
        for channel in range(3):
            layer = Image.fromarray(noise[..., channel].astype(np.float32))
            scene[..., channel] += np.asarray(layer.resize((width, height), Image.Resampling.BICUBIC))
    picture = Image.fromarray(scene.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    for _ in range(12):
        x, y, w, h, *colour = rng.integers([0, 0, 20, 20, 0, 0, 0], [width, height, 160, 160, 256, 256, 256]).tolist()
        draw = pen.rectangle if rng.random() < 0.5 else pen.ellipse
        draw([x, y, x + w, y + h], fill=tuple(colour))
    grain = rng.normal(0, 8, (height, width, 1))
    return (np.asarray(picture) + grain).clip(0, 255).astype(np.uint8)


def write_photograph(job: tuple[Path, int]) -> Path:
    path, seed = job
    Image.fromarray(draw_photograph(np.random.default_rng(seed))).save(path, quality=90)
    return path


def write_photographs(folder: Path, count: int) -> list[Path]:
    with ProcessPoolExecutor() as pool:
        jobs = [(folder / f"{index:05}.jpg", index) for index in range(count)]
        return list(pool.map(write_photograph, jobs, chunksize=8))


def cut_out(picture: Image.Image) -> Image.Image:
    """Cover a box of half the side, drawn around any pixel, with one random colour."""
    width, height = picture.size
    x, y = random.randrange(width), random.randrange(height)
    box = [max(x - width // 4, 0), max(y - height // 4, 0), min(x + width // 4, width), min(y + height // 4, height)]
    ImageDraw.Draw(picture).rectangle(box, fill=tuple(random.choices(range(256), k=3)))
    return picture


def operate(picture: Image.Image) -> Image.Image:
    """The published RandAugment: two operations, each with probability 0.5 and one of nine magnitudes."""
    for name in random.choices(list(randaugment.OPERATIONS), k=2):
        if random.random() < 0.5:
            place = (random.random(), random.random())
            work = randaugment.OPERATIONS[name]
            picture = work(picture, random.randint(1, 9), random.choice((1, -1)), place)
    return picture


def make_published_pipeline(size: tuple[int, int] = SIZE, kind: RandAugment = "published") -> Callable[[Path], Tensor]:
    """The published way: five views (5,C,H,W) a sample, each through PIL on the CPU."""
    augment = torchvision.transforms.Compose(
        [
            torchvision.transforms.Resize(size),
            torchvision.transforms.Lambda(cut_out),
            torchvision.transforms.Lambda(operate) if kind == "published" else torchvision.transforms.RandAugment(),
            torchvision.transforms.ToTensor(),
        ]
    )

    def load(path: Path) -> Tensor:
        with Image.open(path) as picture:
            image = picture.convert("RGB").resize(size[::-1], Image.Resampling.BILINEAR)
        patches = [image.crop(box) for box in patch_boxes(*size, grid=GRID)]
        return torch.stack([augment(view) for view in (image, *patches)])

    return load


def time_cpu(works: Mapping[str, Callable[[], object]], *, samples: int) -> dict[str, float]:
    """Milliseconds of CPU a sample: the best of five, taken in turn, for other work on the machine slows some."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(5):
        for name, work in works.items():
            start = time.process_time()
            work()
            best[name] = min(best[name], 1000 * (time.process_time() - start) / samples)
    return best


def measure_loading(samples: int) -> dict[str, float]:
    import pyarrow as pa

    from pivotpatch.data.loading import hold_images, make_loader
    from pivotpatch.data.records import FileStore, LabelSpace, RecordSet, pack_states

    pipelines = {kind: make_published_pipeline(kind=kind) for kind in get_args(RandAugment)}
    with tempfile.TemporaryDirectory() as name:
        paths = write_photographs(Path(name), samples)
        records = RecordSet(
            "benchmark",
            LabelSpace(tuple(f"label {index}" for index in range(LABELS))),
            images=FileStore(Path(name), pa.array([path.name for path in paths])),
            states=pack_states(np.arange(samples), np.arange(samples) % LABELS, shape=(samples, LABELS)),
        )
        loader = make_loader(records, size=SIZE, batch_size=16, shuffle=True)
        held = hold_images(records, size=SIZE)
        held_loader = make_loader(records, size=SIZE, batch_size=16, shuffle=True, held=held)
        decoded = [decode_image(path) for path in paths]
        resized = [decode_image(pixels, size=SIZE) for pixels in decoded]
        spent = time_cpu(
            {
                "decode": lambda: [decode_image(path) for path in paths],
                "resize": lambda: [decode_image(pixels, size=SIZE) for pixels in decoded],
                "stack": lambda: [torch.from_numpy(np.stack(resized))],
                "loader": lambda: [None for _ in loader],
                "hold": lambda: hold_images(records, size=SIZE),
                "held": lambda: [None for _ in held_loader],
                **{
                    kind: partial(lambda load: [load(path) for path in paths], load) for kind, load in pipelines.items()
                },
            },
            samples=samples,
        )
        kilobytes = sum(path.stat().st_size for path in paths) / samples / 1024
    return {
        "JPEG file, KiB": kilobytes,
        "open and decode, ms": spent["decode"],
        "resize, ms": spent["resize"],
        "stack to a batch, ms": spent["stack"],
        "loader, all of it, ms": spent["loader"],
        "hold in memory, once, ms": spent["hold"],
        "loader of held pictures, ms": spent["held"],
        "published pipeline, ms": spent["published"],
        "the same with torchvision's RandAugment, ms": spent["torchvision"],
        "published / loader": spent["published"] / spent["loader"],
    }


def photograph_batch(count: int) -> Tensor:
    rng = np.random.default_rng(1)
    pixels = np.stack([decode_image(draw_photograph(rng), size=SIZE) for _ in range(count)])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def make_view_step(images: Tensor, kind: RandAugment = "published") -> Callable[[], Tensor]:
    """Draw and make the views of one batch, as training does."""
    policy = AugmentPolicy(flip=0.5, randaugment=kind)
    generator = torch.Generator().manual_seed(0)
    model = PatchClassifier("test_resnet", ["any"], image_size=SIZE[0], patching=Patching(GRID))
    count = len(images) * (1 + GRID * GRID)

    def make() -> Tensor:
        drawn = draw_augmentation(count, policy=policy, generator=generator)
        views = make_views(model, images, augmentation=drawn)
        return stack_views(views.image, views.patches)

    return make


def time_gpu(work: Callable[[], object], *, rounds: int) -> float:
    """Milliseconds a round between two events on the device, launches included."""
    for _ in range(3):
        work()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(rounds):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / rounds


def measure_views_on_gpu(batch: int, *, compiled: bool) -> dict[str, float]:
    make = make_view_step(photograph_batch(batch).cuda())
    network = torchvision.models.resnet101(num_classes=LABELS).cuda().to(memory_format=torch.channels_last)
    if compiled:
        network = torch.compile(network)
    loss = nn.BCEWithLogitsLoss()
    target = torch.zeros(batch * (1 + GRID * GRID), LABELS, device="cuda")
    fixed = make()

    def train(views: Tensor) -> None:
        network.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = network(views.contiguous(memory_format=torch.channels_last))
        loss(logits.float(), target).backward()

    views = time_gpu(make, rounds=20)
    step = time_gpu(lambda: train(fixed), rounds=10)
    both = time_gpu(lambda: train(make()), rounds=10)
    return {
        "GPU, samples a batch": batch,
        "GPU, views alone, ms a batch": views,
        "GPU, ResNet-101 forward and backward, ms a batch": step,
        "GPU, both, ms a batch": both,
        "GPU, views alone, % of the step": 100 * views / step,
        "GPU, added to the step, %": 100 * (both - step) / step,
    }


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["loading", "views"], help="one part of it")
    parser.add_argument("--samples", type=int, default=64, help="pictures to load (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="samples a batch on the GPU (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile the network that the views are compared with")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    figures: dict[str, float] = {}
    if args.only != "views":
        figures |= measure_loading(args.samples)
    if args.only != "loading":
        images = photograph_batch(8)
        steps = {
            f"views on the CPU, {kind}, ms a sample": make_view_step(images, kind) for kind in get_args(RandAugment)
        }
        figures |= time_cpu(steps, samples=len(images))
        if torch.cuda.is_available():
            figures |= measure_views_on_gpu(args.batch, compiled=args.compile)
    for name, value in figures.items():
        print(f"{name:<52}{value:10.2f}")
    if args.out is not None:
        facts = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
        unfinished = args.out.with_name(args.out.name + ".part")
        unfinished.write_text(json.dumps(facts | figures, indent=2) + "\n")
        unfinished.replace(args.out)


if __name__ == "__main__":
    main()
