"""A folder that changes while it is watched."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import pivotpatch.runtime.watching as watching_module
from pivotpatch.runtime.watching import watch

EVERY, SETTLE, LONGEST = 0.01, 0.05, 20.0


class Watched:
    """What a watch in a thread has handed over so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches: list[list[str]] = []
        self.asked: list[str] = []

    @property
    def names(self) -> list[str]:
        return [name for batch in self.batches for name in batch]

    def take(self, paths: list[Path]) -> None:
        self.batches.append([path.relative_to(self.folder).as_posix() for path in paths])

    def is_tagged(self, path: Path) -> bool:
        self.asked.append(path.name)
        return "tagged" in path.name

    def wait_for(self, names: list[str]) -> None:
        wait_until(lambda: len(self.names) >= len(names))
        time.sleep(4 * SETTLE)  # for what must not come
        assert self.names == names


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(EVERY)


@contextmanager
def watching(folder: Path) -> Iterator[Watched]:
    stop, watched = threading.Event(), Watched(folder)
    thread = threading.Thread(
        target=watch,
        args=(folder, watched.take),
        kwargs={
            "suffixes": (".jpg", ".png"),
            "every": EVERY,
            "settle": SETTLE,
            "stopping": stop.is_set,
            "already": watched.is_tagged,
        },
    )
    thread.start()
    try:
        yield watched
    finally:
        stop.set()
        thread.join(LONGEST)
    assert not thread.is_alive()


def test_each_image_is_handed_over_once(tmp_path: Path) -> None:
    for name in ("b.jpg", "a.PNG", "tagged.jpg", ".hidden.jpg", "a.PNG.xmp", "a.txt"):
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "sub" / ".thumbnails").mkdir(parents=True)
    (tmp_path / "sub" / ".thumbnails" / "x.jpg").write_bytes(b"1")
    with watching(tmp_path) as watched:
        watched.wait_for(["a.PNG", "b.jpg"])
        assert len(watched.batches) == 1
        (tmp_path / "sub" / "new.jpg").write_bytes(b"1")
        watched.wait_for(["a.PNG", "b.jpg", "sub/new.jpg"])
        assert sorted(watched.asked) == ["a.PNG", "b.jpg", "new.jpg", "tagged.jpg"]
        (tmp_path / "tagged.jpg").write_bytes(b"changed")
        watched.wait_for(["a.PNG", "b.jpg", "sub/new.jpg", "tagged.jpg"])


class Script:
    """A clock that stands still but between two looks, and then something happens; at the end it stops the watch."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.now, self.steps, self.ended = 0.0, list(steps), False

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.steps:
            self.steps.pop(0)()
        else:
            self.ended = True


def play(monkeypatch: pytest.MonkeyPatch, folder: Path, *steps: Callable[[], object]) -> list[tuple[float, str]]:
    """When each image was handed over, with a look every second and two of them to settle."""
    script = Script(*steps)
    monkeypatch.setattr(watching_module, "time", script)
    monkeypatch.setattr(watching_module, "_GLANCE", 1)
    taken: list[tuple[float, str]] = []
    watch(
        folder,
        lambda paths: taken.extend((script.now, path.name) for path in paths),
        suffixes=(".jpg",),
        every=1,
        settle=2,
        stopping=lambda: script.ended,
        already=lambda path: False,
    )
    return taken


def nothing() -> None:
    pass


def test_a_file_that_is_still_written_to_has_to_settle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "slow.jpg"

    def grow() -> None:
        with path.open("ab") as file:
            file.write(b"1")

    steps = [grow] * 5 + [nothing] * 4 + [grow] + [nothing] * 5
    assert play(monkeypatch, tmp_path, *steps) == [(7, "slow.jpg"), (12, "slow.jpg")]
    monkeypatch.undo()
    touched = partial(os.utime, path, ns=(1, 1))  # of the same size
    steps = [nothing] * 4 + [touched] + [nothing] * 4
    assert play(monkeypatch, tmp_path, *steps) == [(2, "slow.jpg"), (7, "slow.jpg")]


def test_files_and_folders_may_vanish_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive, elsewhere = tmp_path / "drive", tmp_path / "unplugged"
    drive.mkdir()
    for name in ("a.jpg", "b.jpg"):
        (drive / name).write_bytes(b"1")
    (drive / "dangling.jpg").symlink_to(tmp_path / "nowhere")
    steps: list[Callable[[], object]] = [
        (drive / "a.jpg").unlink,
        nothing,
        nothing,
        partial(drive.rename, elsewhere),
        nothing,
        partial(elsewhere.rename, drive),
        partial((drive / "late.jpg").write_bytes, b"1"),
        *[nothing] * 5,
    ]
    assert play(monkeypatch, drive, *steps) == [(2, "b.jpg"), (9, "late.jpg")]


def test_it_stops_before_it_takes_more(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"1")
    taken: list[list[Path]] = []
    answers = iter([False, True, True, True])  # asked before the first look, and before what it found is taken
    stopping = partial(next, answers)
    watch(tmp_path, taken.append, suffixes=(".jpg",), every=60, settle=0, stopping=stopping, already=lambda path: False)
    assert taken == []


def test_what_tagging_raises_ends_the_watch(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"1")

    def fail(paths: list[Path]) -> None:
        raise RuntimeError(paths[0].name)

    with pytest.raises(RuntimeError, match="a.jpg"):
        watch(
            tmp_path,
            fail,
            suffixes=(".jpg",),
            every=60,
            settle=0,
            stopping=lambda: False,
            already=lambda path: False,
        )
