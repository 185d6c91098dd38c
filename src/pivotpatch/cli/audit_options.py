"""Options of `pivotpatch audit`: what they mean, and where they mean nothing."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pivotpatch.cli.policies import read_policy
from pivotpatch.core.errors import InputError

if TYPE_CHECKING:
    from pivotpatch.core.policies import ThresholdPolicy
    from pivotpatch.inference.scores import Scores

DEFAULTS = {"pair": None, "min_probability": 0.2, "policy": "prior", "kind": None, "order": "rate", "baseline": None}
"""Of the options that not all parts of an audit have; pairs of labels have all of them."""
_PARTS: dict[str, tuple[str, ...]]
_PARTS = {"steps": (), "scale_study": (), "label_errors": ("kind",), "cases": ("baseline",), "effect": ("baseline",)}


def refuse_unused(args: argparse.Namespace) -> None:
    """Refuse options that the part which is asked for would not look at."""
    for part, used in _PARTS.items():
        if not getattr(args, part):
            continue
        for option, default in DEFAULTS.items():
            if option not in used and getattr(args, option) != default:
                wrong = f"it means nothing beside --{part.replace('_', '-')}"
                raise InputError(f"--{option.replace('_', '-')}", wrong, "leave one of the two out")


def make_policy(text: str, scores: "Scores") -> "ThresholdPolicy":
    """The policy that a word names, for these scores."""
    from pivotpatch.core.policies import PriorMatched

    return read_policy(text, scores.labels) or PriorMatched.from_target(scores.target)


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
