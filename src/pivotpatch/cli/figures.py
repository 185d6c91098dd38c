"""Figures as files, and pictures for them."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from pivotpatch.data.records import RecordSet

_SIDE, _LEAST = 448, 16  # pixels of the longer side of pictures in plots, and the fewest of the shorter one


def write_figures(figures: Mapping[str, "Figure"], folder: Path) -> None:
    """Write figures to a folder as PNG files, each whole or not at all, and say so on stderr.

    Args:
        figures: by the names of their files, to which `.png` is added where they do not end so.
        folder: where to.
    """
    from pivotpatch.writing import explain_disk_faults, replacing

    if not figures:
        print(f"drew nothing to {folder}: there is nothing to show", file=sys.stderr)
    for name, figure in figures.items():
        path = folder / (name if name.lower().endswith(".png") else f"{name}.png")
        with explain_disk_faults(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as written, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)  # it is drawn as a box
                figure.savefig(written, format="png")
        print(f"drew {path}", file=sys.stderr)


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
