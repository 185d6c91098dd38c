"""Verbs take networks on the hub and other people's: what they score is what the network says when it is asked."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from evaluate_command import LABELS, SIZE, Errors, evaluate, fail, save, score, write_photos
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import nn
from verb import read_refusal

from pivotpatch.cli.main import main
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.score_file import read_scores
from pivotpatch.models.foreign import load_timm

WORDS = ("photos.csv", "--workers", "0", "--resamples", "5")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of pictures and their table, and somebody's network."""
    monkeypatch.chdir(tmp_path)
    write_photos()
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=3, pretrained_cfg_overlay={"input_size": (3, SIZE, SIZE)})
    nn.init.normal_(network.fc.weight)
    save_for_hf(network, "theirs", model_config={"label_names": LABELS}, safe_serialization=True)
    return tmp_path


def test_somebody_elses_network_is_evaluated(here: Path, capsys: Errors) -> None:
    found = evaluate(capsys, "timm:theirs", *WORDS, "--save", "plain.parquet")
    assert found["labels"] == list(LABELS)
    expected = score(load_timm("theirs")).logits["image"]
    assert expected.std() > 0.1
    torch.testing.assert_close(read_scores("plain.parquet").logits["image"], expected, rtol=1e-4, atol=1e-4)


def test_with_patches_if_asked(here: Path, capsys: Errors) -> None:
    command = ("timm:theirs", *WORDS, "--patch-inference", "--native", str(2 * SIZE), "--save", "pat.parquet")
    assert set(evaluate(capsys, *command)["kinds"]) == {"image", "patch", "tde"}
    expected = score(PatchInference(load_timm("theirs")), size=2 * SIZE).logits["tde"]
    torch.testing.assert_close(read_scores("pat.parquet").logits["tde"], expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_by_the_name_of_a_hub_is_that_checkpoint(here: Path, capsys: Errors) -> None:
    save("ours")
    one, other = (evaluate(capsys, name, *WORDS) for name in ("ours", "hub:ours"))
    assert {**one, "evaluated": None} == {**other, "evaluated": None}


def test_a_report_names_it(here: Path) -> None:
    save("ours")
    assert main(["report", "hub:ours", "photos.csv", "--baseline", "timm:theirs", "--out", "report.html"]) == 0
    page = Path("report.html").read_text("utf-8")
    assert "<title>Report on hub:ours" in page
    assert "baseline timm:theirs" in page


def test_what_is_fitted_needs_a_place(here: Path, capsys: Errors) -> None:
    assert main(["tune", "timm:theirs", "photos.csv"]) == 1
    line = "timm:theirs: is somebody else's model, of which no checkpoint is written"
    assert line in capsys.readouterr().err
    save("ours")
    assert main(["tune", "hub:ours", "photos.csv"]) == 1
    assert "hub:ours: is not written to; give --out FOLDER" in capsys.readouterr().err
    assert main(["tune", "hub:ours", "photos.csv", "--out", "tuned"]) == 0
    assert "wrote tuned" in capsys.readouterr().out


@pytest.mark.slow
def test_an_exported_file_has_the_name_without_the_scheme(here: Path) -> None:
    assert main(["export", "timm:theirs"]) == 0
    assert main(["predict", "0.png", "--model", "theirs.onnx"]) == 0


def test_somebody_elses_network_is_not_trained(here: Path, capsys: Errors) -> None:
    assert main(["train", "photos.csv", "model.start_from=timm:theirs", "model.image_size=64", "--out", "run"]) == 1
    line = "timm:theirs: is somebody else's network, which is asked, not trained; give a checkpoint of ours"
    assert line in capsys.readouterr().err
    assert not Path("run").exists()


def drop_names() -> None:
    path = Path("theirs", "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "label_names": None}))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("timm:empty", lambda: Path("empty").mkdir(), "holds no config.json"),
        ("timm:./empty/", lambda: Path("empty").mkdir(), "holds no config.json"),
        (
            "hub:no where",
            lambda: None,
            "is no folder that is there, and is no owner/name on the hub; check what you gave",
        ),
        ("timm:nowhere@v1", lambda: None, "is no folder that is there, and is no owner/name on the hub; check what"),
        ("timm:theirs", drop_names, "its config.json states no label_names; name each logit in its config.json, or"),
        ("timm:local-dir:theirs", drop_names, "its config.json states no label_names; name each logit in its config"),
        ("hub:theirs", lambda: None, "is no checkpoint, model.json is missing"),
    ],
)
def test_a_name_that_is_wrong_is_told_in_a_line_as_it_was_typed(
    here: Path, capsys: Errors, name: str, damage: Callable[[], object], message: str
) -> None:
    damage()
    assert fail(capsys, name, *WORDS).startswith(f"{name}: {message}")
    assert main(["predict", "0.png", "--model", name]) == 1
    assert capsys.readouterr().err.startswith(f"pivotpatch: {name}: {message}")


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("evaluate", "ours", *WORDS), "ours: its image"),
        (("evaluate", "hub:ours", *WORDS), "hub:ours: its image"),
        (("evaluate", "timm:theirs", *WORDS, "--patch-inference"), "timm:theirs: its image"),
        (("tune", "ours", "photos.csv", "--out", "tuned"), "ours: its image"),
        (("report", "timm:theirs", "photos.csv", "--out", "report.html"), "timm:theirs: its image"),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_logits_that_cannot_be_ranked_name_the_network(
    words: tuple[str, ...], where: str, here: Path, capsys: Errors
) -> None:
    save("ours")
    for name, weight in (("ours", "head.project.weight"), ("theirs", "fc.weight")):
        state = load_file(f"{name}/model.safetensors")
        state[weight].fill_(3e38)
        save_file(state, f"{name}/model.safetensors", metadata={"format": "pt"})
    line = read_refusal(capsys, *words)
    assert re.fullmatch(rf"{where} logit of 'cat' is (nan|-?inf) for 0.png; its weights .* use a sound model", line)
    assert not Path("tuned").exists()
