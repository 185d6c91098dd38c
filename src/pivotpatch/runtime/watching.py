"""Find images as they arrive in a folder, by looking again and again: that works on network drives, too."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pivotpatch.errors import InputError


class _Stamp(NamedTuple):
    """What changes as long as somebody writes to a file."""

    size: int
    modified: int


def watch(
    folder: Path,
    tag: Callable[[list[Path]], None],
    *,
    suffixes: Sequence[str],
    every: float,
    settle: float,
    stop: threading.Event,
    already: Callable[[Path], bool],
) -> None:
    """Hand over images that are new or have changed, until told to stop.

    Hidden files and folders are left out, links to folders are not followed. A folder that vanishes, as a drive that is
    unplugged, may come back: what was handed over is not handed over again.

    Args:
        folder: it and all folders in it.
        tag: takes the images that arrived, sorted; what it raises ends the watch.
        suffixes: of images, such as `.jpg`, in lower case.
        every: seconds between two looks.
        settle: seconds for which a file must not have changed: it may still be on its way.
        stop: once set, the watch ends, as soon as `tag` is done.
        already: whether an image is tagged; asked once per file. One that changes later is handed over nevertheless.
    """
    if not folder.is_dir():
        raise InputError(str(folder), "there is no such folder", "name the folder to watch")
    seen: dict[Path, tuple[_Stamp, float]] = {}  # files on their way, and since when they are as they are
    done: dict[Path, _Stamp] = {}
    while True:
        found = {path: stamp for path, stamp in _find(folder, tuple(suffixes)) if done.get(path) != stamp}
        now = time.monotonic()
        seen = {path: _keep(seen.get(path), stamp, now) for path, stamp in found.items()}
        settled = [path for path, (_, since) in seen.items() if now - since >= settle]
        new = sorted(path for path in settled if path in done or not already(path))
        done.update((path, found[path]) for path in settled)
        if new and not stop.is_set():
            tag(new)
        if stop.wait(every):
            return


def _keep(before: tuple[_Stamp, float] | None, stamp: _Stamp, now: float) -> tuple[_Stamp, float]:
    return before if before is not None and before[0] == stamp else (stamp, now)


def _find(folder: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[Path, _Stamp]]:
    """All images below a folder; those that vanish meanwhile are left out."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and name.lower().endswith(suffixes):
                with suppress(OSError):
                    path = Path(place, name)
                    stat = path.stat()
                    yield path, _Stamp(stat.st_size, stat.st_mtime_ns)
