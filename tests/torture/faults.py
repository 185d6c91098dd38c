"""What the system does to a job: a full disk, folders that refuse, a second writer, a clock that jumps."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_process import read_run, write_pictures

COUNT = 300
_VERB = "import sys; from pivotpatch.cli.main import main; sys.exit(main())"
_JUMPING = "import random, time; real = time.time; time.time = lambda: real() + random.uniform(-1e7, 1e7); "
# From a run's first save on, no file may grow beyond 512 bytes: the disk fills while it trains.
_FILLING = """
import pathlib, resource, sys, threading, time
def fill():
    while not pathlib.Path(sys.argv[-1], "last", "state.json").exists():
        time.sleep(0.001)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
threading.Thread(target=fill, daemon=True).start()
"""
_OUT = ("predict", "pictures", "--effort", "0", "--out")
_TRAIN = ("train", "scenes:@train?count=24&size=32", "model.backbone=test_resnet", "model.pretrained=false")
_SMALL = (
    "model.image_size=32",
    "train.epochs=2",
    "train.batch_size=4",
    "data.workers=0",
    "output.trackers=[]",
    "output.save_every=2",
)


def start(*words: str, code: str = _VERB, **options: Any) -> "subprocess.Popen[str]":
    paths = os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def say(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """The exit status and the last line on stderr; all of it where that is a traceback."""
    _, said = process.communicate(timeout=600)
    return process.returncode, said if "Traceback" in said else (said.splitlines() or [""])[-1]


def run(folder: Path, *, long: bool, seed: int) -> tuple[dict[str, int], list[str]]:
    """Try each fault; the next run, without it, must end as if nothing had been."""
    found: list[str] = []

    def expect(what: str, result: tuple[int, str], status: int, words: str) -> None:
        if result[0] != status or words not in result[1] or "Traceback" in result[1]:
            found.append(f"{what}: exit {result[0]}, {result[1]}")

    write_pictures(Path("pictures"), COUNT, broken=(5,))
    expect("quiet", say(start(*_OUT, "quiet.jsonl")), 0, "wrote quiet.jsonl")
    quiet = Path("quiet.jsonl").read_text()

    def check(name: str) -> None:
        expect(f"{name} at last", say(start(*_OUT, name)), 0, f"wrote {name}")
        if Path(name).read_text() != quiet:
            found.append(f"{name}: other rows")

    sizes = [1 << power for power in range(8, 17, 1 if long else 3)]
    for size in sizes:  # files end at this size, as on a disk that is full
        name = f"full-{size}.jsonl"
        result = say(start(*_OUT, name, preexec_fn=_limit(size)))
        if result[0]:
            expect(name, result, 1, "free some space or choose another folder")
            check(name)
        trained = say(start(*_TRAIN, *_SMALL, "--out", f"run-{size}", preexec_fn=_limit(size)))
        expect(f"train on a disk that is full at {size}", trained, 1, "free some space")
    filled = say(start(*_TRAIN, *_SMALL, "--out", "filled", code=_FILLING + _VERB))
    expect("train on a disk that fills", filled, 1, "free some space")
    expect("train when there is room again", say(start("train", "--resume", "filled")), 0, "")
    for verb, words in (
        ("predict", (*_OUT, "locked/tags.jsonl")),
        ("train", (*_TRAIN, *_SMALL, "--out", "locked/run")),
    ):
        Path("locked").mkdir(exist_ok=True, mode=0o555)
        result = say(start(*words, preexec_fn=_obey))
        expect(f"{verb} to a folder that cannot be written", result, 1, "can be written to")
    first = start(*_OUT, "two.jsonl")
    while not list(folder.glob("two.jsonl.parts")):
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    expect("second writer", say(start(*_OUT, "two.jsonl")), 1, "another process is at work on it")
    expect(
        "second writer that replaces", say(start(*_OUT, "two.jsonl", "--overwrite")), 1, "another process is at work"
    )
    first.send_signal(signal.SIGCONT)
    expect("first writer", say(first), 0, "wrote two.jsonl")
    for name, words in (("jump.jsonl", (*_OUT, "jump.jsonl")), ("jump", (*_TRAIN, *_SMALL, "--out", "jump"))):
        expect(f"{name} with a clock that jumps", say(start(*words, code=_JUMPING + _VERB)), 0, "")
    expect("train", say(start(*_TRAIN, *_SMALL, "--out", "still")), 0, "")
    if Path("jump.jsonl").read_text() != quiet or Path("two.jsonl").read_text() != quiet:
        found.append("jump.jsonl or two.jsonl: other rows")
    found += [f"{name}: another run" for name in ("jump", "filled") if read_run(Path(name)) != read_run(Path("still"))]
    return {"full_disks": 2 * len(sizes) + 1, "read_only": 2, "second_writers": 2, "clock_jumps": 2}, found


def _limit(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _obey() -> None:
    """Take from root the right to write where nobody may."""
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE; of others nothing is taken
