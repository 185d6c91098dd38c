"""`pivotpatch tune` as a user calls it: a run in, the same run with lam, calibration and thresholds out."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from verb import KEEP, LABELS, QUICK, SCENES, SIZE, Errors, read_json, read_refusal, score, write_run

from pivotpatch import Predictor
from pivotpatch.cli.main import main
from pivotpatch.data.address import open_records
from pivotpatch.data.scenes import SCENE_LABELS
from pivotpatch.inference.score_file import read_scores, write_scores
from pivotpatch.models import load_checkpoint, save_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.values import Patching
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import RunFolder
from pivotpatch.training.images import open_training_records
from pivotpatch.tuning.tune import tune_scores

TRAINED = "images are among those that the run was trained on"


def tune(capsys: Errors, *words: str) -> dict[str, Any]:
    return read_json(capsys, "tune", *words)


def fail(capsys: Errors, *words: str) -> str:
    return read_refusal(capsys, "tune", *words)


def assert_stored(found: dict[str, Any], folder: str) -> None:
    """A checkpoint holds what was told."""
    model = load_checkpoint(folder)
    for held, told in ((model.calibration, found["calibration"]["fitted"]), (model.adaptive, found["adaptive"])):
        assert (None if held is None else json.loads(json.dumps(asdict(held)))) == told
    assert model.thresholds == tuple(found["thresholds"]["values"])
    if isinstance(model, PatchClassifier):
        assert (model.patching.lam, model.patching.temperature) == pytest.approx((found["lam"], found["temperature"]))


def save_scores(capsys: Errors, *words: str) -> None:
    read_json(capsys, "evaluate", *words, "--keep-patches", *QUICK)


def test_a_run_is_tuned_on_what_it_held_out_and_keeps_the_result(here_with_run: Path, capsys: Errors) -> None:
    before = load_checkpoint("run/best")
    held: Any = open_training_records(load_config(Path("run/config.toml"))).val
    found = tune(capsys, "run", "--calibration", "platt", "--thresholds", "cost:1:2")
    expected: Any = tune_scores(score(before, held), calibration="platt", generator=torch.Generator())
    assert (found["pictures"], found["labels"], found["kind"]) == (24, list(LABELS), "tde")
    assert (found["lam"], found["temperature"]) == (expected.lam, expected.temperature)
    assert found["calibration"]["fitted"]["slope"] == pytest.approx(expected.calibration.slope, rel=1e-3)
    assert found["thresholds"]["goal"].startswith("least cost (1 a false positive, 2 a false negative)")
    assert_stored(found, "run/best")
    after = load_checkpoint("run/best").state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.state_dict().items())
    old = Path("run/best/model.json").read_text()
    assert_stored(tune(capsys, "run", "val.csv", *KEEP, "--out", "new/tuned", "--effort", "0.4"), "new/tuned")
    taken = [Predictor.load(name, device="cpu").engine.effort for name in ("run", "new/tuned")]
    assert taken == [1, 0.4]
    assert Path("run/best/model.json").read_text() == old


def test_some_labels_are_tuned_and_the_others_keep_what_they_have(here_with_run: Path, capsys: Errors) -> None:
    """From images that know fewer labels, and one more, and from scores of them, for a wanted precision."""
    tune(capsys, "run", "val.csv", "--mixing", "keep", "--calibration", "platt_per_label", "--out", "all")
    rows = Path("val.csv").read_text().replace("cat", "cow").splitlines()
    Path("some.csv").write_text("\n".join([rows[0].replace(",", ";"), *(row.replace(",", ";") for row in rows[1:])]))
    found = tune(capsys, "all", "some.csv", "--thresholds", "precision:0.4", "--calibration", "platt", "--out", "some")
    assert load_checkpoint("some").preferences.keys() == load_checkpoint("all").preferences.keys()
    assert main(["tune", "run", "some.csv", "--mixing", "keep", "--out", "part"]) == 0
    assert (
        "not stored: --prefer precision, --prefer balance, --prefer recall, an effort; the model has none for its other"
        in (capsys.readouterr().err)
    )
    assert not load_checkpoint("part").preferences
    assert main(["tune", "all", "val.csv", "--mixing", "keep", "--calibration", "none", "--out", "bare"]) == 0
    assert "not stored: an effort; that takes a calibration" in capsys.readouterr().err
    assert load_checkpoint("all").adaptive is not None
    assert load_checkpoint("bare").adaptive is None
    save_scores(capsys, "all", "some.csv", "--save", "some.parquet")
    options = ("--thresholds", "precision:0.4", "--calibration", "platt", "--out", "again", "--closer", "0")
    assert tune(capsys, "all", "--scores", "some.parquet", *options)["thresholds"] == found["thresholds"]
    assert found["labels"] == ["dog", "fish"]
    first, *_ = load_checkpoint("all").thresholds or ()
    assert load_checkpoint("some").thresholds == pytest.approx([first, *found["thresholds"]["values"]])


def test_training_images_are_refused(here_with_run: Path, capsys: Errors) -> None:
    assert fail(capsys, "run", "train.csv").startswith(f"table:train.csv: 36 of its 60 {TRAINED}; ")
    # The same files by another way, beside others.
    rows = [row.replace("train", "../train", 1) for row in Path("train.csv").read_text().splitlines()[1:]]
    Path("sub").mkdir()
    Path("sub/mixed.csv").write_text("\n".join(["image,labels", *rows, "x.png,dog"]))
    mixed = f"table:{here_with_run}/sub/mixed.csv?allow_escape=true"
    assert fail(capsys, "run", mixed).startswith(f"{mixed}: 36 of its 61 {TRAINED}")
    Path("link").symlink_to(here_with_run)
    assert fail(capsys, "run", "link/train.csv").startswith(f"table:link/train.csv: 36 of its 60 {TRAINED}")
    assert main(["evaluate", "run", "train.csv", *QUICK]) == 0
    assert f"table:train.csv: 36 of its 60 {TRAINED}, which flatters it" in capsys.readouterr().err
    Path("train.csv").unlink()  # a run far from its images can be tuned on others
    assert fail(capsys, "run").startswith("train.csv: ")
    assert tune(capsys, "run", "val.csv", *KEEP)["pictures"] == 30


def test_a_state_that_a_run_goes_on_from_is_not_replaced(here_with_run: Path, capsys: Errors) -> None:
    folder = RunFolder.open(Path("run"))
    folder.save_last(load_checkpoint("run/best"), {}, folder.load_state())
    folder.close()
    assert fail(capsys, "run/last", "val.csv").startswith("run/last: holds more than a checkpoint (state.json, train")
    assert_stored(tune(capsys, "run/last", "val.csv", *KEEP, "--out", "tuned"), "tuned")


@pytest.mark.slow
def test_a_run_that_is_being_trained_is_left_alone(here_with_run: Path, capsys: Errors) -> None:
    code = "import sys; from pathlib import Path; from pivotpatch.training.folder import RunFolder\n"
    code += "folder = RunFolder.open(Path('run')); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        assert fail(capsys, "run", "val.csv") == "run: another process is training in it; wait for it, or end it first"
        assert other.stdin is not None
        other.stdin.close()
    assert tune(capsys, "run", "val.csv", *KEEP)["wrote"] == "run/best"


def test_figures_are_drawn(here_with_run: Path, capsys: Errors) -> None:
    assert main(["tune", "run", "val.csv", "--plot", "plots/new", "--out", "tuned"]) == 0
    assert capsys.readouterr().out.splitlines()[-2] == "wrote tuned"
    assert sorted(path.name for path in Path("plots/new").iterdir()) == ["effort.png", "lam.png", "reliability.png"]


def test_scores_are_mixed_as_the_model_is_now(here_with_run: Path, capsys: Errors) -> None:
    """A file from before the model was given another lam tells as much as a new one."""
    scores = score(load_checkpoint("run/best"), open_records("table:val.csv"))
    write_scores(scores, "old.parquet")
    model = load_checkpoint("run/best")
    assert isinstance(model, PatchClassifier)
    model.set_mixing(lam=2.0, temperature=0.5)
    save_checkpoint(model, "model")
    found = tune(capsys, "model", "--scores", "old.parquet", *KEEP, "--out", "tuned")
    assert (found["lam"], found["temperature"], found["mixing"]) == (2.0, 0.5, None)
    mixed = scores.remix(lam=2.0, temperature=0.5)
    expected: Any = tune_scores(mixed, mixing="keep", calibration="platt", generator=torch.Generator())
    assert found["calibration"]["fitted"]["slope"] == pytest.approx(expected.calibration.slope)
    write_scores(replace(read_scores("old.parquet"), patch_logits=None, weights=None), "few.parquet")
    assert fail(capsys, "model", "--scores", "few.parquet").startswith("few.parquet: its temperature is not the model")


def test_scores_of_other_weights_or_of_training_images_are_refused(here_with_run: Path, capsys: Errors) -> None:
    save_checkpoint(PatchClassifier("test_vit", LABELS, image_size=SIZE).eval(), "other")
    save_scores(capsys, "other", "val.csv", "--save", "val.parquet")
    assert fail(capsys, "run", "--scores", "val.parquet").startswith("val.parquet: another model than run wrote it")
    save_scores(capsys, "run", "train.csv", "--save", "train.parquet")
    assert fail(capsys, "run", "--scores", "train.parquet").startswith(f"train.parquet: 36 of its 60 {TRAINED}; give")
    held: Any = open_training_records(load_config(Path("run/config.toml"))).val
    scores, names = read_scores("train.parquet"), {record.name for record in held}
    rows = torch.tensor([row for row, name in enumerate(scores.pictures) if name in names])
    write_scores(scores.select(rows), "held.parquet")
    assert tune(capsys, "run", "--scores", "held.parquet", *KEEP, "--out", "held")["pictures"] == 24


def assert_curve(found: dict[str, Any], *, cost: float) -> None:
    """Efforts below 1 cost so much for each second look, and effort 1 the four patches."""
    *points, last = found["effort"]["points"]
    assert [point["passes"] for point in points] == pytest.approx([1 + cost * point["share"] for point in points])
    assert last["passes"] == 5


def test_a_closer_look_is_measured_and_stored(here: Path, capsys: Errors) -> None:
    """Of a run that was trained without one, and of a model that learnt to look closer."""
    images, side, opened = "scenes:@val?count=40&size=32", 48, PatchClassifier.from_pretrained
    torch.manual_seed(0)
    model, records = PatchClassifier("test_resnet", SCENE_LABELS.names, image_size=SIZE).eval(), open_records(images)
    write_run("plain", model, f"data.train={SCENES[0]}")
    near, scores = score(model, records, closer_size=side), score(model, records)
    model.patching = Patching(closer_size=side)
    save_checkpoint(model, "closer")
    words = ("--calibration", "platt", "--closer", str(side), "--out", "tuned")
    found = tune(capsys, "plain", images, *words)
    look: Any = {"model": model, "closer": near}
    expected: Any = tune_scores(scores, calibration="platt", **look, generator=torch.Generator())
    means = [point.mean for point in expected.effort.points]
    assert [point["mean"] for point in found["effort"]["points"]] == pytest.approx(means, abs=0.01)
    assert_curve(found, cost=2.25)
    assert (found["closer_size"], opened("tuned").closer_size, opened("plain/best").closer_size) == (side, side, None)
    for options, size, cost in (((), side, 2.25), (("--closer", "0"), None, 4)):  # as trained, or as told
        learnt = tune(capsys, "closer", images, *KEEP, *options, "--out", f"learnt-{size}")
        assert (learnt["closer_size"], opened(f"learnt-{size}").closer_size) == (size, size)
        assert_curve(learnt, cost=cost)
