"""What verbs print with: plain tables, progress with the time left, lines on stderr, figures as files."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pivotpatch.cli.telling import tell as tell

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

    from pivotpatch.cli.progress_bars import StageProgress

WIDTH = 80  # columns of what is no terminal


class Screen(Console):
    """Stdout, with labels and file names printed as they are; `main` handles a reader who went away."""

    def __init__(self) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, soft_wrap=True)
        if not self.is_terminal:
            self.width = WIDTH

    def on_broken_pipe(self) -> None:
        """Raise, where rich would exit."""
        raise BrokenPipeError


def make_table(headings: list[str]) -> Table:
    """A plain table, names to the left and numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, heading in enumerate(headings):  # where it gets narrow, names give way, numbers do not
        table.add_column(heading, justify="right" if place else "left", no_wrap=place > 0)
    return table


def draw_bar(share: float, *, width: int) -> str:
    """A bar of eighths of a block, as long as a share of the width; what is above 0 is seen.

    >>> draw_bar(0.5, width=24)
    '████████████'
    >>> draw_bar(0.0001, width=24)
    '▏'
    """
    eighths = max(round(share * width * 8), int(share > 0))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def show_progress(unit: str = "", *, outer: str | None = None) -> "StageProgress":
    """Progress to be entered, then told of.

    Args:
        unit: what is counted, for the speed: "images", "bytes"; none is shown where it is empty.
        outer: the stage whose bar stays while others come and go.
    """
    from pivotpatch.cli.progress_bars import StageProgress

    return StageProgress(unit, outer=outer)


def write_figures(figures: "Mapping[str, Figure | Image]", folder: Path, *, overwrite: bool = True) -> None:
    """Write figures to a folder as PNG or SVG files, each whole or not at all, and say so on stderr.

    Args:
        figures: by the names of their files, to which `.png` is added where they end in neither `.png` nor `.svg`.
        folder: where to.
        overwrite: replace files that are there; else one is an error before any is written.
    """
    from pivotpatch.errors import InputError
    from pivotpatch.writing import explain_disk_faults, replacing

    if not figures:
        tell(f"drew nothing to {folder}: there is nothing to show")
    paths = [folder / (name if name.lower().endswith((".png", ".svg")) else f"{name}.png") for name in figures]
    old = [str(path) for path in paths if path.exists()]
    if old and not overwrite:
        raise InputError(old[0], "is there already", "give --overwrite, or another folder")
    for path, figure in zip(paths, figures.values(), strict=True):
        with explain_disk_faults(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as written, warnings.catch_warnings():
                # A script that the font lacks is drawn as boxes, which the reader sees.
                warnings.filterwarnings(
                    "ignore", "Glyph .* missing from|Matplotlib currently does not support", UserWarning
                )
                drawn: Any = figure
                save = drawn.savefig if hasattr(drawn, "savefig") else drawn.save  # matplotlib's, or Pillow's
                save(written, format=path.suffix[1:].lower())
        tell(f"drew {path}")
