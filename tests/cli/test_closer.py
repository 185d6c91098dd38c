"""The closer look as a user meets it: trained, judged by evaluate, measured and stored by tune, taken by predict."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from together import run_together, run_verb
from torch import Tensor
from train_command import SCENES, Errors, train
from verb import read_json, read_refusal

from pivotpatch.cli.main import main
from pivotpatch.core.metrics import average_precision
from pivotpatch.data.address import open_records
from pivotpatch.data.loading import make_loader
from pivotpatch.inference.score_file import read_scores
from pivotpatch.inference.scores import Scores
from pivotpatch.inference.scoring import score_pictures
from pivotpatch.models.checkpoint import load_checkpoint, save_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.views import make_closer_view
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import RunFolder
from pivotpatch.tuning.effort import CloserLook
from pivotpatch.tuning.tune import tune_scores

VAL = "scenes:@val?count=40&size=32"
SIZE, CLOSER = 32, 48
QUICK = ("--workers", "0", "--resamples", "0")
KEEP = ("--mixing", "keep", "--calibration", "platt")


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


def score(model: PatchClassifier, *, closer_size: int | None = None) -> Scores:
    loader = make_loader(open_records(VAL), size=(SIZE, SIZE), batch_size=50, every_batch=True)
    accelerator = Accelerator(cpu=True)
    return score_pictures(model, loader, accelerator=accelerator, keep_patches=True, closer_size=closer_size)


def test_evaluate_judges_a_closer_look(here: Path, capsys: Errors) -> None:
    found = read_json(
        capsys, "evaluate", "closer", VAL, *QUICK, "--closer", str(CLOSER), "--save", "c.parquet", "--keep-patches"
    )
    model, scores = open_network("closer/best"), read_scores("c.parquet")
    (batch,) = make_loader(open_records(VAL), size=(SIZE, SIZE), batch_size=50)
    with torch.inference_mode():
        larger = model.head(model.backbone(make_closer_view(model, batch.images, size=CLOSER)))
    first = score(model).logits["image"]
    torch.testing.assert_close(scores.logits["image"], (first + larger) / 2, rtol=0, atol=1e-4)
    assert (first - larger).abs().mean() > 0.01
    expected = score(model, closer_size=CLOSER)
    assert list(found["kinds"]) == ["image", "patch", "tde"]
    for kind, logits in scores.logits.items():
        torch.testing.assert_close(logits, expected.logits[kind], rtol=0, atol=1e-4)
        assert found["mAP"][kind] == pytest.approx(average_precision(logits, scores.target).mean)
    # Unasked, the patches are judged, whatever the network was trained for.
    plain = read_json(capsys, "evaluate", "closer", VAL, *QUICK, "--save", "p.parquet")
    torch.testing.assert_close(read_scores("p.parquet").logits["tde"], score(model).logits["tde"], rtol=0, atol=1e-4)
    assert plain["mAP"] != found["mAP"]


def assert_curve(found: dict[str, Any], *, cost: float) -> None:
    """Efforts below 1 cost so much for each second look, and effort 1 the four patches."""
    *points, last = found["effort"]["points"]
    assert [point["passes"] for point in points] == pytest.approx([1 + cost * point["share"] for point in points])
    assert last["passes"] == 5


def test_tune_measures_and_stores_it_and_predict_takes_it(here: Path, capsys: Errors) -> None:
    model = open_network("plain/best")
    near, scores = score(model, closer_size=CLOSER), score(model)
    words = ("tune", "plain", VAL, "--mixing", "global", "--calibration", "platt")
    found = read_json(capsys, *words, "--closer", str(CLOSER), "--out", "tuned")
    expected = tune_scores(
        scores,
        mixing="global",
        calibration="platt",
        closer=CloserLook(CLOSER, 2.25, near),
        generator=torch.Generator(),
    )
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


def test_tags_that_were_begun_without_a_closer_look_do_not_go_on_with_one(here: Path, capsys: Errors) -> None:
    Image.new("RGB", (SIZE, SIZE)).save("one.png")
    read_json(capsys, "tune", "plain", VAL, *KEEP, "--out", "tuned")
    words = ("predict", "--model", "tuned", "one.png", "--out", "tags.csv", "--effort", "0.5")
    settings = read_json(capsys, *words)["settings"]
    Path("tags.csv").unlink()
    Path("tags.csv.parts").mkdir()
    Path("tags.csv.parts/settings.json").write_text(json.dumps(settings))
    model = open_network("tuned")
    model.closer_size = CLOSER
    save_checkpoint(model, "tuned", overwrite=True)
    assert read_refusal(capsys, *words).startswith("tags.csv.parts: it was begun with other weights (")


def test_a_network_that_learnt_it_is_tuned_for_it_unless_told_otherwise(here: Path, capsys: Errors) -> None:
    found = read_json(capsys, "tune", "closer", VAL, *KEEP, "--out", "as-trained")
    assert (found["closer_size"], open_network("as-trained").closer_size) == (CLOSER, CLOSER)
    assert_curve(found, cost=2.25)
    nearer = read_json(capsys, "tune", "closer", VAL, *KEEP, "--closer", "64", "--out", "nearer")
    assert (nearer["closer_size"], open_network("nearer").closer_size) == (64, 64)
    assert_curve(nearer, cost=4)
    patches = read_json(capsys, "tune", "closer", VAL, *KEEP, "--closer", "0", "--out", "patches")
    assert (patches["closer_size"], open_network("patches").closer_size) == (None, None)
    expected = tune_scores(
        score(open_network("closer/best")), mixing="keep", calibration="platt", generator=torch.Generator()
    ).effort
    assert expected is not None
    means = [point.mean for point in expected.points]
    assert [point["mean"] for point in patches["effort"]["points"]] == pytest.approx(means, abs=0.01)
    assert_curve(patches, cost=4)
    for other in (nearer, patches):
        assert other["effort"]["points"][-1] == found["effort"]["points"][-1]
        assert other["effort"]["points"] != found["effort"]["points"]


def test_a_file_of_scores_shows_no_pictures_to_look_at_again(here: Path, capsys: Errors) -> None:
    read_json(capsys, "evaluate", "closer", VAL, *QUICK, "--save", "val.parquet", "--keep-patches")
    words = ("tune", "closer", "--scores", "val.parquet", *KEEP)
    message = (
        "--closer: a file of scores alone shows no images to look at again; "
        "name them after the model too, or give --closer 0 to look at patches"
    )
    before = Path("closer/best/model.json").read_bytes()
    assert read_refusal(capsys, *words) == message
    read_json(capsys, "evaluate", "plain", VAL, *QUICK, "--save", "plain.parquet", "--keep-patches")
    assert read_refusal(capsys, "tune", "plain", "--scores", "plain.parquet", "--closer", "48") == message
    assert Path("closer/best/model.json").read_bytes() == before
    assert read_json(capsys, *words, "--closer", "0", "--out", "patches")["closer_size"] is None
    live = read_json(capsys, "tune", "closer", VAL, *KEEP, "--out", "live")
    found = read_json(capsys, "tune", "closer", VAL, "--scores", "val.parquet", *KEEP, "--out", "found")
    assert found["closer_size"] == CLOSER
    means = [point["mean"] for point in live["effort"]["points"]]
    assert [point["mean"] for point in found["effort"]["points"]] == pytest.approx(means, abs=1e-3)


def test_a_picture_that_cannot_be_looked_at_again_is_named(here: Path, capsys: Errors) -> None:
    generator = np.random.default_rng(0)
    for place in range(8):
        Image.fromarray(generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(f"{place}.png")
    rows = "".join(f"{place}.png,{place % 2},{place // 4}\n" for place in range(8))
    Path("val.csv").write_text(f"image,cat,dog\n{rows}")
    folder = RunFolder(Path("run"), load_config(None, ["data.on_error=skip", "data.workers=0"]))
    folder.create()
    folder.save_best(PatchClassifier("test_resnet", ["cat", "dog"], image_size=SIZE))
    folder.close()
    read_json(capsys, "evaluate", "run", "val.csv", *QUICK, "--save", "val.parquet", "--keep-patches")
    Path("3.png").write_bytes(b"no picture")
    words = ("tune", "run", "val.csv", "--scores", "val.parquet", "--closer", "48", "--out", "tuned")
    expected = "--closer: 1 images cannot be looked at again (3.png); make them readable, or leave --scores out"
    assert read_refusal(capsys, *words) == expected


@pytest.mark.slow
def test_two_processes_look_closer_as_one(here: Path, capsys: Errors) -> None:
    words = ["tune", "closer", VAL, *KEEP]
    alone = read_json(capsys, *words, "--out", "alone")
    first, second = run_together(run_verb, [*words, "--out", "together", "--json"])
    assert (first.status, second.status, second.out) == (0, 0, "")
    means = [point["mean"] for point in alone["effort"]["points"]]
    assert [point["mean"] for point in json.loads(first.out)["effort"]["points"]] == pytest.approx(means, abs=0.01)
    assert open_network("together").closer_size == CLOSER


@pytest.mark.parametrize("verb", ["evaluate", "tune"])
@pytest.mark.parametrize(
    ("network", "size", "message"),
    [
        ("base", "48", "the model was not trained on images and patches (PAT-T); leave it out"),
        ("parts", "48", "the model was not trained on images and patches (PAT-T); leave it out"),
        ("fixed", "48", "the backbone takes images of one size only; look at patches instead"),
        ("plain", "32", "a closer look at 32 pixels is no closer than the 32 of the first; give more than 32"),
        ("plain", "-1", "a closer look at -1 pixels is no closer than the 32 of the first; give more than 32"),
    ],
)
def test_a_network_that_cannot_look_closer_is_told(
    verb: str, network: str, size: str, message: str, here: Path, capsys: Errors
) -> None:
    labels = open_records(VAL).labels.names
    save_checkpoint(MultiLabelClassifier("test_resnet", labels, image_size=SIZE), "base")
    save_checkpoint(PatchClassifier("test_resnet", labels, image_size=SIZE, patch_only=True), "parts")
    save_checkpoint(PatchClassifier("test_vit", labels, image_size=SIZE), "fixed")
    assert read_refusal(capsys, verb, network, VAL, "--closer", size).startswith(f"--closer: {message}")


def test_scores_cannot_look_closer(here: Path, capsys: Errors) -> None:
    Path("s.csv").write_text("picture,cat,target:cat\na,1,1\nb,2,0\n")
    message = "--closer: s.csv holds scores, no model; leave it out"
    for size in ("48", "0"):
        assert read_refusal(capsys, "evaluate", "s.csv", "--closer", size) == message


@pytest.mark.parametrize("name", ["c.parquet", "c.csv"])
def test_nothing_is_tuned_by_scores_of_a_closer_look(name: str, here: Path, capsys: Errors) -> None:
    read_json(capsys, "evaluate", "plain", VAL, *QUICK, "--closer", str(CLOSER), "--save", name)
    message = (
        f"{name}: it is of a closer look at {CLOSER} pixels, not of the patches; "
        "write it by pivotpatch evaluate without --closer"
    )
    assert read_refusal(capsys, "tune", "plain", "--scores", name, *KEEP) == message


def test_without_a_calibration_there_is_no_effort_to_look_closer_for(here: Path, capsys: Errors) -> None:
    words = ("tune", "plain", VAL, "--calibration", "none", "--out", "tuned")
    message = "--closer: without a calibration no effort is fitted; leave one of both out"
    assert read_refusal(capsys, *words, "--closer", str(CLOSER)) == message
    assert read_refusal(capsys, *words, "--closer", "0") == message
    assert read_json(capsys, *words)["effort"] is None


def test_people_are_told_which_second_look_was_fitted(here: Path, capsys: Errors) -> None:
    told = f"efforts between 0 and 1 take a closer look at {CLOSER} pixels, not at the patches"
    for size, expected in ((str(CLOSER), True), ("0", False)):
        capsys.readouterr()
        assert main(["tune", "plain", VAL, *KEEP, "--closer", size, "--out", f"tuned-{size}"]) == 0
        assert (told in capsys.readouterr().out.splitlines()) == expected
