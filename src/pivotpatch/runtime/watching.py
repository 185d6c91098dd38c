"""Find images as they arrive in a folder, by looking again and again: that works on network drives, too."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pivotpatch.errors import InputError
from pivotpatch.runtime.files import walk_files

_Stamp = tuple[int, int]
"""Size and time of change: what changes as long as somebody writes to a file."""
_GLANCE = 0.1  # seconds between two looks whether to stop


def watch(
    folder: Path,
    tag: Callable[[list[Path]], None],
    *,
    suffixes: Sequence[str],
    every: float,
    settle: float,
    stopping: Callable[[], bool],
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
        stopping: asked again and again; once it says so the watch ends, as soon as `tag` is done.
        already: whether an image is tagged; asked once per file. One that changes later is handed over nevertheless.
    """
    seen: dict[Path, tuple[_Stamp, float]] = {}  # files on their way, and since when they are as they are
    done: dict[Path, _Stamp] = {}
    while not stopping():
        found = {path: stamp for path, stamp in _find(folder, tuple(suffixes)) if done.get(path) != stamp}
        now = time.monotonic()
        seen = {path: _keep(seen.get(path), stamp, now) for path, stamp in found.items()}
        settled = [path for path, (_, since) in seen.items() if now - since >= settle]
        new = sorted(path for path in settled if path in done or not already(path))
        done.update((path, found[path]) for path in settled)
        if new and not stopping():
            tag(new)
        end = time.monotonic() + every
        while not stopping() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _GLANCE))


def _keep(before: tuple[_Stamp, float] | None, stamp: _Stamp, now: float) -> tuple[_Stamp, float]:
    return before if before is not None and before[0] == stamp else (stamp, now)


def _find(folder: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[Path, _Stamp]]:
    """All images below a folder; those that vanish meanwhile are left out, all of them where the folder itself has."""
    with suppress(InputError):
        for name in walk_files(str(folder), skip=True):
            if name.lower().endswith(suffixes):
                with suppress(OSError):
                    stat = Path(name).stat()
                    yield Path(name), (stat.st_size, stat.st_mtime_ns)
