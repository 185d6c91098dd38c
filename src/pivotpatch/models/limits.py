"""How much a model's files may ask for: refused before anything of that size is made."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from pivotpatch.errors import InputError, quote

if TYPE_CHECKING:
    from pivotpatch.runtime.values import Patching

SIDE = 4096
"""Most rows and columns of an image that a model sees or cuts patches from."""
GRID = 16
"""Most patches per side."""
VIEW_PIXELS = SIDE * SIDE
"""Most pixels of an image and its patches together."""
NUMBER = 1 << 20
"""Largest whole number among the options of a backbone or head, and in the configuration of another library."""
Side = Annotated[int, Field(ge=1, le=SIDE, strict=True)]
Grid = Annotated[int, Field(ge=1, le=GRID, strict=True)]


def check_views(image_size: int, cut: "Patching", *, where: str) -> None:
    """Refuse an image and patches that have more than `VIEW_PIXELS` together.

    Patches count as they are cut or as the model sees them, whichever is larger.
    """
    side = (cut.source_size or image_size) / (cut.grid - (cut.grid - 1) * cut.overlap)
    pixels = image_size**2 + (cut.grid * max(cut.patch_size or image_size, side)) ** 2
    if pixels > VIEW_PIXELS:
        wrong = f"an image and its {cut.grid} x {cut.grid} patches have {pixels / 1e6:,.0f} million pixels"
        todo = f"give a smaller grid, overlap or size, for {VIEW_PIXELS / 1e6:.1f} million at most"
        raise InputError(where, wrong, todo)


def check_numbers(content: object, where: str, *, most: int = NUMBER) -> None:
    """Refuse a whole number beyond a limit, wherever it stands in what was read from JSON.

    >>> check_numbers({"depths": [2, 2], "url": "x"}, "here")
    """
    if isinstance(content, Mapping):
        for name, value in content.items():
            check_numbers(value, f"{where}: {quote(name)}", most=most)
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        for value in content:
            check_numbers(value, where, most=most)
    elif isinstance(content, int) and not -most <= content <= most:
        raise InputError(where, f"{quote(content)} is too large a number", f"give {most:,} at most")
