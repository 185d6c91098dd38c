"""What `pivotpatch predict` shows: a table for a picture, a line where there are many, progress with the time left."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from pivotpatch.cli.console import BAR, Screen, draw_bar
from pivotpatch.core.patches import PatchBox
from pivotpatch.inference.prediction import Prediction, Tag

QUIET_SECONDS = 30  # between lines where stderr is no terminal
_WIDTH = 80  # where stdout is no terminal
_LABEL = 6  # cells of a label in that width, beside a bar in full
_LEAST = 56  # below which a table has no place for labels
Tell = Callable[[str, int, int | None], None]


def print_table(prediction: Prediction, tags: Sequence[Tag], *, threshold: float | None = None) -> None:
    """A picture's tags as a table; one that is not above its threshold, or above one for all, is in brackets."""
    console = _open_console()
    rows, columns = prediction.size
    console.print(f"{prediction.picture} ({columns} x {rows} pixels)", style="bold", soft_wrap=True)
    if not tags:
        best = prediction.top(1)[0]
        limit = best.threshold if threshold is None else threshold
        told = f"no tag; the most probable is {best.label} with {best.prob:.2f}, given above {limit:.3g}"
        console.print(f"  {told}\n", soft_wrap=True)
        return
    patched, roomy = prediction.weights is not None, console.width >= _WIDTH  # else there is no place for bars
    names = [_write_label(tag, threshold) for tag in tags]
    longest = max(map(cell_len, names))
    bar = BAR - min(max(longest - _LABEL, 0), BAR // 2)  # labels are folded only when the bar has given half
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("tag", min_width=10, overflow="fold")  # the only one that may be folded: numbers stay whole
    table.add_column("both (TDE)" if patched else "probability", justify="right", no_wrap=True)
    if roomy:
        table.add_column("", no_wrap=True)
    for heading in ("image", "patches") if patched else ():
        table.add_column(heading, justify="right", no_wrap=True)
    if patched:
        table.add_column("pivot patch", no_wrap=True)
    for tag, name in zip(tags, names, strict=True):
        cells = [name, f"{tag.prob:.2f}", *([draw_bar(tag.prob, width=bar)] if roomy else [])]
        if tag.patch_prob is not None and tag.box is not None:
            pivot = f"{place_in_words(tag.box, prediction.size)} {max(tag.weights or ()):.0%}"
            cells += [f"{tag.image_prob:.2f}", f"{tag.patch_prob:.2f}", pivot]
        table.add_row(*cells, style="" if name == tag.label else "dim")
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    console.print()


def _write_label(tag: Tag, threshold: float | None) -> str:
    """A label, in brackets where it is not given."""
    given = tag.prob > (tag.threshold if threshold is None else threshold)
    return tag.label if given else f"({tag.label})"


def print_row(prediction: Prediction, tags: Sequence[Tag], *, threshold: float | None = None) -> None:
    """A picture's tags in a line; brackets as in `print_table`."""
    told = ", ".join(f"{_write_label(tag, threshold)} {tag.prob:.2f}" for tag in tags) or "no tag"
    _open_console().print(f"{prediction.picture}: {told}", soft_wrap=True)


def _open_console() -> Screen:
    # Labels and file names are printed as they are: what looks like markup in them is not.
    console = Screen()
    console.width = max(console.width, _LEAST) if console.is_terminal else _WIDTH
    return console


def place_in_words(box: PatchBox, size: tuple[int, int]) -> str:
    """Where a patch lies in a picture of some rows and columns.

    >>> place_in_words(PatchBox(left=50, top=0, right=100, bottom=40), (80, 100))
    'top right'
    >>> place_in_words(PatchBox(left=0, top=0, right=100, bottom=80), (80, 100))
    'centre'
    """
    down, across = (box.top + box.bottom) / 2 / size[0], (box.left + box.right) / 2 / size[1]
    row = "top" if down < 0.4 else "bottom" if down > 0.6 else "middle"
    column = "left" if across < 0.4 else "right" if across > 0.6 else "centre"
    return "centre" if (row, column) == ("middle", "centre") else f"{row} {column}"


class _SpeedColumn(ProgressColumn):
    """Pictures a second."""

    def render(self, task: Task) -> Text:
        """The speed of late."""
        return Text("" if task.speed is None else f"{task.speed:.3g} pictures/s")


@contextmanager
def show_tagging(*, quiet: bool) -> Iterator[Tell | None]:
    """Progress on stderr with the time left: a bar on a terminal, else a line now and then; nothing where quiet."""
    console = Console(stderr=True)
    if quiet:
        yield None
    elif console.is_terminal:
        columns = (BarColumn(None), MofNCompleteColumn(), _SpeedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("{task.description}"), *columns, console=console) as bars:
            yield _make_bar(bars)
    else:
        yield _make_lines()


def _make_bar(bars: Progress) -> Tell:
    tasks: dict[str, TaskID] = {}

    def tell(what: str, done: int, total: int | None) -> None:
        if what not in tasks:
            for other in tasks.values():
                bars.remove_task(other)
            tasks.clear()
            tasks[what] = bars.add_task(what, total=total)
            bars.reset(tasks[what], completed=done, total=total)  # what was done before says nothing of the speed
        bars.update(tasks[what], completed=done)

    return tell


def _make_lines() -> Tell:
    told, last, begun, first = 0.0, "", 0.0, 0

    def tell(what: str, done: int, total: int | None) -> None:
        nonlocal told, last, begun, first
        now = time.monotonic()
        if what != last:
            last, begun, first = what, now, done
        elif now - told < QUIET_SECONDS and done != total:
            return
        told, speed, line = now, (done - first) / max(now - begun, 1e-9), f"{what}: {done:,}"
        if total is not None:
            left = f", {speed:.3g} pictures/s, {timedelta(seconds=round((total - done) / speed))} left" if speed else ""
            line = f"{line} of {total:,}{left}"
        print(line, file=sys.stderr, flush=True)

    return tell
