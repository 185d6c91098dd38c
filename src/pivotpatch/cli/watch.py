"""`pivotpatch watch`: tags beside images as they arrive in a folder."""

import argparse
from collections import Counter
from pathlib import Path

from pivotpatch.cli.predict import check_options
from pivotpatch.cli.telling import tell
from pivotpatch.errors import InputError
from pivotpatch.process import StopSignals
from pivotpatch.runtime.files import image_suffixes, is_image, unread_suffixes
from pivotpatch.runtime.watching import watch

SETTLE = 2.0  # seconds for which a file must not have changed, at most


def run_watch(args: argparse.Namespace) -> int:
    """Tag what arrives until a signal asks to stop."""
    if not args.folder.is_dir():
        raise InputError(str(args.folder), "there is no such folder", "name the folder to watch")
    if not args.every > 0:
        raise InputError("--every", f"{args.every:g} seconds", "give more than 0")
    args.write = args.write or ["xmp"]
    check_options(args)
    from pivotpatch.cli.tagging import Naming, Sidecars, open_predictor, tell_unread

    with StopSignals() as signals:
        predictor = open_predictor(args)
        sidecars = Sidecars(args, Naming(args, predictor.labels))

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
