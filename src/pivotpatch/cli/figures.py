"""Figures as files, and pictures for them."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.core.errors import shorten

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from pivotpatch.data.records import RecordSet

_SIDE, _LEAST = 448, 16  # pixels of the longer side of pictures in plots, and the fewest of the shorter one
_PLACEHOLDERS = "Last Resort"  # begins the name of a font that has a box for every sign


def write_figures(figures: Mapping[str, "Figure"], folder: Path) -> None:
    """Write figures to a folder as PNG files, each whole or not at all, and say so on stderr."""
    from pivotpatch.core.writing import explain_disk_faults, replacing

    if not figures:
        print(f"drew nothing to {folder}: there is nothing to show", file=sys.stderr)
    lacking: set[str] = set()
    for name, figure in figures.items():
        lacking |= _choose_fonts(figure)
        path = folder / f"{name}.png"
        with explain_disk_faults(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as written, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)  # told below, once
                figure.savefig(written, format="png")
        print(f"drew {path}", file=sys.stderr)
    if lacking:
        wrong = f"no font on this machine has {len(lacking)} of the signs ({shorten(sorted(lacking))})"
        print(f"{wrong}; they are drawn as boxes, install one such as Noto Sans CJK", file=sys.stderr)


def _choose_fonts(figure: "Figure") -> set[str]:
    """Let texts fall back on installed fonts that have the signs which the usual one lacks; those that none has."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
    from matplotlib.text import Text

    texts = figure.findobj(Text)
    signs = {sign for text in texts for sign in text.get_text() if sign.isprintable()}
    usual = get_font(findfont(FontProperties())).get_charmap()
    lacking = {sign for sign in signs if ord(sign) not in usual}
    families = []
    for font in fontManager.ttflist:
        if not lacking:
            break
        if font.name.startswith(_PLACEHOLDERS):
            continue
        held = get_font(font.fname).get_charmap()
        had = {sign for sign in lacking if ord(sign) in held}
        if had:
            families.append(font.name)
            lacking -= had
    if families:
        for text in texts:
            text.set_fontfamily([*text.get_fontfamily(), *families])
    return lacking


def decode_small(records: "RecordSet", indices: Sequence[int]) -> list["NDArray[np.uint8]"]:
    """Pixels (H,W,3) of the records that `indices` names, in their own shape and small enough for a plot."""
    import numpy as np
    from PIL import Image

    from pivotpatch.data.decoding import decode_image

    found = []
    for place in map(records.place, indices):
        pixels = decode_image(records.images.source(place), name=records.images.name(place))
        height, width = (max(round(_SIDE * side / max(pixels.shape[:2])), _LEAST) for side in pixels.shape[:2])
        found.append(np.asarray(Image.fromarray(pixels).resize((width, height))))
    return found
