"""A tagging job on the disk: parts that are there whole or not at all, joined to one file at the end.

`tags.parquet.parts/` holds settings.json, the list of images (pictures.arrow) and a part for each stretch of the list
that is done, named by its first image and the one after its last. Nothing else says how far the work is, so that it
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
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pivotpatch.data.records import PathStore, write_paths
from pivotpatch.data.table_files import open_parquet
from pivotpatch.errors import InputError
from pivotpatch.writing import explain_disk_faults, flush

SUFFIXES = (".parquet", ".jsonl", ".csv")
NOTE = b"pivotpatch.tags"
"""Where a Parquet file of tags keeps its settings."""
BETWEEN = "|"
"""What stands between the labels of a CSV file."""
_SETTINGS, _PICTURES = "settings.json", "pictures.arrow"
_PART = re.compile(r"(\d+)-(\d+)\.parquet")
_GROUP, _NUMBERS = 1 << 16, 1 << 24  # rows and numbers at most of a Parquet row group


@dataclass(frozen=True)
class Summary:
    """What came of the work.

    Attributes:
        pictures: how many images there were.
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
    columns = {"picture": pa.string(), "labels": pa.list_(pa.string()), "probs": pa.list_(pa.float32())}
    if labels is not None:
        columns["all_probs"] = pa.list_(pa.float32(), labels)
    return pa.schema([*columns.items(), ("error", pa.string())])


class TagJob:
    """The files of a job.

    Attributes:
        out: the file of tags.
        failures: a line for each image that could not be read; there where any could not.
        summary: settings and counts.
        parts: the folder of unfinished work.
        lock: held by whoever is at work.
        settings: what the rows depend on; known once the job has begun.
    """

    def __init__(self, out: Path) -> None:
        """Name the files; a name of no known kind, or in no folder, is refused."""
        if out.suffix.lower() not in SUFFIXES or out.is_dir():
            raise InputError(str(out), "is no file that tags can be written to", f"end it in {', '.join(SUFFIXES)}")
        if not out.absolute().parent.is_dir():
            raise InputError(str(out), f"there is no folder {out.parent}", "make it first")
        self.out = out
        self.failures, self.summary, self.parts = (
            out.with_name(out.name + end) for end in (".failures.jsonl", ".summary.json", ".parts")
        )
        self.lock = out.with_name(f".{out.name}.lock")
        self.settings: Mapping[str, Any] = {}

    @property
    def leftovers(self) -> list[Path]:
        """Hidden folders that a crash has left beside the parts."""
        return sorted(self.parts.parent.glob(f".{glob.escape(self.parts.name)}.*"))

    @property
    def count(self) -> int:
        """Images in the list."""
        return int(self.settings["pictures"])

    def begin(self, settings: Mapping[str, Any], paths: Iterable[str]) -> bool:
        """List the images and begin, or go on where the same was begun; False where the same is finished."""
        scratch = _hide(self.parts)
        with explain_disk_faults(self.parts):
            scratch.mkdir()
            try:
                listed = write_paths(paths, scratch / _PICTURES)
                if listed.length == 0:
                    raise InputError(str(self.out), "no image is named", "name files, folders or patterns")
                root = str(Path.cwd())
                settings = {**settings, "root": root, "pictures": listed.length, "list": listed.digest}
                (scratch / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
                for path in (*scratch.iterdir(), scratch):
                    flush(path)
                with suppress(OSError):  # another process was first, or an earlier one
                    scratch.rename(self.parts)
                    if self.out.exists():  # the rest of finished work is not what this one has begun
                        self.remove_parts()
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        return self.resume(settings)

    def resume(self, settings: Mapping[str, Any]) -> bool:
        """Go on with work that was begun with these settings; False where it is finished."""
        if self.out.exists():
            _compare(self.read_summary().settings, settings, where=str(self.out))
            self.remove_parts()
            return False
        path = self.parts / _SETTINGS
        try:
            begun = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            if self.out.exists():  # another process has finished it in this moment
                return self.resume(settings)
            raise InputError(str(self.parts), "there is no unfinished work", "name images to begin") from None
        except (OSError, ValueError) as error:
            wrong = f"cannot be read ({error})"
            raise InputError(str(path), wrong, "it is damaged, begin anew with --overwrite") from None
        _compare(begun, settings, where=str(self.parts))
        self.settings = begun
        return True

    def list_images(self, stretch: range) -> PathStore:
        """A stretch of the list."""
        root = Path(self.settings["root"])
        return PathStore(self.parts / _PICTURES, root, start=stretch.start, count=len(stretch))

    def find_gaps(self, stretch: range) -> list[range]:
        """What is left to do of a stretch of the list."""
        gaps, at = [], stretch.start
        for first, after in [*self._done(), (stretch.stop, stretch.stop)]:
            gaps.append(range(at, min(first, stretch.stop)))
            at = max(at, after)
        return [gap for gap in gaps if gap]

    def write(self, start: int, rows: pa.Table) -> None:
        """Keep the rows of a stretch that begins at `start`, one per image."""
        written = _hide(self.parts / "part")  # where it stays after a crash, it goes with the folder
        with explain_disk_faults(self.parts):
            pq.write_table(rows, written, compression="zstd")
            flush(written)
            written.replace(self.parts / f"{start:010d}-{start + len(rows):010d}.parquet")
            flush(self.parts)

    def join(self, stretch: range) -> Summary:
        """Make the file of a stretch all of which is done, then remove the parts."""
        scratch = _hide(self.parts / "file")
        with explain_disk_faults(self.parts):
            scratch.mkdir()
            rows, failures, told = (scratch / path.name for path in (self.out, self.failures, self.summary))
            failed = self._write_rows(stretch, rows, failures)
            summary = Summary(len(stretch), len(stretch) - failed, failed, self.settings)
            told.write_text(json.dumps(asdict(summary), indent=2, ensure_ascii=False) + "\n", "utf-8")
            for path in (rows, failures, told):
                flush(path)
            if failed:
                failures.replace(self.failures)
            else:
                self.failures.unlink(missing_ok=True)  # of earlier work
            told.replace(self.summary)
            rows.replace(self.out)  # the last: now the work is finished
            flush(self.out.absolute().parent)
            self.remove_parts()
        return summary

    def read_summary(self) -> Summary:
        """What came of finished work."""
        try:
            return Summary(**json.loads(self.summary.read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            wrong = f"is there, but its summary cannot be read ({error})"
            raise InputError(str(self.out), wrong, "replace it with --overwrite") from None

    def remove_parts(self) -> None:
        """Remove unfinished work, for others to see in one step."""
        gone = _hide(self.parts)
        with suppress(FileNotFoundError):
            self.parts.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def clear_away(self, *, everything: bool) -> None:
        """Remove what a crash may have left beside the parts; or the parts, too, and the finished file."""
        for path in self.leftovers:
            shutil.rmtree(path, ignore_errors=True)
        if everything:
            self.remove_parts()
            self.out.unlink(missing_ok=True)

    def _done(self) -> list[tuple[int, int]]:
        """Stretches that are done, in order."""
        names = (_PART.fullmatch(name) for name in os.listdir(self.parts))  # noqa: PTH208 (names alone)
        return sorted((int(name[1]), int(name[2])) for name in names if name)

    def _read(self, stretch: range, rows: int) -> Iterator[pa.Table]:
        """Rows of a stretch, each image's once, in order, about so many at a time.

        Parts overlap where two runs have worked side by side.
        """
        at, held = stretch.start, []
        for first, after in self._done():
            if first < stretch.stop and after > at:
                assert first <= at, "nothing is missing"
                with open_parquet(self.parts / f"{first:010d}-{after:010d}.parquet") as file:
                    held.append(file.read().slice(at - first, min(after, stretch.stop) - at))
                at = after
                if at >= stretch.stop or sum(map(len, held)) >= rows:
                    yield pa.concat_tables(held)
                    held = []

    def _write_rows(self, stretch: range, rows: Path, failures: Path) -> int:
        """Write rows to one file and what could not be read to another; how many could not."""
        labels, failed = len(self.settings["labels"]) if self.settings["all_probs"] else None, 0
        schema = make_schema(labels)
        schema = schema.remove(schema.get_field_index("error")).with_metadata({NOTE: json.dumps(dict(self.settings))})
        with _open_rows(rows, schema) as write, failures.open("w", encoding="utf-8") as listed:
            for table in self._read(stretch, min(_GROUP, max(_NUMBERS // (labels or 1), 1))):
                bad = pc.is_valid(table["error"])
                for row in table.select(["picture", "error"]).filter(bad).to_pylist():
                    listed.write(json.dumps(row, ensure_ascii=False) + "\n")
                    failed += 1
                write(table.filter(pc.invert(bad)).drop_columns(["error"]))
        return failed


def _compare(begun: Mapping[str, Any], settings: Mapping[str, Any], *, where: str) -> None:
    """Refuse to go on with work that was begun with other settings."""
    for name, value in json.loads(json.dumps(settings)).items():
        before = begun.get(name)
        if before == value:
            continue
        if name in ("pictures", "list"):
            wrong = f"the images are not the {begun.get('pictures')} that it began with"
            raise InputError(where, wrong, "go on with those by --resume, or begin anew with --overwrite")
        told = f" ({before} then, {value} now)" if len(f"{before}{value}") < 160 else ""
        todo = "give the same, begin anew with --overwrite, or write to another file"
        raise InputError(where, f"it was begun with other {name.replace('_', ' ')}{told}", todo)


def _hide(path: Path) -> Path:
    """A hidden name that nobody else has, in the same folder."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


@contextmanager
def _open_rows(path: Path, schema: pa.Schema) -> Iterator[Callable[[pa.Table], None]]:
    """A function that writes rows to a file of the kind that its name says."""
    kind = path.suffix.lower()
    if kind == ".parquet":
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            yield writer.write_table
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        if kind == ".csv":
            lines.writerow(schema.names)

        def write(table: pa.Table) -> None:
            for row in table.to_pylist():
                for name in row.keys() & {"probs", "all_probs"}:
                    row[name] = [round(prob, 6) for prob in row[name]]  # further digits of a float32 say nothing
                if kind == ".jsonl":
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                else:
                    lines.writerow([row.pop("picture"), *(BETWEEN.join(map(str, values)) for values in row.values())])

        yield write
