"""The closer look as a user meets it: trained, judged by evaluate, measured and stored by tune, taken by predict."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from verb import KEEP, QUICK, SCENES, SIZE, Errors, read_json, read_refusal, score, train

from pivotpatch.cli.main import main
from pivotpatch.core.metrics import average_precision
from pivotpatch.data.address import open_records
from pivotpatch.data.loading import make_loader
from pivotpatch.inference.score_file import read_scores
from pivotpatch.models import load_checkpoint, save_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.views import make_closer_view
from pivotpatch.tuning.tune import CloserLook, tune_scores

VAL = "scenes:@val?count=40&size=32"
CLOSER = 48


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small runs of PAT-T, one of which learns to look closer."""
    root = tmp_path_factory.mktemp("trained")
    words = (*SCENES, "optimiser.lr=1e-3", "ema.decay=0")
    train(*words, "--out", str(root / "plain"))
    train(*words, f"task.closer_size={CLOSER}", "--out", str(root / "closer"))
    return root


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def open_network(folder: str) -> PatchClassifier:
    model = load_checkpoint(folder)
    assert isinstance(model, PatchClassifier)
    return model


def test_evaluate_judges_a_closer_look(here: Path, capsys: Errors) -> None:
    found = read_json(
        capsys, "evaluate", "closer", VAL, *QUICK, "--closer", str(CLOSER), "--save", "c.parquet", "--keep-patches"
    )
    model, scores = open_network("closer/best"), read_scores("c.parquet")
    (batch,) = make_loader(open_records(VAL), size=(SIZE, SIZE), batch_size=50)
    with torch.inference_mode():
        larger = model.head(model.backbone(make_closer_view(model, batch.images, size=CLOSER)))
    first = score(model, open_records(VAL)).logits
    torch.testing.assert_close(scores.logits["image"], (first["image"] + larger) / 2, rtol=0, atol=1e-4)
    expected = score(model, open_records(VAL), closer_size=CLOSER)
    for kind, logits in scores.logits.items():
        torch.testing.assert_close(logits, expected.logits[kind], rtol=0, atol=1e-4)
        assert found["mAP"][kind] == pytest.approx(average_precision(logits, scores.target).mean)
    # Unasked, the patches are judged, whatever the network was trained for.
    read_json(capsys, "evaluate", "closer", VAL, *QUICK, "--save", "p.parquet")
    torch.testing.assert_close(read_scores("p.parquet").logits["tde"], first["tde"], rtol=0, atol=1e-4)
    # Nothing is tuned by scores of a closer look.
    message = f"c.parquet: it is of a closer look at {CLOSER} pixels, not of the patches"
    assert read_refusal(capsys, "tune", "closer", "--scores", "c.parquet", "--closer", "0", *KEEP).startswith(message)


def assert_curve(found: dict[str, Any], *, cost: float) -> None:
    """Efforts below 1 cost so much for each second look, and effort 1 the four patches."""
    *points, last = found["effort"]["points"]
    assert [point["passes"] for point in points] == pytest.approx([1 + cost * point["share"] for point in points])
    assert last["passes"] == 5


def test_tune_measures_and_stores_it_and_predict_takes_it(here: Path, capsys: Errors) -> None:
    model = open_network("plain/best")
    near, scores = score(model, open_records(VAL), closer_size=CLOSER), score(model, open_records(VAL))
    words = ("tune", "plain", VAL, "--mixing", "global", "--calibration", "platt")
    found = read_json(capsys, *words, "--closer", str(CLOSER), "--out", "tuned")
    look, generator = CloserLook(CLOSER, 2.25, near), torch.Generator()
    expected = tune_scores(scores, mixing="global", calibration="platt", closer=look, generator=generator)
    assert expected.effort is not None
    means = [point.mean for point in expected.effort.points]
    assert [point["mean"] for point in found["effort"]["points"]] == pytest.approx(means, abs=0.01)
    patches = read_json(capsys, *words, "--out", "patches")["effort"]["points"]
    assert max(abs(point["mean"] - mean) for point, mean in zip(patches, means, strict=True)) > 0.02
    assert_curve(found, cost=2.25)
    tuned = open_network("tuned")
    assert (found["closer_size"], tuned.closer_size, open_network("plain/best").closer_size) == (CLOSER, CLOSER, None)
    # What the parts say, mixed as was fitted.
    assert tuned.adaptive is not None
    assert tuned.adaptive.again is not None
    alone = tuned.adaptive.calibration.apply(scores.get("image"))
    looked = tuned.adaptive.choose(alone, 0.5)
    assert 8 < looked.sum() < 32
    both = tuned.adaptive.again.apply(near.remix(lam=tuned.lam, temperature=tuned.temperature).scaled("tde"))
    assert_predicted(capsys, torch.where(looked[:, None], both, alone), looked)


def assert_predicted(capsys: Errors, probs: Tensor, looked: Tensor) -> None:
    """`predict --effort 0.5` says this (N,L) of the validation pictures, and has weights where it looked (N,)."""
    records = open_records(VAL)
    Path("photos").mkdir()
    for place in range(len(records)):
        pixels = records.images.source(records.place(place))
        assert isinstance(pixels, np.ndarray)
        Image.fromarray(pixels).save(f"photos/{place:02d}.png")
    capsys.readouterr()
    words = ["predict", "--model", "tuned", "photos", "--effort", "0.5", "--top-k", str(probs.shape[1])]
    assert main([*words, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(probs)
    for line, expected, seen in zip(lines, probs, looked.tolist(), strict=True):
        tags = {tag["label"]: tag for tag in json.loads(line)["tags"]}
        assert [tags[name]["prob"] for name in records.labels.names] == pytest.approx(expected.tolist(), abs=1e-4)
        assert [tag["weights"] is not None for tag in tags.values()] == [seen] * len(tags)


def test_a_network_that_learnt_it_is_tuned_for_it_unless_told_otherwise(here: Path, capsys: Errors) -> None:
    found = read_json(capsys, "tune", "closer", VAL, *KEEP, "--out", "as-trained")
    assert (found["closer_size"], open_network("as-trained").closer_size) == (CLOSER, CLOSER)
    assert_curve(found, cost=2.25)
    patches = read_json(capsys, "tune", "closer", VAL, *KEEP, "--closer", "0", "--out", "patches")
    assert (patches["closer_size"], open_network("patches").closer_size) == (None, None)
    assert_curve(patches, cost=4)
    assert patches["effort"]["points"][-1] == found["effort"]["points"][-1]
    assert patches["effort"]["points"] != found["effort"]["points"]


def test_a_file_of_scores_shows_no_pictures_to_look_at_again(here: Path, capsys: Errors) -> None:
    read_json(capsys, "evaluate", "closer", VAL, *QUICK, "--save", "val.parquet", "--keep-patches")
    words = ("tune", "closer", "--scores", "val.parquet", *KEEP)
    assert "a file of scores shows no images to look at again" in read_refusal(capsys, *words)
    assert read_json(capsys, *words, "--closer", "0", "--out", "patches")["closer_size"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("evaluate base --closer 48", "the model was not trained on images and patches (PAT-T)"),
        ("tune parts --closer 48", "the model was not trained on images and patches (PAT-T)"),
        ("evaluate fixed --closer 48", "the backbone takes images of one size only"),
        ("tune plain --closer 32", "a closer look at 32 pixels is no closer than the 32 of the first"),
        ("tune plain --closer 48 --calibration none", "without a calibration no effort is fitted"),
    ],
)
def test_a_network_that_cannot_look_closer_is_told(words: str, message: str, here: Path, capsys: Errors) -> None:
    labels = open_records(VAL).labels.names
    save_checkpoint(MultiLabelClassifier("test_resnet", labels, image_size=SIZE), "base")
    save_checkpoint(PatchClassifier("test_resnet", labels, image_size=SIZE, patch_only=True), "parts")
    save_checkpoint(PatchClassifier("test_vit", labels, image_size=SIZE), "fixed")
    verb, network, *options = words.split()
    assert read_refusal(capsys, verb, network, VAL, *options).startswith(f"--closer: {message}")
