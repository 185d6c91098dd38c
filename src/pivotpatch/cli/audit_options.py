"""Options of `pivotpatch audit`: what they mean, and where they mean nothing."""

import argparse
from collections.abc import Sequence

from pivotpatch.core.errors import InputError

DEFAULTS = {
    "pair": None,
    "min_probability": 0.2,
    "policy": "prior",
    "kind": None,
    "order": "rate",
    "baseline": None,
    "count": 15,
}
"""Of the options that not all parts of an audit have; pairs of labels have all of them."""
_PARTS: dict[str, tuple[str, ...]] = {
    "steps": ("count",),
    "scale_study": (),
    "label_errors": ("kind", "count"),
    "cases": ("baseline", "count"),
    "effect": ("baseline",),
}


def refuse_unused(args: argparse.Namespace) -> None:
    """Refuse options that the part which is asked for would not look at."""
    for part, used in _PARTS.items():
        if not getattr(args, part):
            continue
        for option, default in DEFAULTS.items():
            if option not in used and getattr(args, option) != default:
                wrong = f"it means nothing beside --{part.replace('_', '-')}"
                raise InputError(f"--{option.replace('_', '-')}", wrong, "leave one of the two out")


def split_pairs(texts: Sequence[str] | None) -> list[tuple[str, str]] | None:
    """Label and company of each pair that is named; None where none is."""
    if texts is None:
        return None
    pairs = []
    for text in texts:
        label, sign, company = (part.strip() for part in text.strip("{}").partition(";"))
        if not sign:
            raise InputError("--pair", f"{text!r} has no semicolon", "write for example 'car;parking meter'")
        pairs.append((label, company))
    return pairs
