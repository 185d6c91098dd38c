"""`pivotpatch tune` as a user calls it: a run in, the same run with lam, calibration and thresholds out."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from together import run_together, run_verb
from tune_command import LABELS, SIZE, Errors, assert_stored, fail, make_run, score, tune

from pivotpatch.cli.main import build_parser, main
from pivotpatch.data.address import open_records
from pivotpatch.data.scenes import SCENE_LABELS
from pivotpatch.inference.score_file import read_scores, write_scores
from pivotpatch.models.checkpoint import load_checkpoint, save_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.build import open_training_records
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import RunFolder
from pivotpatch.tuning.tune import tune_scores

KEEP = ("--mixing", "keep", "--calibration", "platt")  # quick
TRAINED = "images are among those that the run was trained on"


def save_scores(capsys: Errors, what: str, data: str, file: str) -> None:
    words = ["evaluate", what, data, "--save", file, "--keep-patches", "--workers", "0", "--resamples", "0"]
    assert main(words) == 0
    capsys.readouterr()


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
    assert_stored(found, "run/best")
    after = load_checkpoint("run/best").state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.state_dict().items())
    assert sorted(path.name for path in Path("run").iterdir()) == [".lock", "best", "config.toml", "environment.json"]


def test_a_new_checkpoint_leaves_the_old_one_alone(here_with_run: Path, capsys: Errors) -> None:
    old = Path("run/best/model.json").read_text()
    found = tune(capsys, "run", "val.csv", *KEEP, "--out", "new/tuned")
    assert (found["pictures"], found["wrote"]) == (30, "new/tuned")
    assert_stored(found, "new/tuned")
    assert Path("run/best/model.json").read_text() == old


def test_a_model_without_patches_gets_calibration_and_thresholds_alone(here_with_run: Path, capsys: Errors) -> None:
    make_run("plain", MultiLabelClassifier)
    found = tune(capsys, "plain")
    assert (found["kind"], found["mixing"]) == ("image", None)
    assert_stored(found, "plain/best")
    # PAT-I's scores tell of the image too; the checkpoint cannot hold a lam.
    words = ["evaluate", "plain", "val.csv", "--patch-inference", "--save", "pat.parquet", "--workers", "0"]
    assert main([*words, "--resamples", "0"]) == 0
    assert tune(capsys, "plain", "--scores", "pat.parquet", "--out", "tuned")["kind"] == "image"
    message = "--mixing: the model has no patches, so there is no lam; leave it out"
    assert fail(capsys, "plain", "--mixing", "global") == message


def test_what_was_stored_decides_in_evaluate(here_with_run: Path, capsys: Errors) -> None:
    found = tune(capsys, "run", "val.csv", *KEEP)
    words = ["evaluate", "run", "val.csv", "--policy", "fitted", "--json", "--workers", "0", "--resamples", "0"]
    assert main(words) == 0
    decided = json.loads(capsys.readouterr().out)["kinds"]["tde"]["decided"]
    assert decided["recall"] == pytest.approx([row["recall"] for row in found["thresholds"]["rows"]])


def test_training_images_are_refused(here_with_run: Path, capsys: Errors) -> None:
    held = "give the run alone, which takes the images that it held out"
    assert fail(capsys, "run", "train.csv") == f"table:train.csv: 36 of its 60 {TRAINED}; {held}"
    # The same files by another way, beside others.
    rows = [row.replace("train", "../train", 1) for row in Path("train.csv").read_text().splitlines()[1:]]
    Path("sub").mkdir()
    Path("sub/mixed.csv").write_text("\n".join(["image,labels", *rows, "x.png,red"]))
    mixed = f"table:{here_with_run}/sub/mixed.csv?allow_escape=true"
    assert fail(capsys, "run", mixed).startswith(f"{mixed}: 36 of its 61 {TRAINED}")
    Path("link").symlink_to(here_with_run)
    assert fail(capsys, "run", "link/train.csv").startswith(f"table:link/train.csv: 36 of its 60 {TRAINED}")
    make_run("whole", PatchClassifier, "data.val_fraction=0")
    assert fail(capsys, "whole", "train.csv").endswith(f"60 of its 60 {TRAINED}; name others")
    Path("train.csv").unlink()  # a run far from its images can be tuned on others
    assert fail(capsys, "run").startswith("train.csv: ")
    assert tune(capsys, "run", "val.csv", *KEEP)["pictures"] == 30


def test_drawn_training_images_are_refused(here_with_run: Path, capsys: Errors) -> None:
    train = "scenes:@train?count=20&size=32"
    make_run("drawn", PatchClassifier, f"data.train={train}", labels=SCENE_LABELS.names)
    for options, count in (("count=20&size=32", 20), ("count=40&size=48&company=0.8&seed=0", 40)):
        again = f"scenes:@train?{options}"  # the same scenes, written otherwise
        assert fail(capsys, "drawn", again).startswith(f"{again}: 12 of its {count} {TRAINED}")
    others = "scenes:@train?count=20&size=32&seed=1"
    assert tune(capsys, "drawn", others, *KEEP, "--out", "others")["pictures"] == 20


def test_training_images_inside_a_table_are_those_of_that_table(here_with_run: Path, capsys: Errors) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    columns = {
        "image": [{"bytes": buffer.getvalue(), "path": f"{place}.png"} for place in range(10)],
        "labels": [[LABELS[place % 3]] for place in range(10)],
    }
    for name in ("ours", "theirs"):
        pq.write_table(pa.table(columns), f"{name}.parquet")
    make_run("inside", PatchClassifier, "data.train=table:ours.parquet")
    assert f"6 of its 10 {TRAINED}" in fail(capsys, "inside", "ours.parquet")
    assert tune(capsys, "inside", "theirs.parquet", *KEEP)["pictures"] == 10


def test_a_state_that_a_run_goes_on_from_is_not_replaced(here_with_run: Path, capsys: Errors) -> None:
    folder = RunFolder.open(Path("run"))
    folder.save_last(load_checkpoint("run/best"), {}, folder.load_state())
    folder.close()
    assert fail(capsys, "run/last", "val.csv").startswith("run/last: holds more than a checkpoint (state.json, train")
    assert_stored(tune(capsys, "run/last", "val.csv", *KEEP, "--out", "tuned"), "tuned")
    assert_stored(tune(capsys, "run/best", "val.csv", *KEEP), "run/best")


@pytest.mark.slow
def test_a_run_that_is_being_trained_is_left_alone(here_with_run: Path, capsys: Errors) -> None:
    code = "import sys; from pathlib import Path; from pivotpatch.training.folder import RunFolder\n"
    code += "folder = RunFolder.open(Path('run')); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        assert fail(capsys, "run", "val.csv") == "run: another process is training in it; wait for it, or end it first"
        assert tune(capsys, "run", "val.csv", *KEEP, "--out", "tuned")["wrote"] == "tuned"
        assert other.stdin is not None
        other.stdin.close()
    assert tune(capsys, "run", "val.csv", *KEEP)["wrote"] == "run/best"


def test_what_people_see(here_with_run: Path, capsys: Errors) -> None:
    assert main(["tune", "run", "val.csv", "--plot", "plots/new", "--out", "tuned"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    found = tune(capsys, "run", "val.csv", "--out", "again")

    def find(start: str) -> str:
        (line,) = [line for line in lines if line.startswith(start)]
        return line

    assert lines[0] == "30 images, 3 labels, TDE logits"
    assert all(len(line) <= 80 for line in lines if not line.startswith(("thresholds:", "effort:", found["warning"])))
    tried = found["mixing"]["tried"]
    assert f"{100 * tried['as scored']['mAP']:.2f}" in find("as scored")
    gain = {name: f"{100 * value:+.2f}" for name, value in tried["shared"]["gain"].items()}
    assert find("shared").endswith(f"{gain['value']}  {gain['low']} to {gain['high']}")
    for name in ("before", "platt_per_label"):
        overall = found["calibration"]["qualities"][name]["overall"]
        assert find(name).split()[1] == f"{100 * overall['ece_width']:.2f}"
    decisions = found["thresholds"]["decisions"]
    assert find("OF1").split()[1:] == [f"{100 * decisions[when]['OF1']:.1f}" for when in ("before", "after")]
    assert "thresholds: 3 thresholds for best F1, " in captured.out
    assert f"({100 * found['effort']['gain']:+.2f} mAP)" in find("effort: ")
    assert lines[-2:] == ["wrote tuned", found["warning"]]
    drawn = ("reliability", "lam", "effort")
    assert captured.err.splitlines() == ["score: 1 of 1", *(f"drew plots/new/{name}.png" for name in drawn)]
    for name in drawn:
        with Image.open(f"plots/new/{name}.png") as image:
            assert image.width >= 500
    assert main(["tune", "run", *KEEP]) == 0
    shown = capsys.readouterr().out
    assert "lam 1 and temperature 1 as they are" in shown
    assert "\nreplaced run/best\n" in shown


@pytest.mark.slow
def test_two_processes_tune_as_one(here_with_run: Path, capsys: Errors) -> None:
    alone = tune(capsys, "run", "val.csv", "--out", "alone")
    first, second = run_together(run_verb, ["tune", "run", "val.csv", "--out", "together", "--json"])
    assert (first.status, second.status, second.out) == (0, 0, "")
    together = json.loads(first.out)
    assert together["lam"] == alone["lam"]
    assert_stored(together, "together")


def test_scores_need_no_forward_pass_and_no_images(here_with_run: Path, capsys: Errors) -> None:
    live = tune(capsys, "run", "val.csv", *KEEP, "--out", "live")
    save_scores(capsys, "run", "val.csv", "val.parquet")
    with_truth = tune(capsys, "run", "val.csv", "--scores", "val.parquet", *KEEP, "--out", "with")
    for path in here_with_run.glob("*.png"):
        path.unlink()
    for _ in range(2):  # what is fitted and stored leaves the weights alone
        found = tune(capsys, "run", "--scores", "val.parquet", *KEEP)
    assert_stored(found, "run/best")
    for other in (live, with_truth):
        slopes = other["calibration"]["fitted"]["slope"]
        assert found["calibration"]["fitted"]["slope"] == pytest.approx(slopes, rel=1e-3)


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
    expected = tune_scores(mixed, mixing="keep", calibration="platt", generator=torch.Generator())
    assert expected.calibration is not None
    assert found["calibration"]["fitted"]["slope"] == pytest.approx(expected.calibration.slope)
    write_scores(replace(read_scores("old.parquet"), patch_logits=None, weights=None), "few.parquet")
    assert fail(capsys, "model", "--scores", "few.parquet").startswith("few.parquet: its temperature is not the model")


def test_scores_of_other_weights_or_of_training_images_are_refused(here_with_run: Path, capsys: Errors) -> None:
    save_checkpoint(PatchClassifier("test_vit", LABELS, image_size=SIZE).eval(), "other")
    save_scores(capsys, "other", "val.csv", "val.parquet")
    assert fail(capsys, "run", "--scores", "val.parquet") == (
        "val.parquet: another model than run wrote it, or it was trained on since; "
        "write it by pivotpatch evaluate run DATA --save FILE --keep-patches"
    )
    save_scores(capsys, "run", "train.csv", "train.parquet")
    assert fail(capsys, "run", "--scores", "train.parquet").startswith(f"train.parquet: 36 of its 60 {TRAINED}; give")
    held = open_training_records(load_config(Path("run/config.toml"))).val
    assert held is not None
    scores, names = read_scores("train.parquet"), {record.name for record in held}
    rows = torch.tensor([row for row, name in enumerate(scores.pictures) if name in names])
    write_scores(scores.select(rows), "held.parquet")
    assert tune(capsys, "run", "--scores", "held.parquet", *KEEP, "--out", "held")["pictures"] == 24


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("s.csv val.csv", "s.csv: holds scores, no model; write RUN --scores s.csv"),
        ("run val.csv x.csv", "'x.csv': a third word; give a model or scores, then the images"),
        ("run --thresholds f2", "goal: unknown goal 'f2'; did you mean 'f1'?"),
        ("run --out run", "run: exists already; choose another folder"),
        ("run/best", "run/best: a checkpoint knows no images; name validation images after it, such as val.csv"),
        ("whole", "whole: the run held out no images; name validation images after it, such as val.csv"),
        (
            "run red.csv",
            "table:red.csv: it lacks 2 of the 3 labels, each of which is fitted (dark, striped); label them too, or "
            "train it for yours first: pivotpatch train table:red.csv model.start_from=run/best",
        ),
        (
            "tagger red.csv --out x",
            "table:red.csv: it lacks 80 of the 80 labels, each of which is fitted (person, bicycle, car and 77 more); "
            "label them too, or train it for yours first: pivotpatch train tagger table:red.csv",
        ),
        ("run few.csv", "folds: there are 2 images; give 5 or more; hundreds are usual"),
        ("run --scores s.csv", "s.csv: its 1 labels are not the 3 of the model, in its order; write it by"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    words: str, message: str, here_with_run: Path, capsys: Errors
) -> None:
    make_run("whole", PatchClassifier, "data.val_fraction=0")
    Path("few.csv").write_text("image,dark,red,striped\nval0.png,0,1,0\nval1.png,1,0,0\n")
    Path("red.csv").write_text("image,labels\nval0.png,red\nval1.png,\n")
    Path("s.csv").write_text("picture,cat,target:cat\na,1,1\nb,2,0\n")
    before = Path("run/best/model.json").read_bytes()
    assert fail(capsys, *words.split()).startswith(message)
    assert Path("run/best/model.json").read_bytes() == before


def test_a_lam_per_label_is_no_choice(capsys: Errors) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["tune", "run", "--mixing", "per-label"])
