"""Options of `pivotpatch audit`: what they mean, and where they mean nothing."""

import argparse
from collections.abc import Collection, Sequence

from pivotpatch.errors import InputError

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


def split_pairs(texts: Sequence[str] | None, labels: Collection[str]) -> list[tuple[str, str]] | None:
    """Label and company of each pair that is named; None where none is. Labels may hold semicolons themselves."""
    if texts is None:
        return None
    pairs = []
    for text in texts:
        parts = text.strip("{}").split(";")
        if len(parts) == 1:
            raise InputError("--pair", f"{text!r} has no semicolon", "write for example 'car;parking meter'")
        ways = [(";".join(parts[:at]).strip(), ";".join(parts[at:]).strip()) for at in range(1, len(parts))]
        pairs.append(next((way for way in ways if way[0] in labels and way[1] in labels), ways[0]))
    return pairs
