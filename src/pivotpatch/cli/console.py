"""What verbs print with: plain tables, progress with the time left, lines on stderr, figures as files."""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from pivotpatch.cli.telling import tell as tell
from pivotpatch.cli.telling import write_amount

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pivotpatch.cli.progress_bars import ProgressBars

WIDTH = 80  # columns of what is no terminal
BAR = 24  # columns of a bar that stands for a share of 1
QUIET_SECONDS = 30  # between lines where stderr is no terminal
Tell = Callable[[str, int, int | None], None]
"""Told a stage, how much of it is done, and of how much."""


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


def draw_bar(share: float, *, width: int = BAR) -> str:
    """A bar of eighths of a block, as long as a share of the width; what is above 0 is seen.

    >>> draw_bar(0.5)
    '████████████'
    >>> draw_bar(0.0001)
    '▏'
    """
    eighths = max(round(share * width * 8), int(share > 0))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


class ProgressLines:
    """Lines on stderr, where it is no terminal: one for each new stage, then one every half minute."""

    def __init__(self, unit: str, *, outer: str | None = None) -> None:
        self._unit, self._outer = unit, outer
        self._told, self._stage, self._note = 0.0, "", ""
        self._begun: dict[str, tuple[float, int]] = {}  # when a stage was first seen, and how far it was

    def tell(self, stage: str, done: int, total: int | None) -> None:
        """Print a line where it is time for one."""
        now = time.monotonic()
        if stage not in self._begun or stage not in (self._stage, self._outer):
            self._begun[stage] = now, done
        elif stage == self._stage and now - self._told < QUIET_SECONDS and done != total:
            return
        begun, first = self._begun[stage]
        speed = (done - first) / max(now - begun, 1e-9)
        left = f", {timedelta(seconds=round((total - done) / speed))} left" if speed and total else ""
        note = self._note if stage == self._outer else ""
        tell(f"{stage}{write_amount(done, total, speed, self._unit)}{left}{note}")
        self._told, self._stage = now, stage

    def note(self, _stage: str, text: str) -> None:
        """Keep a few words for the next line of the outer stage."""
        self._note = f", {text}"


@contextmanager
def show_progress(unit: str = "", *, outer: str | None = None) -> "Iterator[ProgressBars | ProgressLines]":
    """Progress on stderr with the time left: bars on a terminal, else a line now and then; in the first process only.

    Args:
        unit: what is counted, for the speed: "images", "bytes"; none is shown where it is empty.
        outer: the stage whose bar stays while others come and go.
    """
    if Console(stderr=True).is_terminal and os.environ.get("RANK", "0") == "0":
        from pivotpatch.cli.progress_bars import ProgressBars

        with ProgressBars(unit, outer=outer) as bars:
            yield bars
    else:
        yield ProgressLines(unit, outer=outer)


def write_figures(figures: Mapping[str, "Figure"], folder: Path, *, overwrite: bool = True) -> None:
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
    paths = {
        folder / (name if name.lower().endswith((".png", ".svg")) else f"{name}.png"): figures[name] for name in figures
    }
    old = [str(path) for path in paths if path.exists()]
    if old and not overwrite:
        raise InputError(old[0], "is there already", "give --overwrite, or another folder")
    for path, figure in paths.items():
        with explain_disk_faults(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as written, warnings.catch_warnings():
                # A script that the font lacks is drawn as boxes, which the reader sees.
                warnings.filterwarnings(
                    "ignore", "Glyph .* missing from|Matplotlib currently does not support", UserWarning
                )
                figure.savefig(written, format=path.suffix[1:].lower())
        tell(f"drew {path}")
