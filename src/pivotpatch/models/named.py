"""Networks by name: checkpoints on the Hugging Face hub, and other people's networks, there or in a folder."""

from pathlib import Path
from typing import TYPE_CHECKING

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

    scheme, _, place = name.partition(":")
    revision = None
    if not Path(place).exists():
        place, _, tail = place.partition("@")
        revision = tail or None
    if scheme == "hub":
        return Classifier.from_pretrained(place, revision=revision)
    return (load_timm if scheme == "timm" else load_transformers)(place, revision=revision)
