"""What a model may be called: a bundled one, or one behind a scheme such as hub:owner/name. No model is opened here."""

from difflib import get_close_matches
from pathlib import Path

from pivotpatch.errors import InputError

BUNDLED = ("tagger",)
"""Models that come with the package."""
SCHEMES = ("hub", "timm", "transformers")
"""What may stand before a colon, in front of a folder or of `owner/name` on the Hugging Face hub."""


def find_bundled(name: str) -> Path | None:
    """The checkpoint folder of a bundled model; None where no model has the name.

    >>> find_bundled("tagger").name, find_bundled("runs/mine")
    ('tagger', None)
    """
    if name not in BUNDLED:
        return None
    folder = Path(__file__).parents[1] / name
    if not folder.is_dir():
        raise InputError(name, "this installation lacks it", "install pivotpatch again, or give a run or checkpoint")
    return folder


def is_named(name: str) -> bool:
    """Whether a name begins with one of `SCHEMES`.

    >>> is_named("hub:owner/name@v2"), is_named("my-run"), is_named("timm:")
    (True, False, False)
    """
    scheme, _, place = name.partition(":")
    return scheme in SCHEMES and place.partition("@")[0] != ""


def correct_scheme(name: str) -> str:
    """Advice for a name whose scheme is mistyped, to stand before other advice; nothing for any other name.

    >>> correct_scheme("HUB:owner/name"), correct_scheme("runs/pat")
    ("did you mean 'hub:owner/name'? ", '')
    """
    scheme, _, place = name.partition(":")
    close = get_close_matches(scheme.lower(), SCHEMES, n=1) if place and scheme not in SCHEMES else []
    return f"did you mean '{close[0]}:{place}'? " if close else ""


def shorten_name(name: str) -> str:
    """What a model's files may be called: the last part of its path or name, without scheme and revision.

    >>> shorten_name("hub:owner/tags@v2"), shorten_name("runs/pat/")
    ('tags', 'pat')
    """
    if not is_named(name):
        return Path(name).resolve().name
    place = Path(name.partition(":")[2])
    return place.resolve().name if place.exists() else place.name.partition("@")[0]
