"""`pivotpatch tune` as a user calls it: a run in, the same run with lam, calibration and thresholds out."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from together import run_together, run_verb

from pivotpatch.audit.tuning import METHODS, Mixing, tune_scores
from pivotpatch.cli.main import build_parser, main
from pivotpatch.data.address import open_records
from pivotpatch.data.loading import make_loader
from pivotpatch.data.records import RecordSet
from pivotpatch.data.scenes import SCENE_LABELS
from pivotpatch.inference.score_file import read_scores, write_scores
from pivotpatch.inference.scores import Scores
from pivotpatch.inference.scoring import score_pictures
from pivotpatch.models.checkpoint import load_checkpoint, save_checkpoint
from pivotpatch.models.classifier import Classifier, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.build import open_training_records
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import RunFolder

SIZE = 32
LABELS = ("dark", "red", "striped")
Errors = pytest.CaptureFixture[str]


def write_pictures(name: str, count: int, *, seed: int) -> None:
    """A table of pictures whose labels can be seen in them."""
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
    """The folder of a run as training leaves it; its network was never trained."""
    torch.manual_seed(0)
    model = kind("test_vit", labels, image_size=SIZE).eval()
    words = ["data.train=table:train.csv", "data.val_fraction=0.4", "data.workers=0", *changes]
    folder = RunFolder(Path(name), load_config(None, words))
    folder.create()
    folder.save_best(model)
    folder.close()
    return model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that held out 24 of its 60 pictures, and 30 other ones."""
    monkeypatch.chdir(tmp_path)
    write_pictures("train", 60, seed=0)
    write_pictures("val", 30, seed=1)
    make_run("run")
    return tmp_path


def score(model: Classifier, records: RecordSet) -> Scores:
    loader = make_loader(records, size=(SIZE, SIZE), batch_size=50, every_batch=True)
    return score_pictures(model, loader, accelerator=Accelerator(cpu=True), keep_patches=True)


def tune(capsys: Errors, *words: str) -> dict[str, Any]:
    assert main(["tune", *words, "--json"]) == 0, capsys.readouterr().err
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def fail(capsys: Errors, *words: str) -> str:
    """The one line that a mistake is told in."""
    assert main(["tune", *words]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1].removeprefix("pivotpatch: ")


def assert_stored(found: dict[str, Any], folder: str) -> None:
    """A checkpoint holds what was told."""
    model = load_checkpoint(folder)
    calibration = None if model.calibration is None else json.loads(json.dumps(model.calibration.to_dict()))
    assert calibration == found["calibration"]["fitted"]
    assert model.thresholds == tuple(row["threshold"] for row in found["thresholds"]["rows"])
    assert (None if model.adaptive is None else json.loads(json.dumps(model.adaptive.to_dict()))) == found["adaptive"]
    if isinstance(model, PatchClassifier):
        for name in ("lam", "temperature"):
            assert torch.as_tensor(getattr(model, name)).tolist() == pytest.approx(found[name])


def test_a_run_is_tuned_on_what_it_held_out_and_keeps_the_result(here: Path, capsys: Errors) -> None:
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


def test_a_new_checkpoint_leaves_the_old_one_alone(here: Path, capsys: Errors) -> None:
    old = Path("run/best/model.json").read_text()
    found = tune(capsys, "run", "val.csv", "--out", "new/tuned")
    assert (found["pictures"], found["wrote"]) == (30, "new/tuned")
    assert_stored(found, "new/tuned")
    assert Path("run/best/model.json").read_text() == old


def test_scores_need_no_forward_pass_and_no_pictures(here: Path, capsys: Errors) -> None:
    live = tune(capsys, "run", "val.csv", "--out", "live", "--mixing", "per-label")
    words = ["evaluate", "run", "val.csv", "--save", "val.parquet", "--keep-patches", "--workers", "0"]
    assert main([*words, "--resamples", "0"]) == 0
    capsys.readouterr()
    with_truth = tune(capsys, "run", "val.csv", "--scores", "val.parquet", "--out", "with", "--mixing", "per-label")
    for path in here.glob("*.png"):
        path.unlink()
    found = tune(capsys, "run", "--scores", "val.parquet", "--out", "found", "--mixing", "per-label")
    assert_stored(found, "found")
    for other in (live, with_truth):
        assert found["lam"] == other["lam"]
        assert found["calibration"]["fitted"]["slope"] == pytest.approx(
            other["calibration"]["fitted"]["slope"], rel=1e-3
        )


def test_scores_are_mixed_as_the_network_is_now(here: Path, capsys: Errors) -> None:
    """A file from before the network was given another lam tells as much as a new one."""
    scores = score(load_checkpoint("run/best"), open_training_records(load_config(Path("run/config.toml"))).train)
    pictures = tuple(f"other{place}" for place in range(len(scores)))
    write_scores(replace(scores, pictures=pictures), "old.npz")
    model = load_checkpoint("run/best")
    assert isinstance(model, PatchClassifier)
    model.set_mixing(lam=torch.tensor([0.0, 2.0, 4.0]), temperature=0.5)
    save_checkpoint(model, "model")
    found = tune(capsys, "model", "--scores", "old.npz", "--mixing", "keep", "--calibration", "platt", "--out", "tuned")
    assert (found["lam"], found["temperature"], found["mixing"]) == ([0.0, 2.0, 4.0], 0.5, None)
    mixed = scores.remix(lam=torch.tensor([0.0, 2.0, 4.0]), temperature=0.5)
    expected = tune_scores(mixed, mixing="keep", calibration="platt", generator=torch.Generator())
    assert expected.calibration is not None
    assert found["calibration"]["fitted"]["slope"] == pytest.approx(expected.calibration.slope)
    write_scores(replace(read_scores("old.npz"), patch_logits=None, weights=None), "few.npz")
    message = "few.npz: its temperature is not the network's; write it again with --keep-patches"
    assert fail(capsys, "model", "--scores", "few.npz") == message


@pytest.mark.parametrize("suffix", ["parquet", "npz"])
def test_scores_of_other_weights_are_refused(here: Path, capsys: Errors, suffix: str) -> None:
    file = f"val.{suffix}"
    words = ["evaluate", "run", "val.csv", "--save", file, "--keep-patches", "--workers", "0", "--resamples", "0"]
    assert main(words) == 0
    capsys.readouterr()
    for _ in range(2):  # what is fitted and stored leaves the weights alone
        tune(capsys, "run", "--scores", file, "--mixing", "per-label")
    save_checkpoint(PatchClassifier("test_vit", LABELS, image_size=SIZE).eval(), "other")
    assert fail(capsys, "other", "--scores", file) == (
        f"{file}: another network than other wrote it, or it was trained on since; "
        "write it by pivotpatch evaluate other DATA --save FILE"
    )
    assert main(["evaluate", file, "--save", "copy.npz", "--resamples", "0"]) == 0
    capsys.readouterr()
    assert fail(capsys, "other", "--scores", "copy.npz").startswith("copy.npz: another network")


@pytest.mark.parametrize("suffix", ["parquet", "npz"])
@pytest.mark.parametrize(("grid", "overlap"), [(3, 0.0), (2, 0.3)])
def test_scores_of_a_network_that_cuts_other_patches_are_refused(
    here: Path, capsys: Errors, grid: int, overlap: float, suffix: str
) -> None:
    model = PatchClassifier("test_vit", LABELS, image_size=SIZE, grid=grid, overlap=overlap).eval()
    write_scores(score(model, open_records("table:val.csv").keep_labels(LABELS)), f"theirs.{suffix}")
    assert fail(capsys, "run", "--scores", f"theirs.{suffix}", "--out", "tuned") == (
        f"theirs.{suffix}: it is of {grid**2} patches that overlap by {overlap:g}, the network cuts 4 by 0; "
        "write it by pivotpatch evaluate run DATA --save FILE --keep-patches"
    )
    save_checkpoint(model, "own")
    assert tune(capsys, "own", "--scores", f"theirs.{suffix}", "--out", "tuned")["pictures"] == 30


def test_a_baseline_gets_calibration_and_thresholds_alone(here: Path, capsys: Errors) -> None:
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


def test_what_was_stored_decides_in_evaluate(here: Path, capsys: Errors) -> None:
    found = tune(capsys, "run", "val.csv")
    words = ["evaluate", "run", "val.csv", "--policy", "fitted", "--json", "--workers", "0", "--resamples", "0"]
    assert main(words) == 0
    decided = json.loads(capsys.readouterr().out)["kinds"]["tde"]["decided"]
    assert decided["recall"] == pytest.approx([row["recall"] for row in found["thresholds"]["rows"]])


def test_training_pictures_are_refused(here: Path, capsys: Errors) -> None:
    held = "give the run alone, which takes the pictures that it held out"
    message = f"table:train.csv: 36 of its 60 pictures are among those that the run was trained on; {held}"
    assert fail(capsys, "run", "train.csv") == message
    # The same files by another way, beside others.
    rows = [row.replace("train", "../train", 1) for row in Path("train.csv").read_text().splitlines()[1:]]
    Path("sub").mkdir()
    Path("sub/mixed.csv").write_text("\n".join(["image,labels", *rows, "x.png,red"]))
    mixed = f"table:{here}/sub/mixed.csv?allow_escape=true"
    assert fail(capsys, "run", mixed).startswith(f"{mixed}: 36 of its 61 pictures are among")
    make_run("whole", PatchClassifier, "data.val_fraction=0")
    found = fail(capsys, "whole", "train.csv")
    assert found.endswith("60 of its 60 pictures are among those that the run was trained on; name others")


def test_drawn_training_pictures_are_refused(here: Path, capsys: Errors) -> None:
    train = "scenes:@train?count=20&size=32"
    make_run("drawn", PatchClassifier, f"data.train={train}", labels=SCENE_LABELS.names)
    assert fail(capsys, "drawn", train).startswith(f"{train}: 12 of its 20 pictures are among")
    for options, count in (("count=40&size=32", 40), ("count=20&size=48&company=0.8&seed=0", 20)):
        again = f"scenes:@train?{options}"  # the same scenes, written otherwise
        assert fail(capsys, "drawn", again).startswith(f"{again}: 12 of its {count} pictures are among")
    assert tune(capsys, "drawn", "scenes:@val?count=20&size=32", "--out", "tuned")["pictures"] == 20
    assert tune(capsys, "drawn", "scenes:@train?count=20&size=32&seed=1", "--out", "others")["pictures"] == 20


def test_scores_of_training_pictures_are_refused(here: Path, capsys: Errors) -> None:
    words = ["evaluate", "run", "train.csv", "--save", "train.npz", "--keep-patches", "--workers", "0"]
    assert main([*words, "--resamples", "0"]) == 0
    capsys.readouterr()
    assert fail(capsys, "run", "--scores", "train.npz").startswith(
        "train.npz: 36 of its 60 pictures are among those that the run was trained on; give the run alone"
    )
    scores = read_scores("train.npz")
    held = open_training_records(load_config(Path("run/config.toml"))).val
    assert held is not None
    names = {record.name for record in held}
    rows = torch.tensor([row for row, name in enumerate(scores.pictures) if name in names])
    write_scores(scores.select(rows), "held.npz")
    assert tune(capsys, "run", "--scores", "held.npz", "--out", "held")["pictures"] == 24
    # Where nobody told which pictures they are: others may have the same names; then their labels are others.
    write_scores(replace(scores, data=None), "untold.npz")
    assert "36 of its 60 pictures are among those" in fail(capsys, "run", "--scores", "untold.npz")
    write_scores(replace(scores, data=None, target=scores.target.roll(1, dims=0)), "others.npz")
    assert tune(capsys, "run", "--scores", "others.npz", "--out", "others")["pictures"] == 60


@pytest.mark.parametrize("suffix", ["parquet", "npz"])
def test_scores_of_scenes_in_other_company_are_told_apart(here: Path, capsys: Errors, suffix: str) -> None:
    """Their names say nothing, and so few labels change that the truth says nothing either."""
    make_run("drawn", PatchClassifier, "data.train=scenes:@train?count=20&size=32", labels=SCENE_LABELS.names)
    model = load_checkpoint("drawn/best")
    for split in ("train", "val"):
        scores = score(model, open_records(f"scenes:@{split}?count=20&size=32&company=0.7"))
        write_scores(scores, f"{split}.{suffix}")
    assert fail(capsys, "drawn", "--scores", f"train.{suffix}").startswith(
        f"train.{suffix}: 12 of its 20 pictures are among those that the run was trained on"
    )
    given = ("drawn", "scenes:@val?count=20&size=32", "--scores", f"val.{suffix}")
    assert fail(capsys, *given) == (
        f"val.{suffix}: it was made of scenes:@val?count=20&size=32&company=0.7, not of scenes:@val?count=20&size=32; "
        "give the scores of these"
    )
    same = "scenes:@val?size=32&company=0.70&count=20"  # written otherwise
    assert tune(capsys, "drawn", same, "--scores", f"val.{suffix}", "--out", "tuned")["pictures"] == 20


def test_a_run_far_from_its_pictures_can_be_tuned_on_others(here: Path, capsys: Errors) -> None:
    Path("train.csv").unlink()
    assert fail(capsys, "run").startswith("train.csv: ")
    assert tune(capsys, "run", "val.csv")["pictures"] == 30


def test_a_state_that_a_run_goes_on_from_is_not_replaced(here: Path, capsys: Errors) -> None:
    folder = RunFolder.open(Path("run"))
    folder.save_last(load_checkpoint("run/best"), {}, folder.load_state())
    folder.close()
    assert fail(capsys, "run/last", "val.csv") == (
        "run/last: holds more than a checkpoint (state.json, training.safetensors), which would be lost; "
        "give --out FOLDER"
    )
    assert_stored(tune(capsys, "run/last", "val.csv", "--out", "tuned"), "tuned")
    assert_stored(tune(capsys, "run/best", "val.csv"), "run/best")


def test_a_run_that_is_being_trained_is_left_alone(here: Path, capsys: Errors) -> None:
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


def test_what_people_see(here: Path, capsys: Errors) -> None:
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


def test_two_processes_tune_as_one(here: Path, capsys: Errors) -> None:
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
def test_a_mistake_is_one_line_and_changes_nothing(words: list[str], message: str, here: Path, capsys: Errors) -> None:
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
