"""`pivotpatch data`: prepare a published data set, split one, or check what one holds."""

import argparse
import json
import shlex
from collections.abc import Sequence

import numpy as np

from pivotpatch.cli.console import Screen, StageProgress, make_table, tell, write_figures
from pivotpatch.data.address import open_records
from pivotpatch.data.check import DataReport, DataSummary, Depth, check_data, plot_overview
from pivotpatch.data.prepare import PLANS, prepare
from pivotpatch.data.split import split_records, write_split
from pivotpatch.errors import InputError, cut, shorten

_DEPTHS = {
    "labels": "not opened",
    "headers": "headers read, pixels not decoded (--decode does)",
    "pixels": "all decoded",
}
_SHOWN = 5  # of a list of images or pairs


def run_prepare(args: argparse.Namespace) -> int:
    """Make a published data set ready."""
    with StageProgress("bytes") as progress:
        counts = prepare(PLANS[args.dataset], args.root, base_url=args.base_url, progress=progress.tell)
    for address, count in counts.items():
        print(f"{address}  {count:,} records")
    if (args.root / "downloads").exists():
        tell(f"{args.dataset} is complete; {args.root / 'downloads'} may be deleted")
    return 0


def run_split(args: argparse.Namespace) -> int:
    """Split a data set and print where its parts are."""
    fractions = dict(args.parts)
    if len(fractions) < len(args.parts) or args.seed < 0:
        raise InputError("split", "two parts have the same name, or the seed is negative", "change it")
    records = open_records(args.address)
    parts = split_records(records, fractions, generator=np.random.default_rng(args.seed))
    addresses = write_split(records, parts, folder=args.out)
    for name, indices in parts.items():
        shown = np.count_nonzero(records.select(indices).count_labels())
        address = shlex.quote(addresses[name])  # made to be pasted
        print(f"{address}  {len(indices):,} images, {shown} of {len(records.labels)} labels")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Summarise data sets; missing or broken images are an error, after all has been told."""
    sets = [open_records(address) for address in args.addresses]
    with StageProgress("images") as progress:
        depth: Depth = "labels" if args.fast else "pixels" if args.decode else "headers"
        report = check_data(sets, depth=depth, progress=progress.tell)
    if args.json:
        print(json.dumps(report.to_dict()))
    else:
        _print_report(report)
    if args.plot:  # a number tells the files of several apart
        names = [f"{args.plot.stem}-{place}{args.plot.suffix}" for place in range(1, len(sets) + 1)]
        names = names if len(sets) > 1 else [args.plot.name]
        write_figures(dict(zip(names, map(plot_overview, report.summaries), strict=True)), args.plot.parent)
    for summary in report.summaries:
        found = {"missing": summary.missing, "broken": [image.name for image in summary.broken]}
        faults = [f"{len(names):,} {what} (such as {names[0]})" for what, names in found.items() if names]
        if faults:
            wrong = f"of {summary.num_records:,} images, {' and '.join(faults)}"
            raise InputError(summary.address, wrong, "restore them or leave them out")
    return 0


def _print_report(report: DataReport) -> None:
    screen = Screen()
    for summary in report.summaries:
        _print_summary(screen, summary)
    if len(report.summaries) > 1 and any(summary.checked != "labels" for summary in report.summaries):
        groups = [" = ".join(f"{image.name} in {image.address}" for image in group) for group in report.shared]
        screen.print("between the data sets", style="bold")
        _print_some(screen, "in more than one data set", groups)


def _print_summary(screen: Screen, summary: DataSummary) -> None:
    screen.print(summary.address, style="bold")
    each = f"{summary.labels_per_image:.2f} labels per image"
    screen.print(f"  {summary.num_records:,} images, {len(summary.labels)} labels, {each}")
    if summary.unknown_share:
        screen.print(f"  {summary.unknown_share:.1%} of the labels are unknown")
    pairs = _list_pairs(summary)
    screen.print("", make_table(["  label", "images", "share"], _list_labels(summary)), sep="\n")
    if pairs:
        screen.print("", make_table(["  where this label is, this one is too", "share"], pairs), sep="\n")
    if summary.never:
        screen.print(f"\n  never seen: {len(summary.never)} labels: {shorten(summary.never, limit=5)}")
    for note in summary.notes:
        screen.print(f"\n  {note}")
    if summary.pictures == "drawn":
        screen.print("\n  images: drawn when asked for, so none can be missing")
    else:
        place = "files" if summary.pictures == "files" else "inside the table"
        screen.print(f"\n  images: {place}, {_DEPTHS[summary.checked]}")
    if summary.checked != "labels":
        _print_some(screen, "missing", summary.missing)
        _print_some(screen, "broken", [f"{image.name}: {image.why}" for image in summary.broken])
        _print_some(screen, "doubled", [" = ".join(group) for group in summary.duplicates])
    screen.print()


def _print_some(screen: Screen, what: str, items: Sequence[str]) -> None:
    """A count, and the first few of what is counted."""
    more = [f"and {len(items) - _SHOWN:,} more (--json lists all)"] if len(items) > _SHOWN else []
    screen.print(f"  {what}: {len(items):,}", *(f"    {cut(item, 300)}" for item in [*items[:_SHOWN], *more]), sep="\n")


def _list_labels(summary: DataSummary, *, first: int = 15, last: int = 5) -> list[list[str]]:
    """How many images show each label; of more labels than fit, the most frequent and the rarest."""
    counts = sorted(zip(summary.labels, summary.label_counts.tolist(), strict=True), key=lambda each: -each[1])
    rows = [[f"  {label}", f"{count:,}", f"{count / summary.num_records:.1%}"] for label, count in counts]
    if len(rows) > first + last + 4:
        rows[first:-last] = [[f"  ... {len(rows) - first - last} more ...", "", ""]]
    return rows


def _list_pairs(summary: DataSummary, *, evidence: int = 10) -> list[list[str]]:
    """The pairs of labels of which one most often brings the other, with `evidence` images or more."""
    names, counts, shares = summary.labels, summary.label_counts, summary.cooccurrence
    pairs = [(a, b) for a, b in zip(*(shares > 0).nonzero(), strict=True) if a != b and counts[a] >= evidence]
    best = sorted(pairs, key=lambda pair: -shares[pair])[:_SHOWN]
    return [[f"  {names[a]}, {names[b]}", f"{shares[a, b]:.1%}"] for a, b in best]
