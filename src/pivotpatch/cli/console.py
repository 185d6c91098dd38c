"""What verbs print with: plain tables, progress with the time left, lines on stderr, figures as files."""

import os
import time
import warnings
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pivotpatch.cli.telling import tell as tell
from pivotpatch.errors import InputError
from pivotpatch.writing import explain_disk_faults, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

WIDTH = 80  # columns of what is no terminal
QUIET_SECONDS = 30  # between lines where stderr is no terminal
SPEED_SECONDS = 600  # that a speed is the mean of


class Screen(Console):
    """Stdout, with labels and file names printed as they are; `main` handles a reader who went away."""

    def __init__(self) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, soft_wrap=True)
        if not self.is_terminal:
            self.width = WIDTH

    def on_broken_pipe(self) -> None:
        """Raise, where rich would exit."""
        raise BrokenPipeError


def make_table(headings: list[str], rows: Iterable[Iterable[str]] = ()) -> Table:
    """A plain table, names to the left and numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, heading in enumerate(headings):  # where it gets narrow, names give way, numbers do not
        table.add_column(heading, justify="right" if place else "left", no_wrap=place > 0)
    for row in rows:
        table.add_row(*row)
    return table


def write_percent(value: float | None, *, few: bool = False) -> str:
    """A share in per cent, with a star where `few` images tell it; a dash where none does."""
    return "-" if value is None or value != value else f"{100 * value:.1f}{'*' if few else ''}"


def draw_bar(share: float, *, width: int) -> str:
    """A bar of eighths of a block, as long as a share of the width; what is above 0 is seen.

    >>> draw_bar(0.5, width=24)
    '████████████'
    >>> draw_bar(0.0001, width=24)
    '▏'
    """
    eighths = max(round(share * width * 8), int(share > 0))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def write_figures(figures: "Mapping[str, Figure | Image]", folder: Path, *, overwrite: bool = True) -> None:
    """Write figures to a folder as PNG or SVG files, by name, each whole or not at all, and say so on stderr.

    A name that says neither is that of a PNG file. Without `overwrite` a file that is there is an error before any is
    written.
    """
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
                save = figure.savefig if hasattr(figure, "savefig") else figure.save  # matplotlib's, or Pillow's
                save(written, format=path.suffix[1:].lower())
        tell(f"drew {path}")


class StageProgress(Progress):
    """Progress on stderr with the time left, of the first process: a bar for each stage on a terminal, else lines.

    A new stage takes the place of the last, unless that is the `outer` one. Lines tell of each new stage, its end, and
    every half minute. `unit` is what is counted, for the speed: "images", "bytes"; none is shown where it is empty.
    """

    def __init__(self, unit: str = "", *, outer: str | None = None) -> None:
        console = Console(stderr=True)
        self._amount = _Amount(unit)
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(None),
            self._amount,
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not console.is_terminal or os.environ.get("RANK", "0") != "0",
            speed_estimate_period=SPEED_SECONDS,
        )
        self._outer, self._stage, self._note, self._told = outer, "", "", 0.0

    def tell(self, stage: str, done: int, total: int | None) -> None:
        """Show how much of a stage is done; what was done when it was first told says nothing of the speed."""
        places = {task.description: task.id for task in self.tasks}
        another = stage != self._stage
        if another:
            self._stage = stage
            for other in places.keys() - {stage, self._outer}:
                self.remove_task(places[other])
        if stage not in places:
            places[stage] = self.add_task(stage, completed=done, total=total, note="")
        self.update(places[stage], completed=done, total=total, note=self._note if stage == self._outer else "")
        now = time.monotonic()
        if self.disable and (another or done == total or now - self._told > QUIET_SECONDS):
            self._told = now
            task = next(task for task in self.tasks if task.description == stage)
            left = "" if not task.time_remaining else f"{timedelta(seconds=round(task.time_remaining))} left"
            parts = (self._amount.render(task).plain, left, task.fields["note"])
            tell(f"{stage}: {', '.join(part for part in parts if part)}")

    def note(self, text: str) -> None:
        """Show a few words beside the outer stage when it is told of next."""
        self._note = text


class _Amount(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        """How much of how much, and how fast."""
        show = decimal if self._unit == "bytes" else "{:,}".format
        of = "" if task.total is None else f" of {show(int(task.total))}"
        speed = decimal(int(task.speed or 0)) if self._unit == "bytes" else f"{task.speed or 0:.3g} {self._unit}"
        return Text(f"{show(int(task.completed))}{of}" + (f", {speed}/s" if task.speed and self._unit else ""))
