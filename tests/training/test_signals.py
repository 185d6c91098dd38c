"""Ctrl-C and SIGTERM: a run finishes its step, saves, and goes on later to the same end."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_process import IMAGES, SHORT, SMALL, TrainingProcess, make_config, read_run, read_step, when

from pivotpatch.training import fit, resume

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
def test_a_real_process_stops_and_says_how_to_go_on(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole group, the processes that decode as well."""
    out, number = tmp_path / "a run", signal.SIGINT
    words = [*SMALL, "data.hold=nothing", "data.workers=1", "train.epochs=6"]
    command = [sys.executable, "-m", "pivotpatch", "train", *words, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
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
