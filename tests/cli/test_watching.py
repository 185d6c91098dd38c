"""A folder that changes while it is watched, by a clock that the test moves."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import pivotpatch.cli.watch as watching_module
from pivotpatch.cli.watch import watch

ONCE = partial(watch, suffixes=(".jpg",), every=60, settle=0, already=lambda path: False)


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


def play(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *steps: Callable[[], object],
    already: Callable[[Path], bool] = lambda path: False,
) -> list[tuple[float, str]]:
    """When each image was handed over, with a look every second and two of them to settle."""
    script = Script(*steps)
    monkeypatch.setattr(watching_module, "time", script)
    monkeypatch.setattr(watching_module, "_GLANCE", 1)
    taken: list[tuple[float, str]] = []
    watch(
        folder,
        lambda paths: taken.extend((script.now, path.relative_to(folder).as_posix()) for path in paths),
        suffixes=(".jpg", ".png"),
        every=1,
        settle=2,
        stopping=lambda: script.ended,
        already=already,
    )
    return taken


def nothing() -> None:
    pass


def test_each_image_is_handed_over_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub" / ".thumbnails").mkdir(parents=True)
    names = "b.jpg", "a.PNG", "tagged.jpg", ".hidden.jpg", "a.PNG.xmp", "a.txt", "sub/.thumbnails/x.jpg"
    for name in names:
        (tmp_path / name).write_bytes(b"1")
    asked: list[str] = []

    def is_tagged(path: Path) -> bool:
        asked.append(path.name)
        return "tagged" in path.name

    arrives = partial((tmp_path / "sub" / "new.jpg").write_bytes, b"1")
    changes = partial((tmp_path / "tagged.jpg").write_bytes, b"changed")
    steps: list[Callable[[], object]] = [*[nothing] * 4, arrives, *[nothing] * 4, changes, *[nothing] * 4]
    taken = play(monkeypatch, tmp_path, *steps, already=is_tagged)
    assert taken == [(2, "a.PNG"), (2, "b.jpg"), (7, "sub/new.jpg"), (12, "tagged.jpg")]
    assert sorted(asked) == ["a.PNG", "b.jpg", "new.jpg", "tagged.jpg"]


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


def test_a_stop_and_a_fault_of_tagging_end_the_watch(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"1")

    def fail(paths: list[Path]) -> None:
        raise RuntimeError(paths[0].name)

    with pytest.raises(RuntimeError, match="a.jpg"):
        ONCE(tmp_path, fail, stopping=lambda: False)
    answers = iter([False, True, True, True])  # asked before the first look, and before what it found is taken
    ONCE(tmp_path, fail, stopping=partial(next, answers))
