"""Networks by name: checkpoints on the Hugging Face hub, and other people's networks, there or in a folder."""

from pathlib import Path

from pivotpatch.models.classifier import Classifier
from pivotpatch.models.foreign import load_timm, load_transformers

SCHEMES = ("hub", "timm", "transformers")
"""What may stand before a colon, in front of a folder or of `owner/name` on the Hugging Face hub."""


def is_named(name: str) -> bool:
    """Whether a name begins with one of `SCHEMES`.

    >>> is_named("hub:owner/name@v2"), is_named("my-run"), is_named("timm:")
    (True, False, False)
    """
    scheme, _, place = name.partition(":")
    return scheme in SCHEMES and bool(place)


def load_named(name: str) -> Classifier:
    """Open what `is_named`, on the CPU.

    Args:
        name: "hub:", "timm:" or "transformers:" and a folder, or `owner/name` on the hub, behind which a revision may
            stand: "hub:owner/name@v2".
    """
    scheme, _, place = name.partition(":")
    revision = None
    if not Path(place).exists():
        place, _, tail = place.partition("@")
        revision = tail or None
    if scheme == "hub":
        return Classifier.from_pretrained(place, revision=revision)
    return (load_timm if scheme == "timm" else load_transformers)(place, revision=revision)
