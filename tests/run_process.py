"""Training and tagging in processes of their own, to be watched, signalled and killed; each starts in a moment."""

import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from made_engines import Means
from PIL import Image

from pivotpatch.process import Share
from pivotpatch.runtime import parts
from pivotpatch.runtime.bulk import ALONE, tag_pictures
from pivotpatch.runtime.files import find_images
from pivotpatch.training.config import RunConfig, load_config

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["pivotpatch.training.loop", "pivotpatch.data.scenes", "sklearn.datasets", "pivotpatch.runtime.bulk"]
)
IMAGES = "scenes:@train?count=63&size=32"
# 7 steps per epoch, the last of which is smaller; neither saves nor entries of the log divide them.
SMALL = (
    f"data.train={IMAGES}",
    "data.val_fraction=0.2",
    "model.backbone=test_resnet",
    "model.pretrained=false",
    "model.image_size=32",
    "optimiser.lr=1e-3",
    "train.epochs=2",
    "train.batch_size=8",
    "evaluation.batch_size=5",
    "output.save_every=4",
    "output.log_every=5",
    "output.trackers=[]",
)
_TIMES = ("seconds", "train_seconds", "pending_seconds", "pictures_per_second")
_TOUCHES = {"os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir", "shutil.rmtree"}


def make_config(*changes: str) -> RunConfig:
    """A run of a second: 14 steps, saved after 4, 7, 8, 12 and 14."""
    return load_config(None, [*SMALL, *changes])


SHORT = make_config("task.kind=image")


class WorkProcess:
    """Another process that does some work and tells of it.

    Attributes:
        pid: of the process.
    """

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        self._heard, told = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=work, args=(*arguments, told))
        self._process.start()
        told.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def hear(self) -> Any:
        """What it tells next; None where it has ended."""
        try:
            return self._heard.recv()
        except EOFError:
            return None

    def alive(self) -> bool:
        """Whether it is still at work; what it tells meanwhile is dropped."""
        with suppress(EOFError):
            while self._heard.poll():
                self._heard.recv()
        return self._process.is_alive()

    def kill(self) -> None:
        """End it at once, unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Its exit status; negative for the signal that ended it."""
        while self.hear() is not None:
            pass
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


class TrainingProcess(WorkProcess):
    """A run in the folder `out` that begins, or goes on where there is no configuration; it tells its progress."""

    def __init__(self, out: Path, config: RunConfig | None = None, *, dies_at_touch: int | None = None) -> None:
        super().__init__(_train, out, config, dies_at_touch)


def _train(out: Path, config: RunConfig | None, dies_at_touch: int | None, told: Connection) -> NoReturn:
    from pivotpatch.training.loop import fit, resume

    if dies_at_touch is not None:
        die_at_touch(out, dies_at_touch)

    def progress(what: str, done: int, _total: int | None) -> None:
        told.send((what, done))

    result = resume(out, progress=progress) if config is None else fit(config, out, progress=progress)
    sys.exit(0 if result.stopped_by is None else 128 + result.stopped_by)


def die_at_touch(out: Path, number: int) -> None:
    """Kill this process just before it changes something in the folder for the n-th time."""
    left = number

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        writes = event == "open" and isinstance(args[1], str) and args[1][0] in "wa"
        if (event in _TOUCHES or writes) and str(args[0]).startswith(str(out)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def when(what: str, done: int, do: Callable[[], object]) -> Callable[[str, int, int | None], None]:
    """Do something when a run is so far in a stage, given by how its name begins; 0 for each time that it is told."""

    def progress(stage: str, number: int, _total: int | None) -> None:
        if stage.startswith(what) and done in (0, number):
            do()

    return progress


def crash() -> None:
    raise ZeroDivisionError


def read_step(folder: Path, name: str = "last") -> int:
    """The step that a run would go on from."""
    return int(json.loads((folder / name / "state.json").read_text("utf-8"))["step"])


def read_run(folder: Path) -> dict[str, object]:
    """All that two equal runs have in common: everything but times, configuration and command."""
    content: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            content[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.suffix in (".json", ".jsonl") and path.name != "environment.json":
            lines = path.read_text("utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text("utf-8")]
            content[name] = [
                {k: v for k, v in json.loads(line).items() if k not in _TIMES and k != "config"} for line in lines
            ]
        else:
            content[name] = None
    return content


def write_images(folder: Path, *, broken: Iterable[int] = ()) -> str:
    """The address of a table of 40 images, some of which are none."""
    write_pictures(folder, 40, broken=broken)
    rows = [f"{number:04d}.png,{'red' if number % 3 else 'blue'}\n" for number in range(40)]
    (folder / "all.csv").write_text("image,labels\n" + "".join(rows))
    return f"table:{folder / 'all.csv'}"


LIMITS = (0.5, 0.4, 0.3)
"""Thresholds of red, green and blue."""


def write_pictures(folder: Path, count: int, *, broken: Iterable[int] = ()) -> None:
    """Pictures of one colour each; some of which are none."""
    folder.mkdir(exist_ok=True)
    colours = np.random.default_rng(0).integers(0, 256, (count, 3), dtype=np.uint8)
    for place, colour in enumerate(colours):
        Image.fromarray(np.broadcast_to(colour, (9, 7, 3)).copy()).save(folder / f"{place:04d}.png")
    for place in broken:
        (folder / f"{place:04d}.png").write_bytes(b"no picture")


class TaggingProcess(WorkProcess):
    """Tags all pictures of the folder `pictures` and tells how many are done."""

    def __init__(self, out: Path, *, share: Share = ALONE, threads: int = 1, dies_at_touch: int | None = None) -> None:
        super().__init__(_tag, Path.cwd(), out, share, threads, dies_at_touch)


def _tag(folder: Path, out: Path, share: Share, threads: int, dies_at_touch: int | None, told: Connection) -> None:
    os.chdir(folder)
    parts._PART_SECONDS = 0.0  # a part a batch
    if dies_at_touch is not None:
        die_at_touch(out.parent, dies_at_touch)
    tag_pictures(
        Means(thresholds=LIMITS),
        find_images(["pictures"]),
        out,
        share=share,
        batch_size=4,
        threads=threads,
        progress=lambda _what, done, _total: told.send(done),
    )


class PredictProcess(WorkProcess):
    """`pivotpatch predict pictures --out FILE` with the bundled tagger, a part for every four images."""

    def __init__(self, out: Path, *, threads: int = 1) -> None:
        super().__init__(_predict, Path.cwd(), out, threads)


def _predict(folder: Path, out: Path, threads: int, _told: Connection) -> NoReturn:
    from pivotpatch.cli.main import main

    os.chdir(folder)
    parts._PART_SECONDS = 0.0
    with Path(os.devnull).open("w") as nothing:  # its progress and summary
        os.dup2(nothing.fileno(), 2)
        os.dup2(nothing.fileno(), 1)
    options = ["--effort", "0", "--top-k", "3", "--batch-size", "4", "--workers", str(threads)]
    sys.exit(main(["predict", "pictures", "--out", str(out), *options]))
