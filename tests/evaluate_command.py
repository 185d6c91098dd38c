"""Evaluation on the command line: images, models that were never trained, and the verb."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from verb import read_json, read_refusal

from pivotpatch.data.address import open_records
from pivotpatch.data.loading import make_loader
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.scores import Scores
from pivotpatch.inference.scoring import score_pictures
from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import RunFolder

SIZE = 32
LABELS = ("cat", "dog", "fish")
Errors = pytest.CaptureFixture[str]


def write_photos() -> None:
    """Write 21 images and their table here; evaluation does not ask for all of its labels."""
    generator = np.random.default_rng(0)
    rows = []
    for place in range(21):
        Image.fromarray(generator.integers(0, 256, (80, 70, 3), dtype=np.uint8)).save(f"{place}.png")
        names = [name for name in (*LABELS, "horse") if generator.random() < 0.5]
        rows.append(f"{place}.png,{'|'.join(names)}\n")
    Path("photos.csv").write_text("image,labels\n" + "".join(rows))


def save(folder: str, kind: type[Classifier] = PatchClassifier) -> Classifier:
    """A checkpoint of a model that was never trained."""
    torch.manual_seed(0)
    model = kind("test_vit", LABELS, image_size=SIZE).eval()
    save_checkpoint(model, folder, overwrite=True)
    return model


def score(model: Classifier | PatchInference, *, size: int = SIZE) -> Scores:
    records = open_records("table:photos.csv").keep_labels(LABELS)
    loader = make_loader(records, size=(size, size), batch_size=5, every_batch=True)
    return score_pictures(model, loader, accelerator=Accelerator(cpu=True), keep_patches=True)


def evaluate(capsys: Errors, *words: str) -> dict[str, Any]:
    return read_json(capsys, "evaluate", *words)


def fail(capsys: Errors, *words: str) -> str:
    return read_refusal(capsys, "evaluate", *words)


def make_run() -> Classifier:
    """The folder of a run, as training leaves it."""
    Path("train.csv").write_text("image,labels\n0.png,cat\n1.png,cat|dog\n2.png,cat|fish\n3.png,dog\n")
    model = save("model")
    folder = RunFolder(Path("run"), load_config(None, ["data.train=table:train.csv", "data.val_fraction=0"]))
    folder.create()
    folder.save_best(model)
    folder.close()
    return model
