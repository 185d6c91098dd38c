"""Tags of many pictures as a file: written in parts that are there whole or not at all, joined at the end.

`tags.parquet.parts/` holds settings.json, the list of pictures (pictures.arrow) and a part for each stretch of the list
that is done, named by its first picture and the one after its last. Nothing else says how far the work is, so that it
can end at any moment and go on with any number of processes. Once `tags.parquet` is there, the work is finished.
"""

import csv
import glob
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pivotpatch.data.records import PathStore, write_paths
from pivotpatch.data.table_files import open_parquet
from pivotpatch.errors import InputError
from pivotpatch.writing import explain_disk_faults, flush

SUFFIXES = (".parquet", ".jsonl", ".csv")
NOTE = b"pivotpatch.tags"
"""Where a Parquet file of tags keeps its summary."""
_SETTINGS, _PICTURES = "settings.json", "pictures.arrow"
_PART = re.compile(r"(\d+)-(\d+)\.parquet")
_GROUP, _NUMBERS = 1 << 16, 1 << 24  # rows and numbers at most of a Parquet row group
BETWEEN = "|"
"""What stands between the labels of a CSV file."""


class TagFiles(NamedTuple):
    """Where the tags go.

    Attributes:
        out: the file.
        failures: a line for each picture that could not be read; there where any could not.
        summary: settings and counts.
        parts: the folder of unfinished work.
    """

    out: Path
    failures: Path
    summary: Path
    parts: Path

    @property
    def lock(self) -> Path:
        """Held by whoever is at work."""
        return self.out.with_name(f".{self.out.name}.lock")

    @property
    def unfinished(self) -> list[Path]:
        """What work that ended before its time has left."""
        hidden = sorted(self.parts.parent.glob(f".{glob.escape(self.parts.name)}.*"))
        return [self.parts, *hidden] if self.parts.exists() else hidden


def name_files(out: Path) -> TagFiles:
    """The files that belong to a file of tags; a name of no known kind, or in no folder, is refused."""
    if out.suffix.lower() not in SUFFIXES:
        raise InputError(str(out), "is of no known kind of file", f"end it in {', '.join(SUFFIXES)}")
    if not out.absolute().parent.is_dir():
        raise InputError(str(out), f"there is no folder {out.parent}", "make it first")
    if out.is_dir():
        raise InputError(str(out), "is a folder", "name a file")
    failures, summary, parts = (out.with_name(out.name + end) for end in (".failures.jsonl", ".summary.json", ".parts"))
    return TagFiles(out, failures, summary, parts)


@dataclass(frozen=True)
class Summary:
    """What came of the work.

    Attributes:
        pictures: how many there were.
        tagged: how many have a row.
        failed: how many could not be read.
        settings: what the rows depend on.
    """

    pictures: int
    tagged: int
    failed: int
    settings: Mapping[str, Any]


def make_schema(labels: int | None) -> pa.Schema:
    """Columns of a part; with all probabilities where their number is given."""
    columns = {
        "index": pa.int64(),
        "picture": pa.string(),
        "error": pa.string(),
        "labels": pa.list_(pa.string()),
        "probs": pa.list_(pa.float32()),
    }
    if labels is not None:
        columns["all_probs"] = pa.list_(pa.float32(), labels)
    return pa.schema(list(columns.items()))


class Parts:
    """The folder of unfinished work.

    Attributes:
        files: where the tags go.
        settings: what the rows depend on.
    """

    def __init__(self, files: TagFiles, settings: Mapping[str, Any]) -> None:
        self.files = files
        self.settings = settings

    @classmethod
    def begin(cls, files: TagFiles, settings: Mapping[str, Any], paths: Iterable[str]) -> "Parts | None":
        """List the pictures and begin, or go on where the same was begun; None where the same is finished."""
        scratch = _hide(files.parts)
        with explain_disk_faults(files.parts):
            scratch.mkdir()
            try:
                listed = write_paths(paths, scratch / _PICTURES)
                if listed.length == 0:
                    raise InputError(str(files.out), "no picture is named", "name files, folders or patterns")
                root = str(Path.cwd())
                settings = {**settings, "root": root, "pictures": listed.length, "list": listed.digest}
                (scratch / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
                for path in (*scratch.iterdir(), scratch):
                    flush(path)
                with suppress(OSError):  # another process was first, or an earlier one
                    scratch.rename(files.parts)
                    if files.out.exists():  # the rest of finished work is not what this one has begun
                        remove_parts(files)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        return cls.resume(files, settings)

    @classmethod
    def resume(cls, files: TagFiles, settings: Mapping[str, Any]) -> "Parts | None":
        """Go on with work that was begun with these settings; None where it is finished."""
        if files.out.exists():
            compare_settings(read_summary(files).settings, settings, where=str(files.out))
            remove_parts(files)
            return None
        path = files.parts / _SETTINGS
        try:
            begun = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            if files.out.exists():  # another process has finished it in this moment
                return cls.resume(files, settings)
            raise InputError(str(files.parts), "there is no unfinished work", "name pictures to begin") from None
        except (OSError, ValueError) as error:
            wrong = f"cannot be read ({error})"
            raise InputError(str(path), wrong, "it is damaged, begin anew with --overwrite") from None
        compare_settings(begun, settings, where=str(files.parts))
        return cls(files, begun)

    @property
    def count(self) -> int:
        """Pictures in the list."""
        return int(self.settings["pictures"])

    def pictures(self, stretch: range) -> PathStore:
        """A stretch of the list."""
        path = self.files.parts / _PICTURES
        return PathStore(path, Path(self.settings["root"]), start=stretch.start, count=len(stretch))

    def find_gaps(self, stretch: range) -> list[range]:
        """What is left to do of a stretch of the list."""
        gaps, at = [], stretch.start
        for first, after in [*self._done(), (stretch.stop, stretch.stop)]:
            gaps.append(range(at, min(first, stretch.stop)))
            at = max(at, after)
        return [gap for gap in gaps if gap]

    def write(self, start: int, rows: pa.Table) -> None:
        """Keep the rows of a stretch that begins at `start`, one a picture."""
        folder = self.files.parts
        written = _hide(folder / "part")  # where it stays after a crash, it goes with the folder
        with explain_disk_faults(folder):
            pq.write_table(rows, written, compression="zstd")
            flush(written)
            written.replace(folder / f"{start:010d}-{start + len(rows):010d}.parquet")
            flush(folder)

    def join(self, stretch: range) -> Summary:
        """Make the file of a stretch all of which is done, then remove the parts."""
        files = self.files
        scratch = _hide(files.parts / "file")
        with explain_disk_faults(files.parts):
            scratch.mkdir()
            rows, failures, told = (scratch / path.name for path in (files.out, files.failures, files.summary))
            failed = _write_rows(self._read(stretch), rows, failures, settings=self.settings)
            summary = Summary(len(stretch), len(stretch) - failed, failed, self.settings)
            told.write_text(json.dumps(asdict(summary), indent=2, ensure_ascii=False) + "\n", "utf-8")
            for path in (rows, failures, told):
                flush(path)
            if failed:
                failures.replace(files.failures)
            else:
                files.failures.unlink(missing_ok=True)  # of earlier work
            told.replace(files.summary)
            rows.replace(files.out)  # the last: now the work is finished
            flush(files.out.absolute().parent)
            remove_parts(files)
        return summary

    def _done(self) -> list[tuple[int, int]]:
        """Stretches that are done, in order."""
        names = (_PART.fullmatch(name) for name in os.listdir(self.files.parts))  # noqa: PTH208 (names alone)
        return sorted((int(name[1]), int(name[2])) for name in names if name)

    def _read(self, stretch: range) -> Iterator[pa.Table]:
        """Rows of a stretch, each picture's once, in order.

        Stretches overlap where two runs have worked side by side.
        """
        at = stretch.start
        for first, after in self._done():
            if first < stretch.stop and after > at:
                assert first <= at, "nothing is missing"
                with open_parquet(self.files.parts / f"{first:010d}-{after:010d}.parquet") as file:
                    rows = file.read()
                yield rows.slice(at - first, min(after, stretch.stop) - at)
                at = after


def compare_settings(begun: Mapping[str, Any], settings: Mapping[str, Any], *, where: str) -> None:
    """Refuse to go on with work that was begun with other settings."""
    todo = "give the same, begin anew with --overwrite, or write to another file"
    given = json.loads(json.dumps(settings))
    for name, value in given.items():
        if begun.get(name) == value:
            continue
        if name in ("pictures", "list"):
            wrong = f"the pictures are not the {begun.get('pictures')} that it began with"
            raise InputError(where, wrong, "go on with those by --resume, or begin anew with --overwrite")
        short = all(len(str(each)) < 80 for each in (begun.get(name), value))
        told = f" ({begun.get(name)} then, {value} now)" if short else ""
        raise InputError(where, f"it was begun with other {name.replace('_', ' ')}{told}", todo)


def read_summary(files: TagFiles) -> Summary:
    """What came of finished work."""
    try:
        return Summary(**json.loads(files.summary.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        wrong = f"is there, but its summary cannot be read ({error})"
        raise InputError(str(files.out), wrong, "replace it with --overwrite") from None


def remove_parts(files: TagFiles) -> None:
    """Remove unfinished work, for others to see in one step."""
    gone = _hide(files.parts)
    with suppress(FileNotFoundError):
        files.parts.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def clear_away(files: TagFiles, *, everything: bool) -> None:
    """Remove what a crash may have left beside the parts; or the parts, too, and the finished file."""
    for path in files.unfinished:
        if path != files.parts:
            shutil.rmtree(path, ignore_errors=True)
    if everything:
        remove_parts(files)
        files.out.unlink(missing_ok=True)


def _hide(path: Path) -> Path:
    """A hidden name that nobody else has, in the same folder."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def _write_rows(tables: Iterator[pa.Table], rows: Path, failures: Path, *, settings: Mapping[str, Any]) -> int:
    """Write rows to one file and what could not be read to another; how many could not."""
    width = len(settings["labels"]) if settings["all_probs"] else 1
    failed = 0
    with _OPEN[rows.suffix.lower()](rows, settings) as write, failures.open("w", encoding="utf-8") as listed:
        for table in _regroup(tables, min(_GROUP, max(_NUMBERS // width, 1))):
            bad = pc.is_valid(table["error"])
            for row in table.select(["picture", "error"]).filter(bad).to_pylist():
                listed.write(json.dumps(row, ensure_ascii=False) + "\n")
                failed += 1
            write(table.filter(pc.invert(bad)).drop_columns(["index", "error"]))
    return failed


def _regroup(tables: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows, about so many at a time."""
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(map(len, held)) >= rows:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


_Write = Callable[[pa.Table], None]


@contextmanager
def _open_parquet(path: Path, settings: Mapping[str, Any]) -> Iterator[_Write]:
    columns = make_schema(len(settings["labels"]) if settings["all_probs"] else None)
    schema = pa.schema([field for field in columns if field.name not in ("index", "error")])
    note = {NOTE: json.dumps(dict(settings))}
    with pq.ParquetWriter(path, schema.with_metadata(note), compression="zstd") as writer:
        yield writer.write_table


@contextmanager
def _open_json_lines(path: Path, _settings: Mapping[str, Any]) -> Iterator[_Write]:
    with path.open("w", encoding="utf-8") as file:

        def write(table: pa.Table) -> None:
            for row in table.to_pylist():
                numbers = {name: [_round(prob) for prob in row[name]] for name in row if name.endswith("probs")}
                file.write(json.dumps({**row, **numbers}, ensure_ascii=False) + "\n")

        yield write


@contextmanager
def _open_csv(path: Path, settings: Mapping[str, Any]) -> Iterator[_Write]:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["picture", "labels", "probs", *(["all_probs"] if settings["all_probs"] else [])])

        def write(table: pa.Table) -> None:
            for picture, labels, *probs in zip(*(column.to_pylist() for column in table.columns), strict=True):
                numbers = (BETWEEN.join(str(_round(prob)) for prob in each) for each in probs)
                writer.writerow([picture, BETWEEN.join(labels), *numbers])

        yield write


_OPEN = {".parquet": _open_parquet, ".jsonl": _open_json_lines, ".csv": _open_csv}


def _round(prob: float) -> float:
    return round(prob, 6)  # of a float32, whose further digits say nothing
