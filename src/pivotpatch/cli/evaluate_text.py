"""What `pivotpatch evaluate` prints for people, and its table of labels."""

import csv
from pathlib import Path

from rich.table import Table

from pivotpatch.audit.evaluation import Difference, Evaluation, KindEvaluation
from pivotpatch.cli.console import Screen
from pivotpatch.core.bootstrap import Interval
from pivotpatch.core.metrics import DEFINITIONS, PrecisionRecall
from pivotpatch.errors import shorten
from pivotpatch.writing import explain_disk_faults, replacing

NAMES = {"image": "image", "patch": "patches", "tde": "TDE"}
MEASURES = ("CP", "CR", "CF1", "OP", "OR", "OF1")


def print_evaluation(found: Evaluation, *, not_read: int, per_label: bool) -> None:
    """Print an evaluation to stdout, in per cent."""
    console = Screen()
    console.print(f"{found.pictures:,} pictures, {len(found.labels)} labels" + _tell_not_read(not_read))
    console.print(f"average precision: {DEFINITIONS[found.definition]}{_tell_intervals(found)}; all in per cent\n")
    table = make_table(["", *(NAMES[kind] for kind in found.kinds)])
    each = list(found.kinds.values())
    table.add_row("mAP", *(f"{100 * kind.precision.mean:.2f}" for kind in each))
    if found.resamples:
        table.add_row("", *(write_bounds(kind.interval) for kind in each))
    for title, results in (("", [kind.decided for kind in each]), ("top", [kind.top for kind in each])):
        told = next((result.definition for result in results if result is not None), None)
        if told is None or (title and told in {kind.decided.definition for kind in each if kind.decided}):
            continue
        table.add_section()
        table.add_row(told)
        for name in MEASURES:
            table.add_row(f"  {name}", *(_write_measure(result, name) for result in results))
    console.print(table)
    for difference in (found.gain, found.difference):
        if difference is not None:
            console.print(_tell_difference(difference))
    skipped = found.kinds[found.ranking].precision.skipped
    if skipped:
        console.print(f"without a positive picture and skipped: {len(skipped)} labels ({shorten(skipped, limit=5)})")
    if per_label:
        console.print()
        console.print(_make_label_table(found))


def _tell_not_read(count: int) -> str:
    return f"; {count:,} pictures could not be read and are left out" if count else ""


def _tell_intervals(found: Evaluation) -> str:
    return f"; intervals hold 95 % of {found.resamples:,} resamples of the pictures" if found.resamples else ""


def make_table(headings: list[str]) -> Table:
    """A plain table, names to the left and numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, heading in enumerate(headings):  # where it gets narrow, names give way, numbers do not
        table.add_column(heading, justify="right" if place else "left", no_wrap=place > 0)
    return table


def write_bounds(interval: Interval | None, *, sign: str = "") -> str:
    """Both ends of an interval in per cent; nothing for none."""
    return "" if interval is None else f"{100 * interval.low:{sign}.2f} to {100 * interval.high:{sign}.2f}"


def _write_measure(result: PrecisionRecall | None, name: str) -> str:
    return "-" if result is None else f"{100 * getattr(result, name):.1f}"


def _tell_difference(difference: Difference) -> str:
    names = [" ".join(NAMES.get(word, word) for word in name.split()) for name in (difference.of, difference.minus)]
    bounds = f" ({write_bounds(difference.interval, sign='+')})" if difference.interval is not None else ""
    known = [value for value in difference.per_label if value is not None]
    better = sum(value > 0 for value in known)
    return (
        f"{names[0]} less {names[1]}: {100 * difference.value:+.2f}{bounds}, better for {better} of {len(known)} labels"
    )


def _make_label_table(found: Evaluation) -> Table:
    headings = ["label", "positives"]
    for kind in found.kinds:
        headings += [f"AP {NAMES[kind]}", *(["95 %"] if found.resamples and kind == found.ranking else [])]
    table = make_table(headings)
    positives = found.kinds[found.ranking].precision.positives
    for place, label in enumerate(found.labels):
        row = [label, f"{positives[place]:,}"]
        for name, each in found.kinds.items():
            value = each.precision.per_label[place]
            row.append("-" if value is None else f"{100 * value:.1f}")
            if found.resamples and name == found.ranking:
                row.append(_write_label_bounds(each, place))
        table.add_row(*row)
    return table


def _write_label_bounds(kind: KindEvaluation, place: int) -> str:
    interval = None if kind.label_intervals is None else kind.label_intervals[place]
    return "" if interval is None else f"{100 * interval.low:.1f} to {100 * interval.high:.1f}"


def write_label_table(found: Evaluation, path: Path) -> None:
    """Write a CSV file with a row a label, in fractions; what is not known is left empty."""
    rows = []
    for place, label in enumerate(found.labels):
        row: dict[str, object] = {"label": label, "positives": found.kinds[found.ranking].precision.positives[place]}
        for name, kind in found.kinds.items():
            row[f"ap_{name}"] = kind.precision.per_label[place]
            row |= _list_bounds(f"ap_{name}", kind.label_intervals, place)
            if kind.decided is not None:
                row[f"precision_{name}"] = kind.decided.precision[place]
                row[f"recall_{name}"] = kind.decided.recall[place]
        if found.difference is not None:
            row["difference"] = found.difference.per_label[place]
            row |= _list_bounds("difference", found.difference.label_intervals, place)
        rows.append(row)
    with (
        explain_disk_faults(path.parent),
        replacing(path) as written,
        written.open("w", encoding="utf-8", newline="") as file,
    ):
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def _list_bounds(name: str, intervals: tuple[Interval | None, ...] | None, place: int) -> dict[str, object]:
    if intervals is None:
        return {}
    interval = intervals[place]
    return {f"{name}_low": interval and interval.low, f"{name}_high": interval and interval.high}
