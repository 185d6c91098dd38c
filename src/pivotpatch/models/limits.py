"""What a model's files may ask for: which heads, and how much, refused before anything of that size is made."""

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

from pydantic import Field

from pivotpatch.errors import InputError, quote
from pivotpatch.runtime.values import GRID, SIDE

NUMBER = 1 << 20
"""Largest whole number among the options of a backbone or head, and in the configuration of another library."""
PEERS = (
    "csra", "ml_gcn", "add_gcn", "ssgrl", "ms_cma", "ida", "c_tran", "kssnet", "cnn_rnn", "rdal", "rarl", "fev_lv",
    "svm",
)  # fmt: skip
"""Heads of other systems, each in the module of `peers` that has its name."""
WORDED = ("ml_gcn", "ssgrl", "kssnet")
"""Those of them that use word vectors."""
HEAD_NAMES = ("linear", "max", "query2label", "ml_decoder", *PEERS)
"""What a model's head may be."""
Side = Annotated[int, Field(ge=1, le=SIDE, strict=True)]
Grid = Annotated[int, Field(ge=1, le=GRID, strict=True)]
Content = TypeVar("Content")


def check_numbers(content: Content, where: str) -> Content:
    """What was read from JSON, refused where a whole number anywhere in it is beyond a limit.

    >>> check_numbers({"depths": [2, 2], "url": "x"}, "here")
    {'depths': [2, 2], 'url': 'x'}
    """
    if isinstance(content, Mapping):
        for name, value in content.items():
            check_numbers(value, f"{where}: {quote(name)}")
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        for value in content:
            check_numbers(value, where)
    elif isinstance(content, int) and not -NUMBER <= content <= NUMBER:
        raise InputError(where, f"{quote(content)} is too large a number", f"give {NUMBER:,} at most")
    return content
