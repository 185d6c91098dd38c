"""Progress with the time left, on stderr; apart from the rest, for one image must not wait for it."""

import os
import time
from datetime import timedelta

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from pivotpatch.cli.telling import tell

QUIET_SECONDS = 30  # between lines where stderr is no terminal
SPEED_SECONDS = 600  # that a speed is the mean of


class StageProgress(Progress):
    """Progress on stderr with the time left, of the first process: a bar for each stage on a terminal, else lines.

    A new stage takes the place of the last, unless that is the `outer` one. Lines tell of each new stage, its end, and
    every half minute.
    """

    def __init__(self, unit: str, *, outer: str | None) -> None:
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
