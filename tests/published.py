"""Small data sets in the layout of the published ones, with pictures, where recipes look for them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from pivotpatch.data.voc import LABELS as VOC_LABELS

PICTURES = 12
# The eight labels that the study of the first figure trains for, and others.
COCO_LABELS = (
    "person", "car", "parking meter", "baseball bat", "baseball glove", "fork", "knife", "mouse", "keyboard", "dog",
)  # fmt: skip


def write_picture(path: Path, seed: int) -> None:
    """Noise, 40 by 30 pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(path)


def write_coco(root: Path) -> None:
    """COCO 2014: every picture has two labels, and every label its pictures."""
    (root / "annotations").mkdir(parents=True)
    for split in ("train2014", "val2014"):
        names = [f"COCO_{split}_{number:012d}.jpg" for number in range(PICTURES)]
        for number, name in enumerate(names):
            write_picture(root / split / name, number)
        shown = [(number, (number + shift) % len(COCO_LABELS)) for number in range(PICTURES) for shift in (0, 3)]
        content = {
            "images": [{"id": number, "file_name": name} for number, name in enumerate(names)],
            "categories": [{"id": 10 * place, "name": name} for place, name in enumerate(COCO_LABELS)],
            "annotations": [
                {"id": place, "image_id": image, "category_id": 10 * label, "iscrowd": 0, "bbox": [1, 2, 3, 4]}
                for place, (image, label) in enumerate(shown)
            ],
        }
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def write_voc(root: Path) -> None:
    """VOC 2007, with the labels in its image sets."""
    year = root / "VOCdevkit" / "VOC2007"
    (year / "ImageSets" / "Main").mkdir(parents=True)
    for first, part in ((0, "trainval"), (PICTURES, "test")):
        names = [f"{first + number:06d}" for number in range(PICTURES)]
        for number, name in enumerate(names):
            write_picture(year / "JPEGImages" / f"{name}.jpg", number)
        (year / "ImageSets" / "Main" / f"{part}.txt").write_text("".join(f"{name}\n" for name in names))
        for place, label in enumerate(VOC_LABELS):
            states = [1 if number % len(VOC_LABELS) == place else -1 for number in range(PICTURES)]
            lines = [f"{name} {state:2d}\n" for name, state in zip(names, states, strict=True)]
            (year / "ImageSets" / "Main" / f"{label}_{part}.txt").write_text("".join(lines))


def write_visual_genome(root: Path) -> None:
    """Visual Genome with ten names, each in several pictures; few enough that a label map must ask for one picture."""
    images = []
    (root / "VG_100K_2").mkdir(parents=True)
    for number in range(2 * PICTURES):
        write_picture(root / "VG_100K" / f"{number}.jpg", number)
        names = [f"thing{number % 10}", f"thing{(number + 3) % 10}"]
        objects = [{"object_id": 100 * number + i, "names": [name], "synsets": []} for i, name in enumerate(names)]
        images.append({"image_id": number, "objects": objects})
    (root / "objects.json").write_text(json.dumps(images))


PUBLISHED: dict[str, Callable[[Path], None]] = {
    "coco": write_coco,
    "voc2007": write_voc,
    "vg256": write_visual_genome,
}


def write_all(root: Path) -> None:
    """All of them under `root`/data, as `pivotpatch data prepare` leaves them."""
    for name, write in PUBLISHED.items():
        write(root / "data" / name)
