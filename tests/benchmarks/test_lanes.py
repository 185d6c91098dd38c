"""Commands in lanes: order, what waits for what, a second attempt, and the deadline."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from lanes import Lanes

pytestmark = pytest.mark.usefixtures("here")

WAITS = {"name": "b", "command": "true", "after": ["a"]}
# Jobs, named by their number unless they say; which succeed, in that order; and what is said of the others.
CASES: dict[str, tuple[list[dict[str, Any]], list[str], str]] = {
    "one waits for another and for a file": (
        [{"command": "test -e late", "after": ["1"], "needs": ["late"]}, {"command": "touch late"}],
        ["1", "0"],
        "none",
    ),
    "one that fails runs again by its other command": (
        [{"command": "false", "again": "true"}, {"command": "false"}, {"command": "true", "after": ["1"]}],
        ["0"],
        "2",
    ),
    "nobody waits for one that is unknown": ([WAITS], [], "b"),
    "nor in a circle": ([WAITS, {"name": "a", "command": "true", "after": ["b"]}], [], "b, a"),
    "nor for one that takes too long": ([WAITS, {"name": "a", "command": "true", "minutes": 99}], [], "b, a"),
    "nor for one that failed": ([WAITS, {"name": "a", "command": "false"}], [], "b"),
    "one that cannot end in time is left out": ([{"command": "true", "minutes": 5}, {"command": "true"}], ["1"], "0"),
    "unless it must run": ([{"command": "true", "minutes": 5, "must": True}, {"command": "true"}], ["0", "1"], "none"),
    "what one took corrects what others are said to take": (
        [{"command": "sleep 0.3", "minutes": 0.0005}, {"command": "true", "minutes": 0.5}],
        ["0"],
        "1",
    ),
    "a file that is being written ends nothing": (
        [{"command": "echo '{' > jobs.json; sleep 0.1"}, {"command": "true"}],
        ["0", "1"],
        "none",
    ),
}


def run(*jobs: dict[str, Any], lanes: int = 1, deadline: float = 1.0) -> list[str]:
    given = [{"minutes": 0, "name": str(number), **job} for number, job in enumerate(jobs)]
    Path("jobs.json").write_text(json.dumps({"lanes": lanes, "deadline": deadline, "jobs": given}), "utf-8")
    boss = Lanes(Path("jobs.json"), Path("logs"))
    boss.run(every=0.01)
    return [name for name, done in boss.ended.items() if done]


@pytest.mark.parametrize("case", CASES)
def test_jobs_run_that_can(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, expected, left_out = CASES[case]
    began = time.monotonic()
    assert run(*jobs) == expected
    assert time.monotonic() - began < 30  # the deadline is a minute
    assert capsys.readouterr().out.endswith(f"left out: {left_out}\n")


def test_what_runs_is_ended_when_lanes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    wait = time.sleep
    monkeypatch.setattr(time, "sleep", stop)
    with pytest.raises(KeyboardInterrupt):
        run({"command": "sleep 0.5; touch late"})
    wait(1)
    assert not Path("late").exists()


def test_at_the_deadline_what_runs_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert run({"command": "sleep 60"}, {"command": "sleep 60"}, lanes=2, deadline=0.002) == []
    assert capsys.readouterr().out.count("was ended") == 2
