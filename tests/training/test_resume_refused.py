"""Runs that cannot go on, and what is said of them."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from run_process import TrainingProcess

from pivotpatch.errors import InputError
from pivotpatch.training.folder import RunFolder
from pivotpatch.training.loop import resume


def test_what_is_no_run_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{tmp_path}: is no run, config.toml is missing; check the path"):
        resume(tmp_path)


def test_a_finished_run_is_not_resumed(crashed: Path) -> None:
    resume(crashed)
    with pytest.raises(InputError, match="run: the run has come to its end; start another; model.start_from=.*best"):
        resume(crashed)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("last/state.json", cut_in_half, r"cannot be read \(.*EOF.*\); it is damaged, start anew"),
        ("last/state.json", Path.unlink, r"cannot be read \(No such file or directory\); it is damaged"),
        (
            "last/state.json",
            lambda path: path.write_text('{"step": "8"}'),
            r"\(step: Input should be a valid integer\)",
        ),
        ("last/state.json", lambda path: path.write_text('{"stop": 8}'), r"\(stop: Extra inputs are not permitted\)"),
        ("last/state.json", lambda path: path.write_bytes(b"\xff"), r"cannot be read \('utf-8' codec"),
        ("last/training.safetensors", cut_in_half, r"cannot be read \(.*\); it is damaged, start anew"),
        ("last/training.safetensors", Path.unlink, r"cannot be read \(No such file.*\); it is damaged, start anew"),
        ("last/model.safetensors", cut_in_half, r"cannot be read \(.*\); it is damaged or cut short"),
        ("metrics.json", lambda path: path.write_text("[]"), "is not what a run writes; remove it"),
        ("config.toml", cut_in_half, "config.toml"),
    ],
)
def test_a_damaged_file_is_named(name: str, damage: Callable[[Path], object], message: str, crashed: Path) -> None:
    damage(crashed / name)
    with pytest.raises(InputError, match=message) as caught:
        resume(crashed)
    assert str(crashed / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count=61", "count=71", "there are 57 pictures to train on, the run began with 49"),
        ("hold", 'labels = ["one", "two"]\nhold', "its labels are not those that the run began with"),
    ],
)
def test_other_pictures_are_refused(old: str, new: str, message: str, crashed: Path) -> None:
    state = json.loads((crashed / "last/state.json").read_text())
    del state["config"]  # a run of an earlier version, or the pictures behind an address are others now
    (crashed / "last/state.json").write_text(json.dumps(state))
    change(crashed / "config.toml", old, new)
    with pytest.raises(InputError, match=f"{message}; give back what it was, or start anew"):
        resume(crashed)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("epochs = 2", "epochs = 3", "train.epochs is 3, the run began with 2"),
        ('kind = "image"', 'kind = "patch"', "task.kind is 'patch', the run began with 'image'"),
    ],
)
def test_another_configuration_is_refused(old: str, new: str, message: str, crashed: Path) -> None:
    change(crashed / "config.toml", old, new)
    with pytest.raises(InputError, match=f"config.toml: {message}; give back what it was, or start another with"):
        resume(crashed)


def test_what_makes_no_other_run_may_be_changed(crashed: Path) -> None:
    change(crashed / "config.toml", "save_every = 4", "save_every = 3")
    assert resume(crashed).metrics["finished"]


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("best", r"best: is not there, though step \d+ was kept in it; put it back, or start another with model.start"),
        ("last", "last: is not there, so the run cannot go on; put it back, or start anew"),
    ],
)
def test_a_folder_that_is_gone_is_missed(gone: str, message: str, crashed: Path) -> None:
    assert (crashed / "best").is_dir()
    shutil.rmtree(crashed / gone)
    with pytest.raises(InputError, match=message):
        resume(crashed)


def test_a_damaged_log_is_told_before_the_work(crashed: Path) -> None:
    lines = (crashed / "log.jsonl").read_text().splitlines(keepends=True)
    (crashed / "log.jsonl").write_text("".join(["garbage\n", *lines[1:]]))
    with pytest.raises(
        InputError, match=r"log.jsonl: line 1 is not what a run writes; mend that line, or remove the file"
    ):
        resume(crashed)


def test_two_processes_do_not_train_in_one_folder(crashed: Path) -> None:
    process = TrainingProcess(crashed)
    while (heard := process.hear()) and heard[0] != "train":
        pass
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(InputError, match="run: another process is training in it; wait for it, or end it first"):
        resume(crashed)
    process.kill()
    RunFolder.open(crashed)
