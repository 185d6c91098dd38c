"""`pivotpatch tune` on the command line: images, runs that were never trained, and the verb."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from verb import read_json, read_refusal

from pivotpatch.data.loading import make_loader
from pivotpatch.data.records import RecordSet
from pivotpatch.inference.scores import Scores
from pivotpatch.inference.scoring import score_pictures
from pivotpatch.models.checkpoint import load_checkpoint
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import RunFolder

SIZE = 32
LABELS = ("dark", "red", "striped")
Errors = pytest.CaptureFixture[str]


def write_pictures(name: str, count: int, *, seed: int) -> None:
    """A table of images whose labels can be seen in them."""
    generator = np.random.default_rng(seed)
    rows = []
    for place in range(count):
        shown = generator.random(3) < 0.4
        pixels = generator.integers(0, 90 if shown[0] else 200, (40, 40, 3))
        pixels[..., 0] += 55 * shown[1]
        pixels[::4] //= 3 if shown[2] else 1
        Image.fromarray(pixels.astype(np.uint8)).save(f"{name}{place}.png")
        rows.append(f"{name}{place}.png,{'|'.join(np.array(LABELS)[shown])}\n")
    Path(f"{name}.csv").write_text("image,labels\n" + "".join(rows))


def make_run(
    name: str, kind: type[Classifier] = PatchClassifier, *changes: str, labels: tuple[str, ...] = LABELS
) -> Classifier:
    """The folder of a run as training leaves it; its model was never trained."""
    torch.manual_seed(0)
    model = kind("test_vit", labels, image_size=SIZE).eval()
    words = ["data.train=table:train.csv", "data.val_fraction=0.4", "data.workers=0", *changes]
    folder = RunFolder(Path(name), load_config(None, words))
    folder.create()
    folder.save_best(model)
    folder.close()
    return model


def score(model: Classifier, records: RecordSet) -> Scores:
    loader = make_loader(records, size=(SIZE, SIZE), batch_size=50, every_batch=True)
    return score_pictures(model, loader, accelerator=Accelerator(cpu=True), keep_patches=True)


def tune(capsys: Errors, *words: str) -> dict[str, Any]:
    return read_json(capsys, "tune", *words)


def fail(capsys: Errors, *words: str) -> str:
    return read_refusal(capsys, "tune", *words)


def assert_stored(found: dict[str, Any], folder: str) -> None:
    """A checkpoint holds what was told."""
    model = load_checkpoint(folder)
    calibration = None if model.calibration is None else json.loads(json.dumps(model.calibration.to_dict()))
    assert calibration == found["calibration"]["fitted"]
    assert model.thresholds == tuple(row["threshold"] for row in found["thresholds"]["rows"])
    assert (None if model.adaptive is None else json.loads(json.dumps(model.adaptive.to_dict()))) == found["adaptive"]
    if isinstance(model, PatchClassifier):
        assert (model.lam, model.temperature) == pytest.approx((found["lam"], found["temperature"]))
