"""Commands in lanes: order, what waits for what, a second attempt, and the deadline."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from lanes import Lanes


def run(folder: Path, *jobs: dict[str, Any], lanes: int = 1, deadline: float = 1.0) -> list[str]:
    path = folder / "jobs.json"
    given = [{"minutes": 0, "name": str(number), **job} for number, job in enumerate(jobs)]
    path.write_text(json.dumps({"lanes": lanes, "deadline": deadline, "jobs": given}), "utf-8")
    boss = Lanes(path, folder / "logs")
    boss.run(every=0.01)
    return [name for name, done in boss.ended.items() if done]


def test_a_job_waits_for_others_and_for_files(tmp_path: Path) -> None:
    late = tmp_path / "late"
    jobs: list[dict[str, Any]] = [
        {"name": "last", "command": f"test -e {late}", "after": ["first"], "needs": [str(late)]},
        {"name": "first", "command": f"touch {late}"},
    ]
    assert run(tmp_path, *jobs, lanes=2) == ["first", "last"]


def test_a_job_that_fails_runs_again_by_its_other_command(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = [
        {"command": "false", "again": "echo mended"},
        {"command": "false"},
        {"command": "true", "after": ["1"]},
    ]
    assert run(tmp_path, *jobs) == ["0"]
    assert (tmp_path / "logs" / "0.log").read_text("utf-8") == "mended\n"
    assert not (tmp_path / "logs" / "2.log").exists()


@pytest.mark.parametrize(
    "others",
    [
        [],
        [{"name": "a", "command": "true", "after": ["b"]}],
        [{"name": "a", "command": "true", "minutes": 99}],
        [{"name": "a", "command": "false"}],
    ],
    ids=["unknown", "in a circle", "too long", "failed"],
)
def test_nobody_waits_for_what_never_comes(
    others: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert run(tmp_path, {"name": "b", "command": "true", "after": ["a"]}, *others) == []
    assert time.monotonic() - began < 30  # the deadline is a minute
    assert "left out: b" in capsys.readouterr().out


def test_a_file_that_is_being_written_ends_nothing(tmp_path: Path) -> None:
    half = f"echo '{{' > {tmp_path / 'jobs.json'}; sleep 0.1"
    assert run(tmp_path, {"command": half}, {"command": "true"}) == ["0", "1"]


def test_what_runs_is_ended_when_lanes_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, {"command": f"sleep 0.5; touch {tmp_path / 'late'}"})
    monkeypatch.undo()
    time.sleep(1)
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize(("must", "expected"), [(False, ["1"]), (True, ["0", "1"])])
def test_a_job_that_cannot_end_in_time_is_left_out_unless_it_must_run(
    must: bool, expected: list[str], tmp_path: Path
) -> None:
    jobs: list[dict[str, Any]] = [{"command": "true", "minutes": 5, "must": must}, {"command": "true"}]
    assert run(tmp_path, *jobs) == expected


def test_what_jobs_took_corrects_what_others_are_said_to_take(tmp_path: Path) -> None:
    slow, next_one = {"command": "sleep 0.3", "minutes": 0.0005}, {"command": "true", "minutes": 0.5}
    assert run(tmp_path, slow, next_one) == ["0"]  # ten times as slow as was said


def test_at_the_deadline_what_runs_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"command": "sleep 60"}, deadline=0.002) == []
    assert "0 was ended" in capsys.readouterr().out
