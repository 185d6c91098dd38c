"""`pivotpatch data`: prepare a published data set, split one, or check what one holds."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.errors import InputError, cut, shorten

if TYPE_CHECKING:
    from pivotpatch.cli.console import Screen
    from pivotpatch.data.check import DataReport, DataSummary

ADDRESS_HELP = "a table, a folder of images, or an address such as coco:/data/coco@train2014 or scenes:@train"
_DEPTHS = {
    "labels": "not opened",
    "headers": "headers read, pixels not decoded (--decode does)",
    "pixels": "all decoded",
}
_SHOWN = 5  # of a list of images or pairs


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb and its three actions."""
    data = verbs.add_parser("data", help="prepare, split or check a data set")
    actions = data.add_subparsers(title="actions", required=True, metavar="ACTION")

    does = "Download a data set, unpack it and count it. Run it again after a break: it goes on where it was."
    prepare = actions.add_parser("prepare", help="download, unpack and count a published data set", description=does)
    prepare.add_argument("dataset", choices=["coco", "voc2007", "vg256"], help="which one")
    prepare.add_argument("--root", type=Path, required=True, metavar="DIR", help="folder to put it in")
    prepare.add_argument("--base-url", metavar="URL", help="a mirror that holds the archives in one folder")
    prepare.set_defaults(run=run_prepare)

    does = "Split a data set so that each part has its share of each label, and write the split as a table."
    split = actions.add_parser("split", help="split a data set, every label in its share", description=does)
    split.add_argument("address", help=ADDRESS_HELP)
    split.add_argument(
        "--parts",
        type=_read_part,
        nargs="+",
        default=[("train", 0.8), ("val", 0.1), ("test", 0.1)],
        metavar="NAME=FRACTION",
        help="the parts and their shares, together 1 (default: train=0.8 val=0.1 test=0.1)",
    )
    split.add_argument("--seed", type=int, default=1, help="the same seed gives the same split (default: 1)")
    split.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write the table to")
    split.set_defaults(run=run_split)

    does = "Count images and labels, and find missing, broken and doubled images, also between data sets."
    check = actions.add_parser("check", help="tell what data sets hold and what is wrong with them", description=does)
    check.add_argument("addresses", nargs="+", metavar="ADDRESS", help=ADDRESS_HELP)
    depth = check.add_mutually_exclusive_group()
    depth.add_argument("--fast", action="store_true", help="labels only; open no image")
    depth.add_argument("--decode", action="store_true", help="decode every image, which finds all that is damaged")
    check.add_argument("--plot", type=Path, metavar="FILE", help="draw an overview to a .png or .svg file")
    check.add_argument("--json", action="store_true", help="write everything as JSON")
    check.set_defaults(run=run_check)


def _read_part(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        return name, float(share)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FRACTION, such as train=0.8") from None


def run_prepare(args: argparse.Namespace) -> int:
    """Make a published data set ready."""
    from pivotpatch.cli.console import show_progress, tell
    from pivotpatch.data.prepare import PLANS, prepare

    with show_progress("bytes") as progress:
        counts = prepare(PLANS[args.dataset], args.root, base_url=args.base_url, progress=progress.tell)
    for address, count in counts.items():
        print(f"{address}  {count:,} records")
    if (args.root / "downloads").exists():
        tell(f"{args.dataset} is complete; {args.root / 'downloads'} may be deleted")
    return 0


def run_split(args: argparse.Namespace) -> int:
    """Split a data set and print where its parts are."""
    import shlex

    import numpy as np

    from pivotpatch.data.address import open_records
    from pivotpatch.data.split import split_records, write_split

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
    from pivotpatch.cli.console import show_progress, write_figures
    from pivotpatch.data.address import open_records
    from pivotpatch.data.check import Depth, check_data, plot_overview

    sets = [open_records(address) for address in args.addresses]
    with show_progress("images") as progress:
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


def _print_report(report: "DataReport") -> None:
    from pivotpatch.cli.console import Screen

    screen = Screen()
    for summary in report.summaries:
        _print_summary(screen, summary)
    if len(report.summaries) > 1 and any(summary.checked != "labels" for summary in report.summaries):
        groups = [" = ".join(f"{image.name} in {image.address}" for image in group) for group in report.shared]
        screen.print("between the data sets", style="bold")
        _print_some(screen, "in more than one data set", groups)


def _print_summary(screen: "Screen", summary: "DataSummary") -> None:
    from pivotpatch.cli.console import make_table

    screen.print(summary.address, style="bold")
    each = f"{summary.labels_per_image:.2f} labels per image"
    screen.print(f"  {summary.num_records:,} images, {len(summary.labels)} labels, {each}")
    if summary.unknown_share:
        screen.print(f"  {summary.unknown_share:.1%} of the labels are unknown")
    for headings, rows in (
        (["  label", "images", "share"], _list_labels(summary)),
        (["  where this label is, this one is too", "share"], _list_pairs(summary)),
    ):
        table = make_table(headings)
        for name, *numbers in rows:
            table.add_row(f"  {name}", *numbers)
        if rows:
            screen.print("", table, sep="\n")
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


def _print_some(screen: "Screen", what: str, items: Sequence[str]) -> None:
    """A count, and the first few of what is counted."""
    more = [f"and {len(items) - _SHOWN:,} more (--json lists all)"] if len(items) > _SHOWN else []
    screen.print(f"  {what}: {len(items):,}", *(f"    {cut(item, 300)}" for item in [*items[:_SHOWN], *more]), sep="\n")


def _list_labels(summary: "DataSummary", *, first: int = 15, last: int = 5) -> list[list[str]]:
    """How many images show each label; of more labels than fit, the most frequent and the rarest."""
    counts = sorted(zip(summary.labels, summary.label_counts.tolist(), strict=True), key=lambda each: -each[1])
    rows = [[label, f"{count:,}", f"{count / summary.num_records:.1%}"] for label, count in counts]
    if len(rows) > first + last + 4:
        rows[first:-last] = [[f"... {len(rows) - first - last} more ...", "", ""]]
    return rows


def _list_pairs(summary: "DataSummary", *, evidence: int = 10) -> list[list[str]]:
    """The pairs of labels of which one most often brings the other, with `evidence` images or more."""
    names, counts, shares = summary.labels, summary.label_counts, summary.cooccurrence
    pairs = [(a, b) for a, b in zip(*(shares > 0).nonzero(), strict=True) if a != b and counts[a] >= evidence]
    best = sorted(pairs, key=lambda pair: -shares[pair])[:_SHOWN]
    return [[f"{names[a]}, {names[b]}", f"{shares[a, b]:.1%}"] for a, b in best]
