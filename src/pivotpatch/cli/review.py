"""`pivotpatch review`: people look at tags on a web page, the most doubtful first; the answers are a table."""

import argparse
import os
import sys
import webbrowser
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pivotpatch.cli.app import choose_token, listen
from pivotpatch.cli.console import StageProgress
from pivotpatch.cli.telling import tell, tell_unread
from pivotpatch.data.address import open_records, read_address
from pivotpatch.errors import InputError
from pivotpatch.review.desk import Desk
from pivotpatch.review.pile import Source, make_pile
from pivotpatch.review.server import serve_review
from pivotpatch.review.session import Session
from pivotpatch.runtime.files import find_images, read_names
from pivotpatch.runtime.parts import read_tags
from pivotpatch.runtime.predictor import Predictor
from pivotpatch.writing import check_place

if TYPE_CHECKING:
    from pivotpatch.data.records import RecordSet

OUT = "review.csv"
# What a reader of tables would take for something else than a label.
_TAKEN = ("split", "labels", "label", "tags", "tag", "categories", "category", "classes", "class", "image")


def run_review(args: argparse.Namespace) -> int:
    """Look at all images, then serve the page until the process is told to end."""
    args.token = choose_token(args.token)
    source = find_source(args.source)
    out = choose_out(args.out, source.paths)
    predictor = Predictor.load(args.model or source.model, device=args.device, effort=1)
    labels = read_labels(args.labels) if args.labels else source.given_labels or predictor.labels
    check_labels(labels)
    with Session(out, labels) as session:
        with StageProgress("images") as shown:
            pile = make_pile(source, predictor, labels, out=out, order=args.order, tell=tell, progress=shown.tell)
        done = sum(map(session.is_done, pile.names))
        if done:
            tell(f"{done:,} of {len(pile.names):,} images are reviewed already; going on with {out}")
        desk = Desk(pile, session, predictor)
        listen(
            args,
            lambda listening, access: serve_review(desk, listening, access=access),
            opened=lambda url: None if args.no_browser else open_browser(url),
        )
        reviewed = len(session.images)
    if reviewed:
        tell(f"wrote {out}, {reviewed:,} images; pivotpatch train DATA --corrections {name_table(out, pile.names)}")
    return 0


def find_source(name: str) -> Source:
    """What a user names: a run, a folder or pattern of images, tags of `predict --out`, or anything with labels."""
    place, address, unread = Path(name), read_address(name), Counter[str]()
    if (place / "config.toml").is_file() and (place / "best").is_dir():
        return _find_held_out(place)
    if place.is_dir() or address is None:
        paths = [Path(path) for path in find_images([name], lines=(), unread=unread)]
        tell_unread(unread)
        return Source(name, paths)
    if place.is_file() and (table := read_tags(place)) is not None:
        if table.settings.get("tags"):
            raise InputError(name, "its tags have names of their own (--tags)", "write it without --tags")
        tags, labels = table.tags, table.settings["labels"]
        if table.all_probs is not None:
            tags = [dict(zip(labels, probs, strict=True)) for probs in table.all_probs]
        return Source(name, table.images, tags=tags, model=str(table.settings["model"]))
    return _take_records(open_records(address), name)


def _find_held_out(run: Path) -> Source:
    from pivotpatch.training.config import load_config
    from pivotpatch.training.folder import open_run_records

    held = open_run_records(run, load_config(run / "config.toml")).val
    if held is None:
        raise InputError(str(run), "the run holds no images out", "name a table or a folder, and --model the run")
    return replace(_take_records(held, f"{run}, held out"), model=str(run))


def _take_records(records: "RecordSet", name: str) -> Source:
    paths = [source for record in records if isinstance(source := record.image, Path)]
    if len(paths) < len(records):
        wrong = "its images are no files, which a table of answers could name"
        raise InputError(records.name, wrong, "unpack them to files, and name those")
    return Source(name, paths, records.target().numpy(), records.labels.names)


def read_labels(text: str) -> tuple[str, ...]:
    """Names of labels: of a file, or separated by commas."""
    names = read_names(Path(text)) if Path(text).is_file() else [name.strip() for name in text.split(",")]
    return tuple(dict.fromkeys(filter(None, names)))


def check_labels(labels: Sequence[str]) -> None:
    """Refuse no labels, and those that a reader of tables would not take for labels."""
    if not labels:
        raise InputError("--labels", "no label is named", "write cat,dog or a file of names")
    taken = [label for label in labels if label.lower().replace(" ", "").replace("_", "") in _TAKEN]
    if taken:
        wrong = f"a column {taken[0]!r} would not be read as a label"
        raise InputError("labels", wrong, "leave it out with --labels")


def choose_out(out: Path | None, paths: Sequence[Path]) -> Path:
    """Where the table goes: as named; else here, or to the folder that holds all images where that is elsewhere."""
    if out is None:
        folder = Path(os.path.commonpath([os.path.abspath(path.parent) for path in paths]))  # noqa: PTH100
        out = Path(OUT) if folder.is_relative_to(Path.cwd()) else folder / OUT
    check_place(out, (".csv",), "a table of answers")
    session = out.with_name(f"{out.name}.journal.jsonl")
    if out.exists() and not session.exists():
        raise InputError(str(out), "is there, but no review has made it", "give another --out")
    return out


def name_table(out: Path, names: Sequence[str]) -> str:
    """The address of the table; images outside its folder must be allowed."""
    return f"'{out}?allow_escape=true'" if any(Path(name).is_absolute() for name in names) else str(out)


def open_browser(url: str) -> None:
    """Show the page where somebody sits; a browser that runs in the terminal would take it away."""
    if sys.stdout.isatty() and (sys.platform in ("win32", "darwin") or {"DISPLAY", "WAYLAND_DISPLAY"} & {*os.environ}):
        webbrowser.open(url)
