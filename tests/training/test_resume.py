"""A run that stops, however that happens, ends bit for bit like one that never stopped."""

import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from run_process import (
    IMAGES,
    SHORT,
    SMALL,
    TrainingProcess,
    crash,
    make_config,
    read_run,
    read_step,
    when,
    write_images,
)
from torch import nn

from pivotpatch.errors import InputError
from pivotpatch.models import load_checkpoint
from pivotpatch.training import fit, resume
from pivotpatch.training.build import build_run
from pivotpatch.training.config import RunConfig
from pivotpatch.training.folder import RunFolder, open_run_records
from pivotpatch.training.images import open_training_records
from pivotpatch.training.processes import make_accelerator
from pivotpatch.training.step import restore_training


def crash_at(step: int, config: RunConfig, out: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(config, out, progress=when("train", step, crash))


def test_a_crashed_run_goes_on_to_the_same_end(crashed: Path, reference: dict[str, object]) -> None:
    assert read_step(crashed) == 8
    assert not resume(crashed).stopped_by
    assert read_run(crashed) == reference


@pytest.mark.slow
def test_patches_in_parts_with_a_closer_look_go_on_to_the_same_end(tmp_path: Path) -> None:
    """From the first step on, where nothing was saved yet, and later."""
    config = make_config("train.epochs=1", "train.accumulate=2", "task.closer_size=48", "augment.flip=0.5")
    fit(config, tmp_path / "whole")
    crash_at(2, config, tmp_path / "run")
    assert not (tmp_path / "run" / "last").exists()
    with pytest.raises(ZeroDivisionError):
        resume(tmp_path / "run", progress=when("train", 6, crash))
    resume(tmp_path / "run")
    assert read_run(tmp_path / "run") == read_run(tmp_path / "whole")


def test_moments_return_in_the_memory_order_of_their_weights(crashed: Path) -> None:
    """Fused optimisers, those of GPUs, refuse any other."""
    folder = RunFolder.open(crashed)
    run = build_run(SHORT, make_accelerator(SHORT), saved=folder.last)
    restore_training(run, folder.load_tensors(torch.device("cpu")))
    moments = ("exp_avg", "exp_avg_sq")
    held = [(weight, state[name]) for weight, state in run.optimiser.state.items() for name in moments]
    assert any(not weight.is_contiguous() for weight, _ in held)
    assert all(moment.stride() == weight.stride() for weight, moment in held)


def test_what_a_crash_left_half_done_is_cleared_away(crashed: Path, reference: dict[str, object]) -> None:
    """A save that stopped between its renames is taken back; one that stopped before them or after is forgotten."""
    (crashed / "last").rename(crashed / "last.old")
    shutil.copytree(crashed / "best", crashed / "best.old")
    (crashed / "best.old" / "model.json").write_text("older")
    (crashed / ".last.1f").mkdir()
    (crashed / "log.jsonl.tmp").touch()
    heard: list[tuple[str, int]] = []
    resume(crashed, progress=lambda what, done, _total: heard.append((what, done)))
    assert next(done for what, done in heard if what == "train") == 9
    assert read_run(crashed) == reference


def limit_files(size: int) -> None:
    """Let no file grow beyond some bytes, as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
@pytest.mark.parametrize(
    ("moment", "room", "file", "saved"),
    [
        (("decode", 0), lambda _: 10, "", None),  # not even the configuration can be written
        (("validate", 1), lambda _: 100_000, "best", 7),
        (("train", 12), lambda _: 2_000_000, "last", 8),  # the checkpoint fits, what training needs besides does not
        (("train", 9), lambda out: (out / "log.jsonl").stat().st_size + 20, "log.jsonl", 8),  # within a line
    ],
)
def test_a_full_disk_ends_a_run_and_leaves_its_last_good_state(
    moment: tuple[str, int],
    room: Callable[[Path], int],
    file: str,
    saved: int | None,
    tmp_path: Path,
    reference: dict[str, object],
) -> None:
    out, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    try:
        with pytest.raises(InputError) as caught:
            fit(SHORT, out, progress=when(*moment, lambda: limit_files(room(out))))
    finally:
        limit_files(before)
    told = str(caught.value)
    assert told.startswith(f"{out / file}: File too large; free some space or choose another folder")
    if saved is None:
        fit(SHORT, out)  # the place is still free
    else:
        assert told.endswith(f"; {out / 'last'} holds step {saved}, --resume {out} goes on there")
        whole = {"config.toml", "environment.json", "log.jsonl", "last", "best", ".lock"}
        assert {path.name for path in out.iterdir()} <= whole  # nothing half-written
        assert read_step(out) == saved
        load_checkpoint(out / "last")
        resume(out)
    assert read_run(out) == reference


@pytest.mark.parametrize("hold", ["memory", "nothing"])
def test_images_that_cannot_be_read_are_listed_at_the_end(hold: str, tmp_path: Path) -> None:
    """Those of validation too; a crash does not make it forget those that it met before."""
    broken = [3, 11, 12, 30, 31, 32]
    train = write_images(tmp_path / "images", broken=broken)
    changes = (f"data.hold={hold}", "data.workers=0", "data.on_error=skip", "output.save_every=1")
    config = make_config(f"data.train={train}", "train.epochs=1", *changes)
    metrics = fit(config, tmp_path / "whole").metrics
    assert list(metrics["not_read"]) == [f"{number:04d}.png" for number in broken]
    crash_at(3, config, tmp_path / "run")
    resume(tmp_path / "run")
    assert read_run(tmp_path / "run") == read_run(tmp_path / "whole")


def test_an_image_that_cannot_be_read_ends_a_run_that_can_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    config = make_config(f"data.train={write_images(folder)}", "data.hold=nothing", "data.workers=0")
    fit(config, tmp_path / "whole")
    with pytest.raises(InputError, match=r"png: is in none of .*/last holds step 4, --resume .*run goes on there$"):
        fit(config, tmp_path / "run", progress=when("train", 5, lambda: write_images(folder, broken=range(40))))
    write_images(folder)
    resume(tmp_path / "run")
    assert read_run(tmp_path / "run") == read_run(tmp_path / "whole")


@pytest.mark.parametrize("part", ["train", "test"])
def test_images_of_which_none_can_be_read_are_an_error(part: str, tmp_path: Path) -> None:
    """What was trained until then is kept."""
    data = {"train": write_images(tmp_path / "images"), part: write_images(tmp_path / "broken", broken=range(40))}
    given = [f"data.{name}={address}" for name, address in data.items()]
    with pytest.raises(InputError, match="broken/all.csv: none of the images could be read"):
        fit(make_config(*given, "data.on_error=skip", "train.epochs=1"), tmp_path / "run")
    assert part == "train" or read_step(tmp_path / "run") > 0


@pytest.mark.slow
def test_a_run_killed_at_each_change_of_its_folder_ends_the_same(reference: dict[str, object], tmp_path: Path) -> None:
    """Each start is killed one change later than the one before, so that no place in a save is left out."""
    out, touch, in_between, saved = tmp_path / "run", 8, 0, 0
    status = TrainingProcess(out, SHORT, dies_at_touch=touch).wait()  # the ninth begins the first save
    while status != 0:
        assert status == -signal.SIGKILL
        in_between += (out / "last.old").exists() and not (out / "last").exists()
        whole = [name for name in ("last", "last.old") if (out / name / "state.json").exists()]
        before, saved, touch = saved, read_step(out, whole[0]) if whole else 0, touch + 1
        assert saved >= before  # nothing that was saved is lost
        status = TrainingProcess(out, dies_at_touch=touch).wait()
    assert touch - 8 > 20
    assert in_between > 0  # killed between the two renames of a save
    assert read_run(out) == reference


@pytest.mark.slow
def test_a_killed_run_whose_workers_were_ahead_ends_the_same(tmp_path: Path, reference: dict[str, object]) -> None:
    out = tmp_path / "run"
    process = TrainingProcess(out, make_config("task.kind=image", "data.hold=nothing", "data.workers=1"))
    while (heard := process.hear()) and heard != ("train", 12):
        pass
    process.kill()
    assert read_step(out) == 8
    assert TrainingProcess(out).wait() == 0
    assert read_run(out) == reference


TESTED = make_config("task.kind=image", f"data.test={IMAGES}")


@pytest.fixture(scope="module")
def tested_reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("reference") / "run"
    fit(TESTED, folder)
    return read_run(folder)


@pytest.mark.parametrize(
    ("number", "what", "done", "saved", "logged"),
    [
        (signal.SIGINT, "train", 6, 6, [5]),  # finishes the step
        (signal.SIGINT, "validate", 2, 7, [5, 7]),  # the evaluation is given up, and done again
        pytest.param(signal.SIGTERM, "test", 3, 14, [5, 7, 7, 10, 14, 14], marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(
    number: signal.Signals,
    what: str,
    done: int,
    saved: int,
    logged: list[int],
    tmp_path: Path,
    tested_reference: dict[str, object],
) -> None:
    out, before = tmp_path / "run", signal.getsignal(number)
    result = fit(TESTED, out, progress=when(what, done, lambda: signal.raise_signal(number)))
    assert result.stopped_by is number
    assert signal.getsignal(number) == before
    assert result.metrics == json.loads((out / "metrics.json").read_text())
    assert not result.metrics["finished"]
    assert "test" not in result.metrics
    assert read_step(out) == saved
    assert [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()] == logged
    assert resume(out).stopped_by is None
    assert read_run(out) == tested_reference


def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path: Path) -> None:
    def press_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the terminal's and the launcher's
        time.sleep(1.1)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(SHORT, tmp_path / "run", progress=when("train", 6, press_twice))
    assert read_step(tmp_path / "run") == 4


@pytest.mark.slow
def test_a_run_is_stopped_while_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_forever(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it still compiles")

    config, out = make_config("train.epochs=1", "precision.compile=true"), tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=compile_forever))
        result = fit(config, out)
    assert (result.stopped_by, result.metrics["steps"]) == (signal.SIGTERM, 0)
    torch.compiler.reset()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    assert resume(out).stopped_by is None
    assert read_step(out) == 7


@pytest.mark.slow
def test_a_real_process_stops_and_says_how_to_go_on(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole group, the processes that decode as well."""
    out, number = tmp_path / "a run", signal.SIGINT
    words = [*SMALL, "data.hold=nothing", "data.workers=1", "train.epochs=6"]
    command = [sys.executable, "-m", "pivotpatch", "train", *words, "--out", str(out)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while process.poll() is None and not (out / "last").exists():
        time.sleep(0.01)
    os.killpg(process.pid, number)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 128 + number, stderr
    goes_on = f"pivotpatch train --resume {shlex.quote(str(out))} goes on"
    assert stderr.splitlines()[-1] == f"stopped by {number.name}; {goes_on}"
    assert "Traceback" not in stderr
    assert f"{read_step(out)} steps in " in stdout
    (out / "curves.png").unlink()  # which the verb draws, and the processes below do not
    assert TrainingProcess(out).wait() == 0
    assert TrainingProcess(tmp_path / "whole", make_config("train.epochs=6")).wait() == 0
    assert read_run(out) == read_run(tmp_path / "whole")


def test_a_run_whose_table_has_changed_holds_out_other_images(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    config, out = make_config(f"data.train={images}", "task.kind=image"), tmp_path / "run"
    crash_at(8, config, out)
    began = open_run_records(out, config)
    table = tmp_path / "images" / "all.csv"
    text = table.read_text()
    swapped = text.replace("0003.png,blue", "0003.png,red").replace("0004.png,red", "0004.png,blue")
    table.write_text(swapped)  # as many images and labels
    assert {*open_training_records(config).val.names} != {*began.val.names}  # type: ignore[union-attr]
    with pytest.raises(
        InputError, match=r"it has changed, so that others would choose the model than those that the run began"
    ):
        resume(out)
    with pytest.raises(InputError, match=r"has changed since .*run began, .*; give back what it was"):
        open_run_records(out, config)
    assert len(open_run_records(out, config, strict=False).train) == 40  # the run may have been trained on each
    table.write_text(text)
    assert open_run_records(out, config).val.names == began.val.names  # type: ignore[union-attr]
    resume(out)
