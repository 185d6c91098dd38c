"""SIGKILL at random moments, again and again, until the work is finished; then it must be that of one quiet run."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from run_process import SHORT, PredictProcess, TrainingProcess, WorkProcess, read_run, write_pictures

from pivotpatch.training.folder import LOCK

IMAGES, BROKEN = 60, (0, 9, 10)


def run(folder: Path, *, long: bool, seed: int) -> tuple[dict[str, int], list[str]]:
    """Kill tagging and training."""
    draw, found = random.Random(seed), list[str]()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU adds in another order each time
    write_pictures(Path("pictures"), IMAGES, broken=BROKEN)
    kills, rounds = torment(
        folder / "tags",
        lambda out: PredictProcess(out / "tags.jsonl", threads=draw.choice([1, 3])),
        read_tags,
        is_done=lambda out: (
            (out / "tags.jsonl").exists() and not list(out.glob("*.parts")) + list(out.glob(".*.parts"))
        ),
        draw=draw,
        wanted=int(os.environ.get("KILLS", 1000 if long else 100)),
        found=found,
    )
    trained, runs = torment(
        folder / "run",
        lambda out: TrainingProcess(out, None if can_resume(out) else SHORT),
        lambda out: {name: content for name, content in read_run(out).items() if name != LOCK},
        is_done=is_finished,
        draw=draw,
        wanted=int(os.environ.get("TRAIN_KILLS", 200 if long else 12)),
        found=found,
    )
    return {"predict_kills": kills, "predict_finished": rounds, "train_kills": trained, "train_finished": runs}, found


def can_resume(out: Path) -> bool:
    """Whether a run has saved; what was killed before is removed, as the message says."""
    if any((out / name / "state.json").exists() for name in ("last", "last.old")):
        return True
    shutil.rmtree(out, ignore_errors=True)
    return False


def is_finished(out: Path) -> bool:
    """Whether a run says that it has come to its end."""
    with suppress(OSError, ValueError):
        return bool(json.loads((out / "metrics.json").read_text("utf-8"))["finished"])
    return False


def read_tags(folder: Path) -> dict[str, str]:
    """Rows and failures; a lock that a kill has left is no matter."""
    return {path.name: path.read_text("utf-8") for path in folder.glob("tags*") if path.suffix == ".jsonl"}


def torment(
    out: Path,
    start: Callable[[Path], WorkProcess],
    read: Callable[[Path], dict[str, Any]],
    *,
    is_done: Callable[[Path], bool],
    draw: random.Random,
    wanted: int,
    found: list[str],
) -> tuple[int, int]:
    """Kill work until it has been killed so often; how often, and how many times it was finished in between."""
    seconds, expected = 0.0, dict[str, Any]()
    for number in range(2):  # the first start of all takes longer
        quiet, begun = out.with_name(f"{out.name}-quiet-{number}"), time.monotonic()
        quiet.mkdir()
        assert start(quiet).wait() == 0
        seconds, expected = time.monotonic() - begun, read(quiet)
    kills = finished = 0
    out.mkdir()
    while kills < wanted or any(out.glob("*")):  # not even the folder, where a kill came before it
        process = start(out)
        deadline = time.monotonic() + draw.uniform(0, 1.2 * seconds if kills < wanted else 60)
        while time.monotonic() < deadline and process.alive():
            time.sleep(0.001)
        killed = process.alive()
        process.kill()
        kills += killed
        if killed and not is_done(out):
            continue
        status = 0 if killed else process.wait()
        if status != 0 or read(out) != expected:
            found.append(f"{out.name} after {kills} kills: exit {status}, or another result")
        finished += 1
        shutil.rmtree(out)
        out.mkdir()
    return kills, finished
