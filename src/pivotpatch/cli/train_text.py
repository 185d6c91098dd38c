"""What `pivotpatch train` shows: progress with the time left, a result, and the estimate of a dry run."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from pivotpatch.training.build import Progress as TellProgress
from pivotpatch.training.dry_run import DryRun
from pivotpatch.training.loop import FitResult, Report
from pivotpatch.training.processes import join_processes

QUIET_SECONDS = 30  # between lines where stderr is no terminal


class Shown(NamedTuple):
    """Where a run tells of itself."""

    progress: TellProgress
    report: Report


@contextmanager
def show_training() -> Iterator[Shown]:
    """Show a run on stderr: bars on a terminal, else a line now and then; only in the first process."""
    console = Console(stderr=True)
    if not join_processes().is_main_process:
        yield Shown(lambda *_: None, lambda _: None)
    elif console.is_terminal:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
        )
        with Progress(*columns, console=console) as bars:
            yield Shown(*_make_bars(bars))
    else:
        yield Shown(*_make_lines())


def _make_bars(bars: Progress) -> Shown:
    tasks: dict[str, TaskID] = {}

    def progress(what: str, done: int, total: int | None) -> None:
        kept = (what, "train") if what == "validate" else (what,)
        for other in [name for name in tasks if name not in kept]:
            bars.remove_task(tasks.pop(other))
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total, completed=done, numbers="")
            bars.reset(tasks[what], completed=done, total=total)
        bars.update(tasks[what], completed=done, total=total)

    def report(entry: dict[str, Any]) -> None:
        if "train" in tasks and "loss" in entry:
            bars.update(tasks["train"], numbers=_describe(entry, named=False))
        if "loss" not in entry:
            bars.console.print(f"epoch {entry['epoch']}: {_describe(entry)}", markup=False)

    return Shown(progress, report)


def _make_lines() -> Shown:
    told, last, numbers = 0.0, "", ""
    begun: dict[str, tuple[float, int]] = {}  # when a stage was first seen, and how far it was

    def progress(what: str, done: int, total: int | None) -> None:
        nonlocal told, last
        now = time.monotonic()
        if what not in begun or (what != last and what != "train"):  # steps go on where validation broke in
            begun[what] = now, done
        if now - told < QUIET_SECONDS and what == last:
            return
        started, first = begun[what]
        left = ""
        if total and done > first:
            left = f", {timedelta(seconds=round((now - started) / (done - first) * (total - done)))} left"
        print(
            f"{what}: {done} of {total}{left}{numbers if left and what == 'train' else ''}", file=sys.stderr, flush=True
        )
        told, last = now, what

    def report(entry: dict[str, Any]) -> None:
        nonlocal numbers
        if "loss" in entry:
            numbers = f", {_describe(entry)}"
        else:
            print(f"epoch {entry['epoch']}: {_describe(entry)}", file=sys.stderr, flush=True)

    return Shown(progress, report)


def _describe(entry: dict[str, Any], *, named: bool = True) -> str:
    """An entry of the log in a few words; without the names of the loss's parts it fits beside a bar."""
    if "loss" in entry:
        losses = {name.removeprefix("loss_"): f"{value:.3g}" for name, value in entry.items() if "loss_" in name}
        parts = ", ".join(map(" ".join, losses.items())) if named else " + ".join(losses.values())
        loss = f"loss {entry['loss']:.3g}" + (f" ({parts})" if len(losses) > 1 else "")
        return f"{loss}, {entry['pictures_per_second']:.3g} pictures/s"
    values = [f"{name.removeprefix('val_mAP_')} {100 * value:.2f}" for name, value in entry.items() if "mAP" in name]
    return f"validation mAP {', '.join(values)}"


def print_result(result: FitResult, out: Path) -> None:
    """The result of a run as a table."""
    metrics = result.metrics
    console = Console()
    if metrics["best_val_mAP"] is not None:
        best = f"{100 * metrics['best_val_mAP']:.2f} ({metrics['ranking']} logits, step {metrics['best_step']})"
        console.print(f"best validation mAP {best}", markup=False, soft_wrap=True)
    tests: dict[str, Any] = metrics.get("test", {})
    if tests:
        table = Table(title=f"mAP in per cent, {metrics['average_precision']}")
        table.add_column("")
        names = list(next(iter(tests.values())))
        for name in names:
            table.add_column(name, justify="right")
        for address, found in tests.items():
            table.add_row(escape(address), *(f"{100 * found[name]['mean']:.2f}" for name in names))
        console.print(table)
    took = timedelta(seconds=round(metrics["seconds"]))
    place = out / ("best" if metrics["finished"] or metrics["best_val_mAP"] is not None else "last")
    console.print(f"{metrics['steps']} steps in {took}; the network is in {place}", markup=False, soft_wrap=True)


def print_dry_run(tried: DryRun) -> None:
    """The estimate of a run as a table."""
    table = Table(show_header=False, box=None)
    rows = {
        "device": f"{tried.device}, {tried.processes} process{'es' if tried.processes > 1 else ''}",
        "network": f"{tried.weights / 1e6:.1f} million weights, {tried.labels} labels",
        "pictures": f"{tried.pictures:,} to train on, {tried.val_pictures:,} to validate",
        "steps": f"{tried.steps:,}, {tried.seconds_per_step:.3g} s each",
        "validation": f"{tried.seconds_per_validation:.3g} s each time",
        "time": f"about {timedelta(seconds=round(tried.seconds))}, if decoding keeps up",
        "memory": f"{tried.memory_bytes / 1e9:.2f} GB at most",
    }
    if tried.held_bytes:
        rows["held pictures"] = f"{tried.held_bytes / 1e9:.2f} GB besides"
    for name, text in rows.items():
        table.add_row(name, text)
    Console().print(table)
