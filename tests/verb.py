"""Verbs of the command line in this process: images and runs for them, what they print as JSON, and how they refuse."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from pivotpatch.cli.main import main
from pivotpatch.data.loading import make_loader
from pivotpatch.data.records import RecordSet
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
QUICK = ("--workers", "0", "--resamples", "0")  # of evaluate
KEEP = ("--mixing", "keep", "--calibration", "platt")  # of tune, quick
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


def read_json(capsys: Errors, *words: str) -> dict[str, Any]:
    """What a verb prints."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def read_refusal(capsys: Errors, *words: str) -> str:
    """The one line that a mistake is told in."""
    capsys.readouterr()
    assert main([*words]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1].removeprefix("pivotpatch: ")


def train(*words: str) -> dict[str, Any]:
    """Train to the end and return metrics.json."""
    assert main(["train", *words]) == 0
    content: dict[str, Any] = json.loads(Path(words[words.index("--out") + 1], "metrics.json").read_text())
    return content


def write_images(name: str, count: int, *, seed: int = 0, labels: tuple[str, ...] = LABELS) -> None:
    """A table of images here whose first two labels can be seen in them."""
    generator = np.random.default_rng(seed)
    rows = []
    for place in range(count):
        shown = generator.random(len(labels)) < 0.4
        pixels = generator.integers(0, 90 if shown[0] else 200, (40, 40, 3))
        pixels[..., 0] += 55 * shown[1]
        Image.fromarray(pixels.astype(np.uint8)).save(f"{name}{place}.png")
        rows.append(f"{name}{place}.png,{'|'.join(np.array(labels)[shown])}\n")
    Path(f"{name}.csv").write_text("image,labels\n" + "".join(rows))


def make_model(kind: type[Classifier] = PatchClassifier, *, labels: tuple[str, ...] = LABELS) -> Classifier:
    """A model that was never trained."""
    torch.manual_seed(0)
    return kind("test_vit", labels, image_size=SIZE).eval()


def save(folder: str, kind: type[Classifier] = PatchClassifier) -> Classifier:
    model = make_model(kind)
    save_checkpoint(model, folder, overwrite=True)
    return model


def write_run(name: str | Path, model: Classifier, *changes: str) -> None:
    """The folder of a run, as training leaves it."""
    folder = RunFolder(Path(name), load_config(None, ["data.train=table:train.csv", "data.workers=0", *changes]))
    folder.create({})
    folder.save_best(model)
    folder.close()


def score(
    model: Classifier | PatchInference, records: RecordSet, *, size: int = SIZE, closer_size: int | None = None
) -> Scores:
    loader = make_loader(records, size=(size, size), batch_size=50, every_batch=True)
    accelerator = Accelerator(cpu=True)
    return score_pictures(model, loader, accelerator=accelerator, keep_patches=True, closer_size=closer_size)
