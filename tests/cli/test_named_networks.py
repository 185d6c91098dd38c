"""Verbs take networks on the hub and other people's: what they score is what the network says when it is asked."""

import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import nn
from verb import LABELS, QUICK, SIZE, Errors, read_json, read_refusal, save, score

from pivotpatch.data.address import open_records
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.score_file import read_scores
from pivotpatch.models.foreign import load_timm


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


def test_what_is_fitted_needs_a_place(theirs: Path, capsys: Errors) -> None:
    save("ours")
    start = ("model.start_from=timm:theirs", "model.image_size=64", "--out", "run")
    for words, message in (
        (("tune", "timm:theirs", "photos.csv"), "timm:theirs: is somebody else's model, of which no checkpoint"),
        (("tune", "hub:ours", "photos.csv"), "hub:ours: is not written to; give --out FOLDER"),
        (("train", "photos.csv", *start), "timm:theirs: is a model of another library, which cannot be trained"),
    ):
        assert read_refusal(capsys, *words).startswith(message)
    assert not Path("run").exists()


def test_logits_that_cannot_be_ranked_name_the_network(theirs: Path, capsys: Errors) -> None:
    save("ours")
    for name, weight in (("ours", "head.project.weight"), ("theirs", "fc.weight")):
        state = load_file(f"{name}/model.safetensors")
        state[weight].fill_(3e38)
        save_file(state, f"{name}/model.safetensors", metadata={"format": "pt"})
    for verb, name in (("evaluate", "ours"), ("tune", "ours"), ("report", "timm:theirs")):
        line = read_refusal(capsys, verb, name, "photos.csv")
        assert re.match(rf"{name}: its image logit of 'cat' is (nan|-?inf) for photos0.png; its weights", line)


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
    Path("two.json").write_text('["cat", "cup"]')
    for words, message in (
        (("predict", image, "--model", "w.pth"), "w.pth: is a file; say of what model: --architecture"),
        (
            ("evaluate", "w.pth", "photos.csv", "--architecture", "mine.toml", "--labels", "two.json"),
            "w.pth: it has 3 labels, and 2",
        ),
        (("predict", image, "--model", "w.pth", "--architecture", "x", "--labels", "no.txt"), "no.txt: there is no such file"),
    ):
        assert read_refusal(capsys, *words).startswith(message)
