"""A folder that is watched by a real process."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pivotpatch.cli.main import main

PAGE = Path(__file__).parents[2] / "src" / "pivotpatch" / "app" / "page"
LONGEST = 60.0


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
