"""Figures as files."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_figures(figures: Mapping[str, "Figure"], folder: Path) -> None:
    """Write figures to a folder as PNG files, each whole or not at all, and say so on stderr."""
    from pivotpatch.core.writing import explain_disk_faults, replacing

    for name, figure in figures.items():
        path = folder / f"{name}.png"
        with explain_disk_faults(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as written:
                figure.savefig(written, format="png")
        print(f"drew {path}", file=sys.stderr)
