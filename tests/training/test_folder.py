"""The folder of a run: what it holds, what it refuses, and what is said of a damaged one."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from run_process import SHORT, TrainingProcess, crash, make_config, read_run, read_step, when

from pivotpatch.errors import InputError
from pivotpatch.training import fit, resume
from pivotpatch.training.folder import RunFolder


def test_each_epoch_is_saved_though_it_is_not_evaluated(tmp_path: Path) -> None:
    config = make_config("output.save_every=500", "evaluation.every=3", "train.epochs=3")
    with pytest.raises(ZeroDivisionError):
        fit(config, tmp_path / "run", progress=when("train", 15, crash))
    assert read_step(tmp_path / "run") == 14


def test_only_a_free_place_is_taken(crashed: Path, tmp_path: Path) -> None:
    before = read_run(crashed)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    (tmp_path / "file").touch()
    for place, message in (
        (crashed, "run: exists already and is not empty; choose another folder, or --resume it"),
        (tmp_path / "photos", "photos: exists already and is not empty; choose another folder$"),
        (tmp_path / "file/deep/run", "run: .*/file is no folder that can be written to"),
    ):
        with pytest.raises(InputError, match=message):
            fit(SHORT, place, progress=when("decode", 0, crash))  # found out before images are decoded
    assert read_run(crashed) == before


def test_what_is_at_its_end_is_not_resumed(crashed: Path) -> None:
    change(crashed / "config.toml", "save_every = 4", "save_every = 3")  # which makes no other run
    assert resume(crashed).metrics["finished"]
    with pytest.raises(InputError, match="run: the run has come to its end; start another; model.start_from=.*best"):
        resume(crashed)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("last/state.json", cut_in_half, r"cannot be read \(.*EOF.*\); it is damaged, start anew"),
        ("last/state.json", lambda path: path.write_text('{"stop": 8}'), "Extra inputs are not permitted"),
        ("last/training.safetensors", cut_in_half, r"cannot be read \(.*\); it is damaged, start anew"),
        (
            "config.toml",
            lambda path: change(path, "[train]\nepochs = 2", "[train]\nepochs = 3"),
            "train.epochs is 3, the run began with",
        ),
        ("best", shutil.rmtree, r"is not there, though step \d+ was kept in it; put it back, or start another with"),
        ("last", shutil.rmtree, "is not there, so the run cannot go on; put it back, or start anew"),
        ("log.jsonl", lambda path: path.write_text("garbage\n" * 9), "holds lines that no run writes .*; mend them"),
    ],
)
def test_damage_and_changes_are_named(name: str, damage: Callable[[Path], object], message: str, crashed: Path) -> None:
    damage(crashed / name)
    with pytest.raises(InputError, match=message) as caught:
        resume(crashed)
    assert str(crashed / name) in str(caught.value)


def test_other_images_are_refused(crashed: Path) -> None:
    state = json.loads((crashed / "last/state.json").read_text())
    del state["config"]  # a run of an earlier version, or the images behind an address are others now
    (crashed / "last/state.json").write_text(json.dumps(state))
    change(crashed / "config.toml", "count=63", "count=71")
    with pytest.raises(InputError, match=r"there are 5\d images of 10 labels .*, the run began with 5\d images"):
        resume(crashed)
    change(crashed / "config.toml", "count=71", "count=63")
    change(crashed / "config.toml", "hold", 'labels = ["one", "two"]\nhold')
    with pytest.raises(InputError, match=r"of 2 labels \(one, two\), the run began with"):
        resume(crashed)


@pytest.mark.slow
def test_two_processes_do_not_train_in_one_folder(crashed: Path) -> None:
    process = TrainingProcess(crashed)
    while (heard := process.hear()) and heard[0] != "train":
        pass
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(InputError, match="run: another process is training in it; wait for it, or end it first"):
        resume(crashed)
    process.kill()
    RunFolder.open(crashed)
