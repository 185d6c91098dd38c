"""`pivotpatch watch`: tags beside images as they arrive in a folder."""

import argparse
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.cli.tagging import (
    add_model_options,
    add_tag_options,
    add_write_option,
    check_options,
    open_predictor,
)
from pivotpatch.errors import InputError

if TYPE_CHECKING:
    from pivotpatch.process import StopSignals

SETTLE = 2.0  # seconds for which a file must not have changed, at most
_GLANCE = 0.1  # seconds between two looks whether a signal has come


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    watch = verbs.add_parser(
        "watch",
        help="tag images as they arrive in a folder",
        description="Write tags beside the images of a folder and of all in it: those that have none yet, then those "
        "that arrive or change. Images are never touched. Ctrl-C ends it.",
    )
    watch.add_argument("folder", type=Path, metavar="DIR", help="the folder to watch")
    add_model_options(watch)
    add_tag_options(watch)
    beside = watch.add_argument_group("tags beside the images")
    add_write_option(beside)
    beside.add_argument("--overwrite", action="store_true", help="replace captions that say something else")
    beside.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between two looks (5)")
    watch.set_defaults(run=run_watch, on_error="skip")


class _Stop(threading.Event):
    """Set by a signal. A handler must not set an event: it may have come while the same thread holds its lock."""

    def __init__(self, signals: "StopSignals") -> None:
        super().__init__()
        self._signals = signals

    def is_set(self) -> bool:
        """Whether a signal has come."""
        return self._signals.received is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for one."""
        end = time.monotonic() + (timeout or 0.0)
        while not self.is_set() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _GLANCE))
        return self.is_set()


def run_watch(args: argparse.Namespace) -> int:
    """Tag what arrives until a signal asks to stop."""
    if not args.folder.is_dir():
        raise InputError(str(args.folder), "there is no such folder", "name the folder to watch")
    if not args.every > 0:
        raise InputError("--every", f"{args.every:g} seconds", "give more than 0")
    args.write = args.write or ["xmp"]
    check_options(args)
    from pivotpatch.cli.tagging import Naming, Sidecars
    from pivotpatch.cli.telling import tell
    from pivotpatch.process import StopSignals
    from pivotpatch.runtime.files import describe_unread, image_suffixes, is_image, unread_suffixes
    from pivotpatch.runtime.watching import watch

    with StopSignals() as signals:
        predictor = open_predictor(args)
        sidecars = Sidecars(args, Naming(args, predictor.labels))
        stop = _Stop(signals)

        def tag(paths: list[Path]) -> None:
            others = Counter(path.suffix.lower() for path in paths if not is_image(path.name))
            for line in describe_unread(others):
                tell(line)
            images = (path for path in paths if is_image(path.name) and not stop.is_set())
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
            stop=stop,
            already=sidecars.are_there,
        )
    tell(f"tagged {sidecars.tagged:,} images: {sidecars.describe()}")
    return 0
