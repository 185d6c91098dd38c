"""What a user may say, checked before anything slow is imported: numbers, and names of models."""

import os
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

from pivotpatch.errors import InputError, choose_one_of

BUNDLED = ("tagger",)
"""Models that come with the package."""
SCHEMES = ("hub", "timm", "transformers")
"""What may stand before a colon, in front of a folder or of `owner/name` on the Hugging Face hub."""
Preference = Literal["precision", "balance", "recall"]
PREFERENCES: tuple[Preference, ...] = get_args(Preference)
"""What a user may prefer where a model has thresholds for each: right tags, the best F1, or few that are missing."""
TABLE_KINDS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
"""How the names of tables end."""
EXPORTED = ".onnx"
"""How the names of exported models end."""


def _is_share(value: Any) -> bool:
    return isinstance(value, Real) and 0 <= float(value) <= 1  # a number of numpy is one, too


def check_effort(effort: float | None, where: str) -> None:
    """Refuse an effort that is no number from 0 to 1; None is for the model's own.

    >>> check_effort(0.5, "here")
    """
    if effort is not None and not _is_share(effort):
        todo = "give a number from 0, no second look, to 1, one at every image"
        raise InputError(where, f"effort is {effort!r}", todo)


def check_rule(threshold: float | None, top_k: int | None) -> None:
    """Refuse a threshold that is no probability, and to give less than one label."""
    if threshold is not None and not _is_share(threshold):
        raise InputError("threshold", f"{threshold!r} is no probability", "give 0 to 1")
    if top_k is not None and top_k < 1:
        raise InputError("top_k", f"it is {top_k}", "give 1 or more")


def is_named(name: str) -> bool:
    """Whether a name begins with one of `SCHEMES`.

    >>> is_named("hub:owner/name@v2"), is_named("my-run"), is_named("timm:")
    (True, False, False)
    """
    scheme, _, place = name.partition(":")
    return scheme in SCHEMES and place.partition("@")[0] != ""


def check_words(words: Sequence[str]) -> None:
    """Refuse tables, of scores and of images, that are not there; patterns and options are looked at later."""
    for word in words[:2]:
        if word.lower().endswith(TABLE_KINDS) and not set(":?@=*[") & set(word) and not Path(word).exists():
            if Path(f"{word}.parts").is_dir():
                raise InputError(word, "is not finished", "give the same predict command again")
            raise InputError(word, "there is no such file", "check the path")


def check_model(name: str | os.PathLike[str]) -> None:
    """Refuse the name of a model that is neither bundled nor on this disk nor one of `SCHEMES`."""
    name = os.fspath(name)
    if name in BUNDLED or is_named(name) or Path(name).exists():
        return
    if name.lower().endswith(EXPORTED):
        raise InputError(name, "there is no such file", "check the path")
    known = choose_one_of(name, [*BUNDLED, *(f"{scheme}:owner/name" for scheme in SCHEMES)])
    wrong = "is neither a bundled model nor a folder or file that is there"
    raise InputError(name, wrong, f"{known}; or give the folder of a run or checkpoint, or an .onnx file")
