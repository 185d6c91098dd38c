"""Networks by name: checkpoints on the Hugging Face hub, and other people's networks, there or in a folder."""

import json
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.errors import InputError

if TYPE_CHECKING:
    from pivotpatch.models.classifier import Classifier

SCHEMES = ("hub", "timm", "transformers")
"""What may stand before a colon, in front of a folder or of `owner/name` on the Hugging Face hub."""


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
    """What a network's files may be called: the last part of its path or name, without scheme and revision.

    >>> shorten_name("hub:owner/tags@v2"), shorten_name("runs/pat/")
    ('tags', 'pat')
    """
    if not is_named(name):
        return Path(name).resolve().name
    place = Path(name.partition(":")[2])
    return place.resolve().name if place.exists() else place.name.partition("@")[0]


def load_named(name: str) -> "Classifier":
    """Open what `is_named`, on the CPU.

    Args:
        name: "hub:", "timm:" or "transformers:" and a folder, or `owner/name` on the hub, behind which a revision may
            stand: "hub:owner/name@v2".
    """
    from pivotpatch.models.classifier import Classifier  # not before, for verbs ask of names that need no network
    from pivotpatch.models.foreign import load_timm, load_transformers

    scheme, _, whole = name.partition(":")
    place, _, tail = (whole, "", "") if Path(whole).exists() else whole.partition("@")
    loaders: dict[str, Callable[..., Classifier]]
    loaders = {"hub": Classifier.from_pretrained, "timm": load_timm, "transformers": load_transformers}
    try:
        model = loaders[scheme](place, revision=tail or None)
    except InputError as error:
        fitting = _find_scheme(Path(place))
        if fitting not in (None, scheme):
            raise InputError(name, f"does not hold what {scheme}: opens", f"give {fitting}:{whole}") from error
        where, wrong, todo = error.parts
        itself = any(said.rstrip("/").endswith(where) for said in (place, whole))  # a file of it keeps its own name
        raise InputError(name if itself else where, wrong, todo) from error
    model.origin = name
    return model


def _find_scheme(folder: Path) -> str | None:
    """The scheme that opens what is in a folder; None where its files do not make it plain."""
    from pivotpatch.models.checkpoint import DESCRIPTION
    from pivotpatch.models.foreign import CONFIG

    if (folder / DESCRIPTION).is_file():
        return "hub"
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    keys = {"architecture": "timm", "model_type": "transformers"}
    told = [scheme for key, scheme in keys.items() if isinstance(config, dict) and key in config]
    return told[0] if len(told) == 1 else None
