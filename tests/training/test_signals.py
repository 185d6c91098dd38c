import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
from run_process import PICTURES, SMALL, TrainingProcess, make_config, read_run, read_step

from pivotpatch.cli.main import main
from pivotpatch.training.config import RunConfig
from pivotpatch.training.loop import fit, resume
from pivotpatch.training.signals import StopSignals

pytestmark = pytest.mark.slow

SHORT = make_config("train.epochs=2", "task.kind=image", "model.image_size=64", f"data.test={PICTURES}")


def at(what: str, done: int, do: Callable[[], object]) -> Callable[[str, int, int | None], None]:
    """Do something when a run is so far."""

    def progress(stage: str, number: int, _total: int | None) -> None:
        if (stage, number) == (what, done):
            do()

    return progress


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A run that never stopped."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    fit(SHORT, folder)
    return read_run(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("what", "done", "saved", "logged"),
    [
        ("train", 6, 6, [5]),  # finishes the step
        ("train", 7, 7, [5, 7]),  # the last of an epoch: not evaluated any more
        ("validate", 2, 7, [5, 7]),  # the evaluation is given up, and done again
        (f"test {PICTURES}", 3, 14, [5, 7, 7, 10, 14, 14]),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(
    number: signal.Signals,
    what: str,
    done: int,
    saved: int,
    logged: list[int],
    tmp_path: Path,
    reference: dict[str, object],
) -> None:
    out = tmp_path / "run"
    result = fit(SHORT, out, progress=at(what, done, lambda: signal.raise_signal(number)))
    assert result.stopped_by is number
    assert result.metrics == json.loads((out / "metrics.json").read_text())
    assert not result.metrics["finished"]
    assert "test" not in result.metrics
    assert read_step(out) == saved
    assert [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()] == logged
    assert resume(out).stopped_by is None
    assert read_run(out) == reference


def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path: Path, reference: dict[str, object]) -> None:
    def press_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the terminal's and the launcher's
        time.sleep(1.1)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(SHORT, tmp_path / "run", progress=at("train", 6, press_twice))
    assert read_step(tmp_path / "run") == 4
    resume(tmp_path / "run")
    assert read_run(tmp_path / "run") == reference


def test_ctrl_c_before_the_first_step_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    press = at("decode pictures", 20, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        fit(SHORT, tmp_path / "run", progress=press)
    assert not (tmp_path / "run").exists()


class Pressing(StringIO):
    """A screen on which a signal follows a line with some words."""

    def __init__(self, words: str, number: signal.Signals) -> None:
        super().__init__()
        self.words, self.number = words, number

    def write(self, text: str) -> int:
        done = super().write(text)
        if text.endswith("\n") and self.words in self.getvalue().splitlines()[-1]:
            signal.raise_signal(self.number)
        return done


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("options", "words", "told"),
    [
        (["--out", "new"], "decode pictures: ", "began"),
        (["--dry-run"], "no picture to train on has", "began"),
        (["--resume", "run"], "decode pictures: ", "went on"),
    ],
)
def test_a_command_that_is_stopped_before_the_first_step_says_that_nothing_is_lost(
    options: list[str], words: str, told: str, number: signal.Signals, crashed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(crashed.parent)
    before = {asking: signal.getsignal(asking) for asking in (signal.SIGINT, signal.SIGTERM)}
    files = {path: path.stat().st_mtime_ns for path in crashed.parent.rglob("*")}
    screen = Pressing(words, number)
    changes = [] if "--resume" in options else [*SMALL, "data.train=scenes:@train?count=5&size=32"]
    with redirect_stderr(screen):
        assert main(["train", *changes, *options]) == 128 + number
    last = f"stopped by {number.name} before training {told}; nothing is lost"
    assert screen.getvalue().splitlines()[-1] == last
    assert {path: path.stat().st_mtime_ns for path in crashed.parent.rglob("*")} == files
    assert {asking: signal.getsignal(asking) for asking in before} == before


def test_a_real_process_that_is_stopped_before_the_first_step_says_so(tmp_path: Path) -> None:
    words = [*SMALL, "data.train=scenes:@train?count=20000&size=64"]  # drawing them takes long enough
    command = [sys.executable, "-m", "pivotpatch", "train", *words, "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith("decode pictures: "):
        assert line, "it ended before"
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (128 + signal.SIGTERM, "")
    assert stderr == "stopped by SIGTERM before training began; nothing is lost\n"
    assert list(tmp_path.iterdir()) == []


def test_the_handlers_of_the_caller_return() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with StopSignals() as stop:
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # the first one counts
        assert stop.received is signal.SIGTERM
    assert {number: signal.getsignal(number) for number in before} == before


def test_the_handlers_return_after_an_error(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(ZeroDivisionError):
        fit(SHORT, tmp_path / "run", progress=at("train", 1, lambda: 1 // 0))
    assert {number: signal.getsignal(number) for number in before} == before


def test_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def watch() -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    def train(config: RunConfig) -> None:
        seen.append(fit(config, tmp_path / "run", progress=at("train", 1, watch)).stopped_by)

    thread = threading.Thread(target=train, args=(make_config("train.epochs=1", "data.val_fraction=0"),))
    thread.start()
    thread.join()
    assert seen == [before, None]


@pytest.fixture(scope="module")
def long_reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("long") / "run"
    assert TrainingProcess(folder, make_config("train.epochs=6")).wait() == 0
    return read_run(folder)


@pytest.mark.parametrize(
    ("number", "changes"),
    [(signal.SIGINT, ["data.hold=nothing", "data.workers=1"]), (signal.SIGTERM, [])],
)
def test_a_real_process_stops_and_says_how_to_go_on(
    number: signal.Signals, changes: list[str], tmp_path: Path, long_reference: dict[str, object]
) -> None:
    """Ctrl-C reaches the whole group, the processes that decode as well; SIGTERM the process alone."""
    out = tmp_path / "a run"
    words = [*SMALL, *changes, "train.epochs=6"]
    command = [sys.executable, "-m", "pivotpatch", "train", *words, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    while process.poll() is None and not (out / "last").exists():
        time.sleep(0.01)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 128 + number, stderr
    goes_on = f"pivotpatch train --resume {shlex.quote(str(out))} goes on"
    assert stderr.splitlines()[-1] == f"stopped by {number.name}; {goes_on}"
    assert "Traceback" not in stderr
    assert f"{read_step(out)} steps in " in stdout
    (out / "curves.png").unlink()  # which the verb draws, and the process below does not
    assert TrainingProcess(out).wait() == 0
    assert read_run(out) == long_reference
