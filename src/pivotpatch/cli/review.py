"""`pivotpatch review`: people look at tags on a web page, the most doubtful first; the answers are a table."""

import argparse
import csv
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pivotpatch.cli.app import choose_token, listen
from pivotpatch.cli.usage import add_address_options
from pivotpatch.errors import InputError, import_extra, quote_fault
from pivotpatch.runtime.files import read_names

if TYPE_CHECKING:
    from pivotpatch.data.records import RecordSet
    from pivotpatch.review.pile import Source

OUT = "review.csv"
_TAGS = {"picture", "labels", "probs"}  # columns of what `predict --out` wrote
# What a reader of tables would take for something else than a label.
_TAKEN = ("split", "labels", "label", "tags", "tag", "categories", "category", "classes", "class", "image")


class Found(NamedTuple):
    """What a user named, and the model to ask where none is named."""

    source: "Source"
    model: str = "tagger"


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    review = verbs.add_parser(
        "review",
        help="correct tags on a web page, the most doubtful images first",
        description="Look at images and their tags on a web page: accept, remove, add, by keyboard or touch; the least "
        "certain and the likeliest label errors first. Every answer is on the disk before the next image; Ctrl-C ends "
        "it, the same command goes on. The table that comes of it is read by train, tune and evaluate; labels that "
        "nobody looked at stay unknown.",
        epilog="Then: pivotpatch train tagger photos.csv --corrections review.csv",
    )
    review.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder of images, a table of tags that predict --out wrote, a table or address of images with labels "
        "to check, or a run, whose held-out images are taken",
    )
    review.add_argument("--out", type=Path, metavar="FILE.csv", help=f"the table of answers ({OUT}, near the images)")
    review.add_argument("--model", help="a run, a checkpoint, an exported file, hub:NAME (the run's own, or tagger)")
    review.add_argument("--device", help="such as cpu or cuda:1; a GPU where there is one by default")
    review.add_argument(
        "--labels",
        metavar="NAMES",
        help="review these alone, also new ones: cat,dog or a file of names (the table's, or the model's)",
    )
    review.add_argument(
        "--order",
        choices=["doubt", "random", "source"],
        default="doubt",
        help="doubt: what a look is worth most; random: a sample to evaluate on; source: as they come (doubt)",
    )
    add_address_options(review, port=7861)
    review.add_argument("--no-browser", action="store_true", help="print the address, open nothing")
    review.set_defaults(run=run_review)


def run_review(args: argparse.Namespace) -> int:
    """Look at all images, then serve the page until the process is told to end."""
    from pivotpatch.runtime.predictor import Predictor

    import_extra("uvicorn")  # now, not after the work
    choose_token(args.token)
    found = find_source(args.source)
    out = choose_out(args.out, found.source.paths)
    predictor = Predictor.load(args.model or found.model, device=args.device, effort=1)
    labels = read_labels(args.labels) if args.labels else found.source.given_labels or predictor.labels
    check_labels(labels)
    from pivotpatch.cli.console import StageProgress, tell
    from pivotpatch.review.desk import Desk
    from pivotpatch.review.pile import make_pile
    from pivotpatch.review.server import serve_review
    from pivotpatch.review.session import Session

    with Session(out, labels) as session:
        with StageProgress("images") as shown:
            pile = make_pile(found.source, predictor, labels, out=out, order=args.order, tell=tell, progress=shown.tell)
        done = sum(map(session.is_done, pile.names))
        if done:
            tell(f"{done:,} of {len(pile.names):,} images are reviewed already; going on with {out}")
        with listen(args, opened=lambda url: None if args.no_browser else open_browser(url)) as (listening, access):
            serve_review(Desk(pile, session, predictor), listening, access=access)
        reviewed = len(session.images)
    if reviewed:
        tell(f"wrote {out}, {reviewed:,} images; pivotpatch train DATA --corrections {name_table(out, pile.names)}")
    return 0


def find_source(name: str) -> Found:
    """What a user names: a run, a folder or pattern of images, tags of `predict --out`, or anything with labels."""
    from pivotpatch.data.address import open_records, read_address
    from pivotpatch.review.pile import Source
    from pivotpatch.runtime.files import describe_unread, find_images

    place, address, unread = Path(name), read_address(name), Counter[str]()
    if (place / "config.toml").is_file() and (place / "best").is_dir():
        return _find_held_out(place)
    if place.is_dir() or address is None:
        paths = [Path(path) for path in find_images([name], lines=(), unread=unread)]
        for line in describe_unread(unread):
            print(line, file=sys.stderr)
        return Found(Source(name, paths))
    if place.is_file() and (tags := read_tags(place)) is not None:
        return tags
    return Found(_take_records(open_records(address), name))


def _find_held_out(run: Path) -> Found:
    from pivotpatch.training.build import open_training_records
    from pivotpatch.training.config import load_config

    held = open_training_records(load_config(run / "config.toml")).val
    if held is None:
        raise InputError(str(run), "the run holds no images out", "name a table or a folder, and --model the run")
    return Found(_take_records(held, f"{run}, held out"), str(run))


def _take_records(records: "RecordSet", name: str) -> "Source":
    from pivotpatch.review.pile import Source

    paths = [source for record in records if isinstance(source := record.image, Path)]
    if len(paths) < len(records):
        wrong = "its images are no files, which a table of answers could name"
        raise InputError(records.name, wrong, "unpack them to files, and name those")
    return Source(name, paths, records.target().numpy(), records.labels.names)


def read_tags(path: Path) -> Found | None:
    """The tags that `predict --out` wrote, with every probability where it wrote those; None for another table."""
    from pivotpatch.review.pile import Source

    rows = _read_rows(path)
    if not rows or {*rows[0]} - {"all_probs"} != _TAGS:
        return None
    try:
        settings = json.loads(path.with_name(f"{path.name}.summary.json").read_text("utf-8"))["settings"]
        root, labels = Path(settings["root"]), settings["labels"]
        whole = "all_probs" in rows[0]
        tags = [
            dict(
                zip(labels if whole else row["labels"], map(float, row["all_probs" if whole else "probs"]), strict=True)
            )
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        wrong = f"its summary or a row cannot be read ({quote_fault(error)})"
        raise InputError(str(path), wrong, "write it again with predict --out") from None
    if settings.get("tags"):
        raise InputError(str(path), "its tags have names of their own (--tags)", "write it without --tags")
    return Found(Source(str(path), [root / row["picture"] for row in rows], tags=tags), str(settings["model"]))


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a table by plain Python, which is there without pyarrow; none of a kind that `predict` does not write."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        parquet = import_extra("pyarrow.parquet", "parquet")
        known = set(parquet.read_schema(path).names) - {"all_probs"} == _TAGS  # else there may be images in it
        return parquet.read_table(path).to_pylist() if known else []
    with suppress(ValueError, csv.Error), path.open(encoding="utf-8-sig", newline="") as file:
        if suffix == ".jsonl":
            return [json.loads(line) for line in file if line.strip()]
        rows = list(csv.DictReader(file)) if suffix == ".csv" else []
        if rows and {*rows[0]} - {"all_probs"} == _TAGS:
            split = {"labels", "probs", "all_probs"}
            return [{k: v.split("|") if v and k in split else v or [] for k, v in row.items()} for row in rows]
    return []


def read_labels(text: str) -> tuple[str, ...]:
    """Names of labels: of a file, or separated by commas."""
    names = read_names(Path(text)) if Path(text).is_file() else [name.strip() for name in text.split(",")]
    return tuple(dict.fromkeys(filter(None, names)))


def check_labels(labels: Sequence[str]) -> None:
    """Refuse labels that a reader of tables would not take for labels."""
    taken = [label for label in labels if label.lower().replace(" ", "").replace("_", "") in _TAKEN]
    if taken:
        wrong = f"a column {taken[0]!r} would not be read as a label"
        raise InputError("labels", wrong, "leave it out with --labels")


def choose_out(out: Path | None, paths: Sequence[Path]) -> Path:
    """Where the table goes: as named; else here, or to the folder that holds all images where that is elsewhere."""
    if out is None:
        folder = Path(os.path.commonpath([os.path.abspath(path.parent) for path in paths]))  # noqa: PTH100
        out = Path(OUT) if folder.is_relative_to(Path.cwd()) else folder / OUT
    if out.suffix.lower() != ".csv" or not out.absolute().parent.is_dir():
        wrong = f"there is no folder {out.parent}" if out.suffix.lower() == ".csv" else "is no name of a CSV file"
        raise InputError(str(out), wrong, "name a .csv file in a folder that is there")
    session = out.with_name(f"{out.name}.journal.jsonl")
    if out.exists() and not session.exists():
        raise InputError(str(out), "is there, but no review has made it", "give another --out")
    return out


def name_table(out: Path, names: Sequence[str]) -> str:
    """The address of the table; images outside its folder must be allowed."""
    return f"'{out}?allow_escape=true'" if any(Path(name).is_absolute() for name in names) else str(out)


def open_browser(url: str) -> None:
    """Show the page where somebody sits; a browser that runs in the terminal would take it away."""
    import webbrowser

    if sys.stdout.isatty() and (sys.platform in ("win32", "darwin") or {"DISPLAY", "WAYLAND_DISPLAY"} & {*os.environ}):
        webbrowser.open(url)
