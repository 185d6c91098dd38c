"""`pivotpatch data`: prepare a published data set, split one, or check what one holds."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.errors import InputError

if TYPE_CHECKING:
    from pivotpatch.data.check import DataReport

ADDRESS_HELP = "a table, a folder of pictures, or an address such as coco:/data/coco@train2014 or scenes:@train"
PLOT_SUFFIXES = (".png", ".svg")


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb and its three actions."""
    data = verbs.add_parser("data", help="prepare, split or check a data set")
    actions = data.add_subparsers(title="actions", required=True, metavar="ACTION")

    prepare = actions.add_parser(
        "prepare",
        help="download, unpack and count a published data set",
        description="Download a data set, unpack it and count it. Run it again after a break: it goes on where it was.",
    )
    prepare.add_argument("dataset", choices=["coco", "voc2007", "vg256"], help="which one")
    prepare.add_argument("--root", type=Path, required=True, metavar="DIR", help="folder to put it in")
    prepare.add_argument("--base-url", metavar="URL", help="a mirror that holds the archives in one folder")
    prepare.set_defaults(run=run_prepare)

    split = actions.add_parser(
        "split",
        help="split a data set, every label in its share",
        description="Split a data set so that each part has its share of each label, and write the split as a table.",
    )
    split.add_argument("address", help=ADDRESS_HELP)
    split.add_argument(
        "--parts",
        type=_read_part,
        nargs="+",
        default=[("train", 0.8), ("val", 0.1), ("test", 0.1)],
        metavar="NAME=FRACTION",
        help="the parts and their shares, together 1 (default: train=0.8 val=0.1 test=0.1)",
    )
    split.add_argument("--seed", type=_read_seed, default=1, help="the same seed gives the same split (default: 1)")
    split.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write the table to")
    split.add_argument(
        "--format", choices=["parquet", "jsonl", "csv"], default="parquet", help="kind of table (default: parquet)"
    )
    split.set_defaults(run=run_split)

    check = actions.add_parser(
        "check",
        help="tell what data sets hold and what is wrong with them",
        description="Count pictures and labels, and find missing, broken and doubled pictures, also between data sets.",
    )
    check.add_argument("addresses", nargs="+", metavar="ADDRESS", help=ADDRESS_HELP)
    depth = check.add_mutually_exclusive_group()
    depth.add_argument("--fast", action="store_true", help="labels only; open no picture")
    depth.add_argument("--decode", action="store_true", help="decode every picture, which finds those cut short")
    check.add_argument("--json", action="store_true", help="write everything as JSON")
    check.add_argument("--plot", type=Path, metavar="FILE", help="draw an overview to a .png or .svg file")
    check.set_defaults(run=run_check)


def _read_part(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        return name, float(share)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FRACTION, such as train=0.8") from None


def _read_seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def run_prepare(args: argparse.Namespace) -> int:
    """Make a published data set ready."""
    from pivotpatch.data.prepare import PLANS, prepare

    with show_progress(sizes=True) as progress:
        counts = prepare(PLANS[args.dataset], args.root, base_url=args.base_url, progress=progress)
    for address, count in counts.items():
        print(f"{address}  {count:,} records")
    if (args.root / "downloads").exists():
        print(f"{args.dataset} is complete; {args.root / 'downloads'} may be deleted", file=sys.stderr)
    return 0


def run_split(args: argparse.Namespace) -> int:
    """Split a data set and print where its parts are."""
    import shlex

    import numpy as np

    from pivotpatch.data.address import open_records
    from pivotpatch.data.split import split_records, write_split

    fractions = dict(args.parts)
    if len(fractions) < len(args.parts):
        raise InputError("split", "two parts have the same name", "give each part its own")
    records = open_records(args.address)
    parts = split_records(records, fractions, generator=np.random.default_rng(args.seed))
    table = write_split(records, parts, folder=args.out, kind=args.format)
    for name, indices in parts.items():
        shown = np.unique(records.positive.select(indices).indices)
        address = shlex.quote(table.addresses[name])  # made to be pasted
        print(f"{address}  {len(indices):,} pictures, {len(shown)} of {len(records.labels)} labels")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Summarise data sets; missing or broken pictures are an error, after all has been told."""
    from os import cpu_count

    from pivotpatch.data.address import open_records
    from pivotpatch.data.check import Depth, check_data

    if args.plot and args.plot.suffix.lower() not in PLOT_SUFFIXES:
        raise InputError(str(args.plot), "is of no known kind of picture", f"end it in {' or '.join(PLOT_SUFFIXES)}")
    sets = [open_records(address) for address in args.addresses]
    depth: Depth = "labels" if args.fast else "pixels" if args.decode else "headers"
    # A process takes as long to start as it needs for about a thousand pictures.
    workers = min(cpu_count() or 1, 1 + sum(len(records) for records in sets) // 1000)
    with show_progress(sizes=False) as progress:
        report = check_data(sets, depth=depth, workers=workers, progress=progress)
    if args.json:
        print(json.dumps(report.to_dict()))
    else:
        from pivotpatch.cli.data_text import print_report

        print_report(report)
    if args.plot:
        _draw(report, args.plot)
    _refuse_broken(report)
    return 0


def _draw(report: "DataReport", path: Path) -> None:
    """Draw each data set; a number tells the files of several apart."""
    import warnings

    from pivotpatch.data.plots import plot_overview
    from pivotpatch.writing import explain_disk_faults, replacing

    for number, summary in enumerate(report.summaries, 1):
        place = path if len(report.summaries) == 1 else path.with_stem(f"{path.stem}-{number}")
        with explain_disk_faults(path.parent), replacing(place) as written, warnings.catch_warnings():
            # A script that the font lacks is drawn as boxes, which the reader sees.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
            plot_overview(summary).savefig(written, format=path.suffix[1:].lower(), dpi=150)
        print(f"drew {place}", file=sys.stderr)


def _refuse_broken(report: "DataReport") -> None:
    for summary in report.summaries:
        found = {"missing": summary.missing, "broken": [picture.name for picture in summary.broken]}
        faults = [f"{len(names):,} {what} (such as {names[0]})" for what, names in found.items() if names]
        if faults:
            wrong = f"of {summary.num_records:,} pictures, {' and '.join(faults)}"
            raise InputError(summary.address, wrong, "restore them or leave them out")


@contextmanager
def show_progress(*, sizes: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on stderr with the time that is left; where that is no terminal, one line a step.

    Args:
        sizes: whether bytes are counted, not pictures.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        last = ""

        def tell_once(what: str, _done: int, _total: int | None) -> None:
            nonlocal last
            if what != last:
                print(what, file=sys.stderr)
            last = what

        yield tell_once
        return
    amount = (DownloadColumn(), TransferSpeedColumn()) if sizes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(None), *amount, TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as bars:

        def tell(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                for task in tasks.values():
                    bars.remove_task(task)
                tasks.clear()
                tasks[what] = bars.add_task(what, total=total, completed=done)
            bars.update(tasks[what], completed=done, total=total)

        yield tell
