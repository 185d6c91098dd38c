"""`pivotpatch train` on a few small pictures, for tests of what it leaves and what it tells."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pivotpatch.cli.main import main

SMALL = [
    "model.backbone=test_resnet",
    "model.pretrained=false",
    "model.image_size=32",
    "train.epochs=2",
    "train.batch_size=4",
    "data.workers=0",
    "output.trackers=[]",
]
SCENES = ["scenes:@train?count=24&size=32", *SMALL]
Errors = pytest.CaptureFixture[str]


def write_pictures(root: Path, count: int = 12) -> Path:
    """A table of pictures and labels; cat, dog, both or neither."""
    root.mkdir(exist_ok=True)
    rows = []
    for place in range(count):
        Image.fromarray(np.full((40, 40, 3), 20 * place, dtype=np.uint8)).save(root / f"{place}.png")
        rows.append(f"{place}.png,{'|'.join(name for bit, name in enumerate(('cat', 'dog')) if place >> bit & 1)}\n")
    (root / "photos.csv").write_text("image,labels\n" + "".join(rows))
    return root / "photos.csv"


def train(*words: str) -> dict[str, Any]:
    """Train to the end and return metrics.json."""
    assert main(["train", *words]) == 0
    out = Path(words[words.index("--out") + 1])
    content: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return content
