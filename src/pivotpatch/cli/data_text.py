"""What `pivotpatch data check` prints for people, 80 columns wide."""

from collections.abc import Sequence

import numpy as np
from rich.console import Console, JustifyMethod
from rich.table import Table

from pivotpatch.data.check import DataReport, DataSummary
from pivotpatch.errors import cut, shorten

_WIDTH, BAR = 80, 24
_MOST_FREQUENT, _RAREST, _ALL = 15, 5, 24
_LISTED = 5
_COMPANY, _LEAST_EVIDENCE = 5, 10

_DEPTHS = {
    "labels": "not opened",
    "headers": "headers read, pixels not decoded (--decode does)",
    "pixels": "decoded to the last pixel",
}


class Screen(Console):
    """Leaves a reader who went away to `main`, as all other verbs do."""

    def on_broken_pipe(self) -> None:
        """Raise, where rich would exit."""
        raise BrokenPipeError


def print_report(report: DataReport) -> None:
    """Print what data sets hold to stdout."""
    # Labels and file names are printed as they are: what looks like markup in them is not.
    console = Screen(width=_WIDTH, markup=False, highlight=False, emoji=False)
    for summary in report.summaries:
        _print_summary(console, summary)
    if len(report.summaries) > 1 and any(summary.checked != "labels" for summary in report.summaries):
        console.print("between the data sets", style="bold")
        for line in _tell_shared(report):
            console.print(f"  {line}", soft_wrap=True)


def _print_summary(console: Console, summary: DataSummary) -> None:
    console.print(summary.address, style="bold", soft_wrap=True)
    console.print(
        f"  {summary.num_records:,} pictures, {len(summary.labels)} labels,"
        f" {summary.labels_per_picture:.2f} labels a picture"
    )
    if summary.unknown_share:
        console.print(f"  {summary.unknown_share:.1%} of the labels are unknown")
    console.print()
    _print_histogram(console, summary)
    _print_labels(console, summary)
    _print_company(console, summary)
    if summary.never:
        console.print(f"  never seen: {len(summary.never)} labels: {shorten(summary.never, limit=5)}\n")
    for line in _tell_pictures(summary):
        console.print(f"  {line}", soft_wrap=True)
    console.print()


def _table(*headings: str) -> Table:
    """A table without lines; counts and shares stand at the right of their columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in headings:
        justify: JustifyMethod = "right" if heading in ("pictures", "share") else "left"
        table.add_column(heading, justify=justify, overflow="ellipsis", no_wrap=True)
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


def _print_histogram(console: Console, summary: DataSummary) -> None:
    rows = bin_histogram(summary.histogram)
    table, highest = _table("  labels a picture", "pictures", ""), max(count for _, count in rows)
    for name, count in rows:
        table.add_row(f"  {name}", f"{count:,}", draw_bar(count / highest))
    console.print(table)
    console.print()


def bin_histogram(histogram: Sequence[int], *, most: int = 16) -> list[tuple[str, int]]:
    """At most `most` rows of a histogram, by putting neighbours together.

    >>> bin_histogram([1, 2, 3, 4, 5], most=3)
    [('0-1', 3), ('2-3', 7), ('4', 5)]
    """
    step = -(-len(histogram) // most)
    rows = []
    for start in range(0, len(histogram), step):
        end = min(start + step, len(histogram)) - 1
        rows.append((str(start) if start == end else f"{start}-{end}", sum(histogram[start : end + 1])))
    return rows


def _print_labels(console: Console, summary: DataSummary) -> None:
    order = np.argsort(-summary.label_counts, kind="stable").tolist()
    table = _table("  label", "pictures", "share", "")
    hidden = len(order) - _MOST_FREQUENT - _RAREST if len(order) > _ALL else 0
    for rank, label in enumerate(order):
        if hidden and rank == _MOST_FREQUENT:
            table.add_row(f"  ... {hidden} more ...", "", "", "")
        if not hidden or rank < _MOST_FREQUENT or rank >= len(order) - _RAREST:
            count = int(summary.label_counts[label])
            share = count / summary.num_records
            table.add_row(f"  {summary.labels[label]}", f"{count:,}", f"{share:.1%}", draw_bar(share))
    console.print(table)
    console.print()


def _print_company(console: Console, summary: DataSummary) -> None:
    """The pairs of labels of which one nearly always brings the other."""
    shares = np.nan_to_num(summary.cooccurrence * (1 - np.eye(len(summary.labels))))
    shares[summary.label_counts < _LEAST_EVIDENCE] = 0
    table = _table("  where this label is", "this one is too", "share", "")
    for place in np.argsort(-shares, axis=None, kind="stable")[:_COMPANY].tolist():
        row, column = divmod(place, len(summary.labels))
        if shares[row, column] > 0:
            share = float(shares[row, column])
            table.add_row(f"  {summary.labels[row]}", summary.labels[column], f"{share:.1%}", draw_bar(share))
    if table.row_count:
        console.print(table)
        console.print()


def _tell_pictures(summary: DataSummary) -> list[str]:
    if summary.pictures == "drawn":
        return ["pictures: drawn when asked for, so none can be missing"]
    kind = "files" if summary.pictures == "files" else "inside the table"
    lines = [f"pictures: {kind}, {_DEPTHS[summary.checked]}"]
    if summary.checked != "labels":
        lines += _list_some("missing", summary.missing)
        lines += _list_some("broken", [f"{picture.name}: {picture.why}" for picture in summary.broken])
        lines += _list_some("doubled", [" = ".join(group) for group in summary.duplicates])
    return lines


def _tell_shared(report: DataReport) -> list[str]:
    groups = [" = ".join(f"{picture.name} in {picture.address}" for picture in group) for group in report.shared]
    return _list_some("in more than one data set", groups)


def _list_some(what: str, items: Sequence[str]) -> list[str]:
    """A count, and the first few of what is counted."""
    more = [f"  and {len(items) - _LISTED:,} more (--json lists all)"] if len(items) > _LISTED else []
    return [f"{what}: {len(items):,}", *(f"  {cut(item, 300)}" for item in items[:_LISTED]), *more]
