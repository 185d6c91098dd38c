"""A network with a value of its own for each option that a checkpoint keeps, and edits of what was kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pivotpatch import PatchClassifier

LABELS = ["cat", "dog", "cow"]


def make_classifier() -> PatchClassifier:
    torch.manual_seed(0)
    model = PatchClassifier(
        "test_resnet",
        LABELS,
        grid=3,
        overlap=0.25,
        source_size=320,
        patch_size=96,
        closer_size=240,
        lam=0.5,
        temperature=2,
    )
    return model.eval()


def edit_json(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """What changes the description in a checkpoint's folder."""

    def apply(folder: Path) -> None:
        described = json.loads((folder / "model.json").read_text("utf-8"))
        change(described)
        (folder / "model.json").write_text(json.dumps(described), "utf-8")

    return apply
