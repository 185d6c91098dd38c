"""Verbs take networks on the hub and other people's: what they score is what the network says when it is asked."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models import save_for_hf
from torch import nn
from verb import LABELS, QUICK, SIZE, Errors, read_json, score

from pivotpatch.data.address import open_records
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.score_file import read_scores
from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.models.foreign import load_timm
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.values import Patching


@pytest.fixture
def theirs(photos: Path) -> Path:
    """A folder of images and their table, and somebody's network."""
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=3, pretrained_cfg_overlay={"input_size": (3, SIZE, SIZE)})
    nn.init.normal_(network.fc.weight)
    save_for_hf(network, "theirs", model_config={"label_names": LABELS}, safe_serialization=True)
    return photos / "theirs"


def test_somebody_elses_network_is_evaluated_with_patches_if_asked(theirs: Path, capsys: Errors) -> None:
    words = ("evaluate", "timm:theirs", "photos.csv", *QUICK, "--save", "scores.parquet")
    assert list(read_json(capsys, *words)["kinds"]) == ["image"]
    options = ("--patch-inference", "--grid", "3", "--lam", "0.5", "--temperature", "0.7", "--native", "64")
    assert list(read_json(capsys, *words, *options)["kinds"]) == ["image", "patch", "tde"]
    records, found = open_records("table:photos.csv").keep_labels(LABELS), read_scores("scores.parquet")
    expected = score(PatchInference(load_timm("theirs"), grid=3, lam=0.5, temperature=0.7), records, size=64)
    torch.testing.assert_close(found.logits["tde"], expected.logits["tde"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("grid = 3\nlam = 0.5\nsource_size = 96", {"patching": Patching(3, source_size=96, lam=0.5)}),
        ("regions = true\ntemperature = 2.0", {"patching": Patching(temperature=2.0), "regions": True}),
    ],
)
def test_patches_are_cut_as_the_recipe_says(said: str, options: dict[str, Any], photos: Path, capsys: Errors) -> None:
    """As those of MLC-PAT, which have three outputs."""
    torch.manual_seed(0)
    model = PatchClassifier("test_resnet", LABELS, image_size=2 * SIZE, **options)
    torch.save(model.state_dict(), "w.pth")
    save_checkpoint(model, "model")
    (photos / "labels.txt").write_text("\n".join(LABELS))
    (photos / "mine.toml").write_text(f'[model]\nbackbone = "test_resnet"\nimage_size = {2 * SIZE}\n[task]\n{said}\n')
    found = []
    for name, more in (("model", ()), ("w.pth", ("--architecture", "mine.toml", "--labels", "labels.txt"))):
        read_json(capsys, "evaluate", name, "photos.csv", *more, *QUICK, "--save", "s.parquet")
        found.append(read_scores("s.parquet").logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_files_of_weights_are_opened_by_architecture_and_labels(theirs: Path, capsys: Errors) -> None:
    """A plain state dict, by recipe or by name, says what the folder of the same model says; so does a bare folder."""
    Path("labels.txt").write_text("\n".join(LABELS))
    torch.save(load_file("theirs/model.safetensors"), "w.pth")
    Path("mine.toml").write_text(f'[model]\nbackbone = "test_resnet"\nimage_size = {SIZE}\n[task]\nkind = "image"\n')
    (image, *_) = sorted(map(str, Path().glob("**/*.png")))
    ways: tuple[tuple[str, ...], ...] = (
        ("--model", "timm:theirs"),
        ("--model", "theirs"),
        ("--model", "w.pth", "--architecture", f"test_resnet@{SIZE}", "--labels", "labels.txt"),
    )
    said = [read_json(capsys, "predict", image, *options)["tags"] for options in ways]
    assert said[0] == said[1] == said[2]
    probs = []
    said_of = ("--architecture", "mine.toml", "--labels", "labels.txt")
    for model, options in (("theirs", ()), ("w.pth", said_of)):
        read_json(capsys, "evaluate", model, "photos.csv", *options, *QUICK, "--save", "s.parquet")
        probs.append(read_scores("s.parquet").logits["image"])
    torch.testing.assert_close(*probs, rtol=1e-4, atol=1e-4)
