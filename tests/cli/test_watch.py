"""A folder that is watched: one that changes by a clock that the test moves, and one by a real process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import pivotpatch.cli.watch as verb
from pivotpatch.cli.main import main
from pivotpatch.cli.watch import watch

PAGE = Path(__file__).parents[2] / "src" / "pivotpatch" / "app" / "page"
LONGEST = 60.0
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
    monkeypatch.setattr(verb, "time", script)
    monkeypatch.setattr(verb, "_GLANCE", 1)
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


@contextmanager
def watching(*words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Watch `photos` with what is said in out.txt and told in err.txt; Ctrl-C ends it with status 0."""
    options = "--every", "0.2", "--effort", "0", "--device", "cpu"
    command = [sys.executable, "-m", "pivotpatch", "watch", "photos", *options, *words]
    with Path("out.txt").open("wb") as out, Path("err.txt").open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
    try:
        wait_until(lambda: "watching photos" in told())
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(LONGEST) == 0, told()
    finally:
        process.kill()
        process.wait()


def told() -> str:
    return Path("err.txt").read_text("utf-8")


def said() -> list[str]:
    return Path("out.txt").read_text("utf-8").splitlines()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < end, told()
        time.sleep(0.05)


@pytest.fixture
def photos(here: Path) -> Path:
    folder = here / "photos"
    folder.mkdir()
    shutil.copy(PAGE / "cat.jpg", folder / "cat.jpg")
    shutil.copy(PAGE / "coffee.jpg", folder / "coffee.jpg")
    return folder


@pytest.mark.slow
def test_what_has_no_tags_yet_gets_them_and_what_arrives_too(photos: Path) -> None:
    assert main(["predict", "photos/coffee.jpg", "--write", "xmp,json", "--device", "cpu"]) == 0
    before = (photos / "coffee.jpg.json").stat().st_mtime_ns
    Path("tags.toml").write_text('always = ["seen"]', "utf-8")
    with watching("--write", "xmp,json", "--tags", "tags.toml"):
        wait_until(lambda: said() == ["photos/cat.jpg: cat, seen"])
        shutil.copy(PAGE / "astronaut.jpg", photos / "new.jpg")
        (photos / "raw.nef").write_bytes(b"no image")
        (photos / "broken.jpg").write_bytes(b"no image")
        wait_until(lambda: len(said()) == 2 and "raw file" in told() and "broken.jpg" in told())
        assert said()[1].startswith("photos/new.jpg: person, ")
        assert "\n1 raw file was not read; export it as JPEG first\n" in told()
        assert "\nnot read: photos/broken.jpg: is in none of the known formats" in told()
    assert told().splitlines()[-1] == "tagged 2 images: wrote 4 sidecars, 0 unchanged, 1 could not be read"
    assert [tag["label"] for tag in json.loads((photos / "cat.jpg.json").read_text())["tags"]] == ["cat", "seen"]
    assert (photos / "cat.jpg.xmp").is_file()
    assert (photos / "coffee.jpg.json").stat().st_mtime_ns == before
