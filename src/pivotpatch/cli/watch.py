"""`pivotpatch watch`: tags beside images as they arrive in a folder."""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pivotpatch.cli.predict import check_options
from pivotpatch.cli.telling import tell, tell_unread
from pivotpatch.errors import InputError
from pivotpatch.process import StopSignals
from pivotpatch.runtime.files import image_suffixes, is_image, unread_suffixes, walk_files

SETTLE = 2.0  # seconds for which a file must not have changed, at most
_Stamp = tuple[int, int]
"""Size and time of change: what changes as long as somebody writes to a file."""
_GLANCE = 0.1  # seconds between two looks whether to stop


def run_watch(args: argparse.Namespace) -> int:
    """Tag what arrives until a signal asks to stop."""
    if not args.folder.is_dir():
        raise InputError(str(args.folder), "there is no such folder", "name the folder to watch")
    if not args.every > 0:
        raise InputError("--every", f"{args.every:g} seconds", "give more than 0")
    args.write = args.write or ["xmp"]
    check_options(args)
    from pivotpatch.cli.tagging import Sidecars, open_predictor

    with StopSignals() as signals:
        predictor = open_predictor(args)
        sidecars = Sidecars(args, predictor.labels)

        def stopping() -> bool:
            return signals.received is not None

        def tag(paths: list[Path]) -> None:
            others = Counter(path.suffix.lower() for path in paths if not is_image(path.name))
            tell_unread(others)
            images = (path for path in paths if is_image(path.name) and not stopping())
            for prediction in predictor.predict(images, skip=True):
                said = sidecars.take(prediction)
                if said is not None:
                    print(said, flush=True)

        tell(f"watching {args.folder}; Ctrl-C ends it")
        watch(
            args.folder,
            tag,
            suffixes=(*image_suffixes(), *unread_suffixes()),
            every=args.every,
            settle=min(args.every, SETTLE),
            stopping=stopping,
            already=sidecars.are_there,
        )
    tell(f"tagged {sidecars.tagged:,} images: {sidecars.describe()}")
    return 0


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
    """Hand over files with these suffixes that are new or have changed, sorted, until told to stop.

    There are `every` seconds between two looks; a file must not have changed for `settle` of them, for it may still be
    on its way. One that is tagged `already` is handed over when it changes. Hidden files and folders are left out,
    links to folders are not followed. A folder that vanishes, as a drive that is unplugged, may come back: what was
    handed over is not handed over again.
    """
    seen: dict[tuple[Path, _Stamp], float] = {}  # files on their way as they are, and since when they are so
    done: dict[Path, _Stamp] = {}
    while not stopping():
        found = [(path, stamp) for path, stamp in _find(folder, tuple(suffixes)) if done.get(path) != stamp]
        now = time.monotonic()
        seen = {each: seen.get(each, now) for each in found}
        settled = dict(each for each, since in seen.items() if now - since >= settle)
        new = sorted(path for path in settled if path in done or not already(path))
        done |= settled
        if new and not stopping():
            tag(new)
        end = time.monotonic() + every
        while not stopping() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _GLANCE))


def _find(folder: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[Path, _Stamp]]:
    """All images below a folder; those that vanish meanwhile are left out, all of them where the folder itself has."""
    with suppress(InputError):
        for name in walk_files(str(folder), skip=True):
            if name.lower().endswith(suffixes):
                with suppress(OSError):
                    stat = Path(name).stat()
                    yield Path(name), (stat.st_size, stat.st_mtime_ns)
