"""Progress with the time left, as bars on a terminal."""

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from pivotpatch.cli.telling import write_amount


class ProgressBars(Progress):
    """Bars on stderr, a stage each; a new stage takes the place of the last, unless that is the `outer` one."""

    def __init__(self, unit: str, *, outer: str | None = None) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(None),
            _Amount(unit),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(stderr=True),
        )
        self._outer, self._stages = outer, dict[str, TaskID]()

    def tell(self, stage: str, done: int, total: int | None) -> None:
        """Show how much of a stage is done; what was done when it was first told says nothing of the speed."""
        if stage not in self._stages:
            for other in set(self._stages) - {self._outer}:
                self.remove_task(self._stages.pop(other))
            self._stages[stage] = self.add_task(stage, total=total, note="")
            self.reset(self._stages[stage], completed=done, total=total)
        self.update(self._stages[stage], completed=done, total=total)

    def note(self, stage: str, text: str) -> None:
        """Show a few words beside a stage's bar."""
        if stage in self._stages:
            self.update(self._stages[stage], note=text)


class _Amount(TextColumn):
    def __init__(self, unit: str) -> None:
        super().__init__("")
        self._unit = unit

    def render(self, task: Task) -> Text:
        """How much of how much, and how fast."""
        total = None if task.total is None else int(task.total)
        return Text(write_amount(int(task.completed), total, task.speed or 0.0, self._unit).removeprefix(": "))
