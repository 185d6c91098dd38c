"""What verbs tell on stderr in words, and what they refuse, without waiting for anything."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from pivotpatch.errors import InputError
from pivotpatch.runtime.files import describe_unread

LISTED = 20  # images that could not be read


def tell(line: str) -> None:
    """Print a line to stderr, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def tell_unread(unread: Mapping[str, int]) -> None:
    """Say which files were left out, by suffix; each process of those that it has passed."""
    for line in describe_unread(unread):
        print(line, file=sys.stderr)


def refuse_first(*rules: tuple[object, str, str, str]) -> None:
    """Raise the error of the first rule that holds: whether it does, where, what is wrong, what to do."""
    for holds, where, wrong, todo in rules:
        if holds:
            raise InputError(where, wrong, todo)


def refuse_options(args: argparse.Namespace, names: Sequence[str], wrong: str, todo: str) -> None:
    """Raise an error for the first of some options that is given."""
    for name in names:
        given = getattr(args, name)
        if given is not None and given is not False:  # 0 is a value too
            raise InputError(f"--{name.replace('_', '-')}", wrong, todo)


def list_not_read(not_read: Mapping[str, str], *, rest: str = ", --json lists all") -> None:
    """Tell on stderr which images have no scores; the first few of many, and where the rest is told."""
    for wrong in list(not_read.values())[:LISTED]:
        tell(f"not read: {wrong}")
    if len(not_read) > LISTED:
        tell(f"not read: {len(not_read) - LISTED} more{rest}")
