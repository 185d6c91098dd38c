"""`pivotpatch tune` as a user calls it: a run in, the same run with lam, calibration and thresholds out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from together import run_together, run_verb
from tune_command import LABELS, Errors, assert_stored, fail, make_run, score, tune

from pivotpatch.cli.main import build_parser, main
from pivotpatch.data.scenes import SCENE_LABELS
from pivotpatch.models.checkpoint import load_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.build import open_training_records
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import RunFolder
from pivotpatch.tuning.tune import METHODS, Mixing, tune_scores


def test_a_run_is_tuned_on_what_it_held_out_and_keeps_the_result(here_with_run: Path, capsys: Errors) -> None:
    before = load_checkpoint("run/best")
    held = open_training_records(load_config(Path("run/config.toml"))).val
    assert held is not None
    found = tune(capsys, "run", "--mixing", "global", "--calibration", "platt", "--thresholds", "cost:1:2")
    expected = tune_scores(score(before, held), mixing="global", calibration="platt", generator=torch.Generator())
    assert (found["pictures"], found["labels"], found["kind"]) == (24, list(LABELS), "tde")
    assert (found["lam"], found["temperature"]) == (expected.lam, expected.temperature)
    assert expected.calibration is not None
    assert found["calibration"]["fitted"]["slope"] == pytest.approx(expected.calibration.slope, rel=1e-3)
    assert found["thresholds"]["goal"].startswith("least cost (1 a false positive, 2 a false negative)")
    assert (found["wrote"], found["not_read"]) == ("run/best", {})
    assert "never tune on those that you test on" in found["warning"]
    assert_stored(found, "run/best")
    after = load_checkpoint("run/best").state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.state_dict().items())
    assert sorted(path.name for path in Path("run").iterdir()) == [".lock", "best", "config.toml", "environment.json"]


def test_a_new_checkpoint_leaves_the_old_one_alone(here_with_run: Path, capsys: Errors) -> None:
    old = Path("run/best/model.json").read_text()
    found = tune(capsys, "run", "val.csv", "--out", "new/tuned")
    assert (found["pictures"], found["wrote"]) == (30, "new/tuned")
    assert_stored(found, "new/tuned")
    assert Path("run/best/model.json").read_text() == old


def test_a_baseline_gets_calibration_and_thresholds_alone(here_with_run: Path, capsys: Errors) -> None:
    make_run("plain", MultiLabelClassifier)
    found = tune(capsys, "plain")
    assert (found["kind"], found["mixing"]) == ("image", None)
    assert_stored(found, "plain/best")
    # PAT-I's scores tell of the image too; the checkpoint cannot hold a lam.
    words = ["evaluate", "plain", "val.csv", "--patch-inference", "--save", "pat.npz", "--workers", "0"]
    assert main([*words, "--resamples", "0"]) == 0
    capsys.readouterr()
    assert tune(capsys, "plain", "--scores", "pat.npz", "--out", "tuned")["kind"] == "image"
    message = "--mixing: the network has no patches, so there is no lam; leave it out"
    assert fail(capsys, "plain", "--mixing", "global") == message


def test_what_was_stored_decides_in_evaluate(here_with_run: Path, capsys: Errors) -> None:
    found = tune(capsys, "run", "val.csv")
    words = ["evaluate", "run", "val.csv", "--policy", "fitted", "--json", "--workers", "0", "--resamples", "0"]
    assert main(words) == 0
    decided = json.loads(capsys.readouterr().out)["kinds"]["tde"]["decided"]
    assert decided["recall"] == pytest.approx([row["recall"] for row in found["thresholds"]["rows"]])


def test_training_pictures_are_refused(here_with_run: Path, capsys: Errors) -> None:
    held = "give the run alone, which takes the pictures that it held out"
    message = f"table:train.csv: 36 of its 60 pictures are among those that the run was trained on; {held}"
    assert fail(capsys, "run", "train.csv") == message
    # The same files by another way, beside others.
    rows = [row.replace("train", "../train", 1) for row in Path("train.csv").read_text().splitlines()[1:]]
    Path("sub").mkdir()
    Path("sub/mixed.csv").write_text("\n".join(["image,labels", *rows, "x.png,red"]))
    mixed = f"table:{here_with_run}/sub/mixed.csv?allow_escape=true"
    assert fail(capsys, "run", mixed).startswith(f"{mixed}: 36 of its 61 pictures are among")
    make_run("whole", PatchClassifier, "data.val_fraction=0")
    found = fail(capsys, "whole", "train.csv")
    assert found.endswith("60 of its 60 pictures are among those that the run was trained on; name others")


def test_drawn_training_pictures_are_refused(here_with_run: Path, capsys: Errors) -> None:
    train = "scenes:@train?count=20&size=32"
    make_run("drawn", PatchClassifier, f"data.train={train}", labels=SCENE_LABELS.names)
    assert fail(capsys, "drawn", train).startswith(f"{train}: 12 of its 20 pictures are among")
    for options, count in (("count=40&size=32", 40), ("count=20&size=48&company=0.8&seed=0", 20)):
        again = f"scenes:@train?{options}"  # the same scenes, written otherwise
        assert fail(capsys, "drawn", again).startswith(f"{again}: 12 of its {count} pictures are among")
    assert tune(capsys, "drawn", "scenes:@val?count=20&size=32", "--out", "tuned")["pictures"] == 20
    assert tune(capsys, "drawn", "scenes:@train?count=20&size=32&seed=1", "--out", "others")["pictures"] == 20


def test_a_run_far_from_its_pictures_can_be_tuned_on_others(here_with_run: Path, capsys: Errors) -> None:
    Path("train.csv").unlink()
    assert fail(capsys, "run").startswith("train.csv: ")
    assert tune(capsys, "run", "val.csv")["pictures"] == 30


def test_a_state_that_a_run_goes_on_from_is_not_replaced(here_with_run: Path, capsys: Errors) -> None:
    folder = RunFolder.open(Path("run"))
    folder.save_last(load_checkpoint("run/best"), {}, folder.load_state())
    folder.close()
    assert fail(capsys, "run/last", "val.csv") == (
        "run/last: holds more than a checkpoint (state.json, training.safetensors), which would be lost; "
        "give --out FOLDER"
    )
    assert_stored(tune(capsys, "run/last", "val.csv", "--out", "tuned"), "tuned")
    assert_stored(tune(capsys, "run/best", "val.csv"), "run/best")


def test_a_run_that_is_being_trained_is_left_alone(here_with_run: Path, capsys: Errors) -> None:
    code = "import sys; from pathlib import Path; from pivotpatch.training.folder import RunFolder\n"
    code += "folder = RunFolder.open(Path('run')); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        assert fail(capsys, "run", "val.csv") == "run: another process is training in it; wait for it, or end it first"
        assert tune(capsys, "run", "val.csv", "--out", "tuned")["wrote"] == "tuned"
        assert other.stdin is not None
        other.stdin.close()
    assert tune(capsys, "run", "val.csv")["wrote"] == "run/best"


def test_what_people_see(here_with_run: Path, capsys: Errors) -> None:
    assert main(["tune", "run", "val.csv", "--plot", "plots/new", "--out", "tuned"]) == 0
    captured = capsys.readouterr()
    found = tune(capsys, "run", "val.csv", "--out", "again")
    assert captured.out.startswith("30 pictures, 3 labels, TDE logits\n")
    for mixture in ("as scored", "shared", "per label"):
        tried = found["mixing"]["tried"][mixture]
        (line,) = [line for line in captured.out.splitlines() if line.startswith(mixture)]
        assert f"{100 * tried['mAP']:.2f}" in line
        if tried["gain"]:
            low, high = 100 * tried["gain"]["low"], 100 * tried["gain"]["high"]
            assert line.endswith(f"{100 * tried['gain']['value']:+.2f}  {low:+.2f} to {high:+.2f}")
    for name in ("before", "platt_per_label"):
        overall = found["calibration"]["qualities"][name]["overall"]
        (line,) = [line for line in captured.out.splitlines() if line.startswith(name)]
        assert line.split()[1] == f"{100 * overall['ece_width']:.2f}"
    decisions = found["thresholds"]["decisions"]
    (line,) = [line for line in captured.out.splitlines() if line.startswith("OF1")]
    assert line.split()[1:] == [f"{100 * decisions[when]['OF1']:.1f}" for when in ("before", "after")]
    assert "thresholds: 3 thresholds for best F1, " in captured.out
    assert captured.out.splitlines()[-2:] == ["wrote tuned", found["warning"]]
    (line,) = [line for line in captured.out.splitlines() if line.startswith("effort: ")]
    assert f"({100 * found['effort']['gain']:+.2f} mAP)" in line
    drawn = ("reliability", "lam", "effort")
    assert captured.err.splitlines() == ["score: 1 of 1", *(f"drew plots/new/{name}.png" for name in drawn)]
    for name in drawn:
        with Image.open(f"plots/new/{name}.png") as picture:
            assert picture.width >= 500
    assert main(["tune", "run", "--mixing", "keep"]) == 0
    shown = capsys.readouterr().out
    assert "lam 1 and temperature 1 as they are" in shown
    assert "\nreplaced run/best\n" in shown


def test_two_processes_tune_as_one(here_with_run: Path, capsys: Errors) -> None:
    alone = tune(capsys, "run", "val.csv", "--out", "alone")
    first, second = run_together(run_verb, ["tune", "run", "val.csv", "--out", "together", "--json"])
    assert (first.status, second.status, second.out) == (0, 0, "")
    together = json.loads(first.out)
    assert together["lam"] == alone["lam"]
    assert_stored(together, "together")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: is neither a run nor a checkpoint nor scores; give a run, a checkpoint"),
        (["s.npz", "val.csv"], "s.npz: holds scores, no network; write RUN --scores s.npz"),
        (["run", "val"], "'val': is neither an address nor a table or folder that is there; check the path"),
        (["run", "val.csv", "x.csv"], "'x.csv': a third word; give what to tune and the pictures"),
        (["run", "--thresholds", "f2"], "goal: unknown goal 'f2'; did you mean 'f1'?"),
        (["run", "--thresholds", "precision:2"], "PrecisionAtLeast: precision is 2.0; give a share above 0, up to 1"),
        (["run", "--out", "run"], "run: exists already; choose another folder"),
        (["run/best"], "run/best: a checkpoint knows no pictures; name validation pictures after it, such as val.csv"),
        (["whole"], "whole: the run held out no pictures; name validation pictures after it, such as val.csv"),
        (["run", "none.csv"], "table:none.csv: no picture has any of the labels, so nothing can be fitted; give"),
        (
            ["run", "red.csv"],
            "table:red.csv: it lacks 2 of the 3 labels, each of which is fitted (dark, striped); label them too, or "
            "train it for yours first: pivotpatch train table:red.csv model.start_from=run/best",
        ),
        (
            ["tagger", "red.csv", "--out", "x"],
            "table:red.csv: it lacks 80 of the 80 labels, each of which is fitted (person, bicycle, car and 77 more); "
            "label them too, or train it for yours first: pivotpatch train tagger table:red.csv",
        ),
        (["run", "few.csv"], "tune: there are 2 pictures; give 5 or more; hundreds are usual"),
        (["run", "--scores", "s.npz"], "s.npz: its 1 labels are not the 3 of the network, in its order; write it by"),
        (["run", "--scores", "no.npz"], "no.npz: there is no such file; check the path"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    words: list[str], message: str, here_with_run: Path, capsys: Errors
) -> None:
    make_run("whole", PatchClassifier, "data.val_fraction=0")
    Path("none.csv").write_text("image,dark,red,striped\nval0.png,0,0,0\n")
    Path("few.csv").write_text("image,dark,red,striped\nval0.png,0,1,0\nval1.png,1,0,0\n")
    Path("red.csv").write_text("image,labels\nval0.png,red\nval1.png,\n")
    np.savez("s.npz", scores=np.ones((9, 1)), target=np.ones((9, 1)))
    before = Path("run/best/model.json").read_bytes()
    assert fail(capsys, *words).startswith(message)
    assert Path("run/best/model.json").read_bytes() == before


def test_the_options_are_those_of_the_functions(capsys: Errors) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["tune", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"--mixing {{{','.join(get_args(Mixing))}}}" in text
    assert f"--calibration {{{','.join(['auto', 'none', *METHODS])}}}" in text
    for words in (["tune"], ["tune", "run", "--mixing", "some"], ["tune", "run", "--calibration", "isotonic"]):
        with pytest.raises(SystemExit, match="2"):
            build_parser().parse_args(words)
