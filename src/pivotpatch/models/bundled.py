"""Networks that come with the package, by name."""

from pathlib import Path

from pivotpatch.errors import InputError

BUNDLED = ("tagger",)


def find_bundled(name: str) -> Path | None:
    """The checkpoint folder of a bundled network; None where no network has the name.

    >>> find_bundled("tagger").name, find_bundled("runs/mine")
    ('tagger', None)
    """
    if name not in BUNDLED:
        return None
    folder = Path(__file__).parents[1] / name
    if not folder.is_dir():
        raise InputError(name, "this installation lacks it", "install pivotpatch again, or give a run or checkpoint")
    return folder
