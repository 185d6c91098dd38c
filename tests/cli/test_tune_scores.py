"""`pivotpatch tune --scores`: a file of scores does instead of pictures; one that is not of this network is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tune_command import LABELS, SIZE, Errors, assert_stored, fail, make_run, score, tune

from pivotpatch.cli.main import main
from pivotpatch.data.address import open_records
from pivotpatch.data.scenes import SCENE_LABELS
from pivotpatch.inference.score_file import read_scores, write_scores
from pivotpatch.models.checkpoint import load_checkpoint, save_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.build import open_training_records
from pivotpatch.training.config import load_config
from pivotpatch.tuning.tune import tune_scores


def test_scores_need_no_forward_pass_and_no_pictures(here_with_run: Path, capsys: Errors) -> None:
    live = tune(capsys, "run", "val.csv", "--out", "live", "--mixing", "per-label")
    words = ["evaluate", "run", "val.csv", "--save", "val.parquet", "--keep-patches", "--workers", "0"]
    assert main([*words, "--resamples", "0"]) == 0
    capsys.readouterr()
    with_truth = tune(capsys, "run", "val.csv", "--scores", "val.parquet", "--out", "with", "--mixing", "per-label")
    for path in here_with_run.glob("*.png"):
        path.unlink()
    found = tune(capsys, "run", "--scores", "val.parquet", "--out", "found", "--mixing", "per-label")
    assert_stored(found, "found")
    for other in (live, with_truth):
        assert found["lam"] == other["lam"]
        assert found["calibration"]["fitted"]["slope"] == pytest.approx(
            other["calibration"]["fitted"]["slope"], rel=1e-3
        )


def test_scores_are_mixed_as_the_network_is_now(here_with_run: Path, capsys: Errors) -> None:
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
def test_scores_of_other_weights_are_refused(here_with_run: Path, capsys: Errors, suffix: str) -> None:
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
    here_with_run: Path, capsys: Errors, grid: int, overlap: float, suffix: str
) -> None:
    model = PatchClassifier("test_vit", LABELS, image_size=SIZE, grid=grid, overlap=overlap).eval()
    write_scores(score(model, open_records("table:val.csv").keep_labels(LABELS)), f"theirs.{suffix}")
    assert fail(capsys, "run", "--scores", f"theirs.{suffix}", "--out", "tuned") == (
        f"theirs.{suffix}: it is of {grid**2} patches that overlap by {overlap:g}, the network cuts 4 by 0; "
        "write it by pivotpatch evaluate run DATA --save FILE --keep-patches"
    )
    save_checkpoint(model, "own")
    assert tune(capsys, "own", "--scores", f"theirs.{suffix}", "--out", "tuned")["pictures"] == 30


def test_scores_of_training_pictures_are_refused(here_with_run: Path, capsys: Errors) -> None:
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
def test_scores_of_scenes_in_other_company_are_told_apart(here_with_run: Path, capsys: Errors, suffix: str) -> None:
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
