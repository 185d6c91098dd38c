"""The files of a tagging job: its list of images, a part for each stretch that is done, and what they become.

A part, in `tags.parquet.parts/`, is there whole or not at all, and nothing else says how far the work is.
"""

import csv
import glob
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from pivotpatch.errors import InputError, cut, explaining, import_extra
from pivotpatch.process import Progress
from pivotpatch.runtime.packed import Found, Opened, open_sources, to_json
from pivotpatch.writing import explain_disk_faults, flush, hide, replacing

Row = dict[str, Any]
"""What is known of one image: its name as `picture`, and its `labels` and their `probs`, or an `error`."""

SUFFIXES = (".parquet", ".jsonl", ".csv")
BETWEEN = "|"
"""Stands between the labels of a CSV file."""
SHARD = 10_000
"""Images that are handed out at once, where there are many; the list is found again at each such step."""
_SETTINGS, _IMAGES = "settings.json", "images.jsonl"
_UNREAD, _INDEX = "unread", "index"  # in the settings' file, and nothing that rows depend on
_ROWS, _NUMBERS = 1 << 13, 1 << 20  # held at once, at most
_PART_SECONDS = 10.0  # of work that a kill may cost
_ODD = "backslashreplace"  # what becomes of a file's name that is no Unicode; JSON reads it back


@dataclass(frozen=True)
class Summary:
    """How many images there were, how many have a row or could not be read, and what the rows depend on."""

    pictures: int  # images that were named
    tagged: int  # those with a row
    failed: int  # those that could not be read
    settings: Mapping[str, Any]  # what the rows depend on
    # files that were no images that can be read here, by suffix.
    unread: Mapping[str, int] = field(default_factory=dict)


class TagJob:
    """The files of a job.

    Attributes:
        out: the file of tags.
        failures: a line for each image that could not be read; there where any could not.
        summary: settings and counts.
        parts: the folder of unfinished work.
        lock: held by whoever is at work.
        settings: what the rows depend on; known once the job has begun.
        unread: files that were left out when it began, by suffix; likewise.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.failures, self.summary, self.parts = (
            out.with_name(out.name + end) for end in (".failures.jsonl", ".summary.json", ".parts")
        )
        self.lock = out.with_name(f".{out.name}.lock")
        self.settings: dict[str, Any] = {}
        self.unread: dict[str, int] = {}
        self._index = [0]

    @property
    def leftovers(self) -> list[Path]:
        """Hidden folders that a crash has left beside the parts."""
        return sorted(self.parts.parent.glob(f".{glob.escape(self.out.name)}.*.parts"))

    def clear_away(self) -> None:
        """Remove what a crash may have left beside the parts."""
        for path in self.leftovers:
            shutil.rmtree(path, ignore_errors=True)

    def remove_parts(self) -> None:
        """Remove unfinished work, for others to see in one step."""
        gone = hide(self.parts)
        with suppress(FileNotFoundError):
            self.parts.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def begin(
        self,
        settings: dict[str, Any],
        paths: Iterable[Found],
        unread: Mapping[str, int] | None,
        tell: Progress,
        *,
        overwrite: bool = False,
    ) -> bool:
        """List the images and begin, or go on where the same was begun; False where the same is finished.

        With `overwrite` earlier work goes, the finished file too, once there is a list to begin with.
        """
        scratch = hide(self.parts)
        with explain_disk_faults(self.parts):
            scratch.mkdir()
            try:
                length, digest, index = _write_list(paths, scratch / _IMAGES, tell)
                if length == 0:
                    raise InputError(str(self.out), "no image is named", "name files, folders or patterns")
                settings |= {"root": str(Path.cwd()), "pictures": length, "list": digest}
                kept = {**settings, _UNREAD: {} if unread is None else unread, _INDEX: index}
                (scratch / _SETTINGS).write_text(json.dumps(kept, indent=2) + "\n", "utf-8")
                for path in (*scratch.iterdir(), scratch):
                    flush(path)
                if overwrite:
                    self.remove_parts()
                    self.out.unlink(missing_ok=True)
                with suppress(OSError):  # another process was first, or an earlier one
                    scratch.rename(self.parts)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        return self.resume(settings)

    def resume(self, settings: dict[str, Any]) -> bool:
        """Go on with work that was begun with these settings; False where it is finished."""
        if self.out.exists():
            self.remove_parts()
            _compare(self.read_summary().settings, settings, where=str(self.out))
            return False
        try:
            self.read_settings()
        except FileNotFoundError:
            if self.out.exists():  # another process has finished it in this moment
                return self.resume(settings)
            raise InputError(str(self.parts), "there is no unfinished work", "name images to begin") from None
        _compare(self.settings, settings, where=str(self.parts))
        return True

    def read_settings(self) -> None:
        """Learn what the rows of work that has begun depend on."""
        path = self.parts / _SETTINGS
        try:
            self.settings = json.loads(path.read_text("utf-8"))
            self.unread, self._index = self.settings.pop(_UNREAD, {}), self.settings.pop(_INDEX, [0])
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise InputError(str(path), f"cannot be read ({error})", "begin anew with --overwrite") from None

    def list_images(self, stretch: range) -> Iterator[Opened]:
        """The images of a stretch of the list, which is not held."""
        place = min(stretch.start // SHARD, len(self._index) - 1)
        with (self.parts / _IMAGES).open("rb") as lines:
            lines.seek(self._index[place])
            wanted = islice(lines, stretch.start - place * SHARD, stretch.stop - place * SHARD)
            yield from open_sources(map(json.loads, wanted), Path(self.settings["root"]))

    def find_gaps(self, stretch: range | None = None) -> list[range]:
        """What is left to do of the list, or of a stretch of it."""
        stretch = range(self.settings["pictures"]) if stretch is None else stretch
        gaps, at = [], stretch.start
        for first, after in [*self._find_parts(), (stretch.stop, stretch.stop)]:
            gaps.append(range(at, min(first, stretch.stop)))
            at = max(at, after)
        return [gap for gap in gaps if gap]

    def keep(self, start: int, batches: Iterable[list[Row]], goes_on: Callable[[int], bool]) -> bool:
        """Write rows of images from `start` on as parts, whatever ends them; whether `goes_on` let all come."""
        held, since = list[Row](), time.monotonic()
        try:
            for rows in batches:
                held += rows
                if len(held) >= _count_rows(self.settings) or time.monotonic() - since > _PART_SECONDS:
                    start, held, since = self._write(start, held), [], time.monotonic()
                if not goes_on(len(rows)):
                    return False
            return True
        finally:
            self._write(start, held)

    def _write(self, start: int, rows: list[Row]) -> int:
        """Write a part; where the next one starts."""
        after = start + len(rows)
        if rows:
            with explain_disk_faults(self.parts):
                with replacing(self._name(start, after), through=self.parts) as written:
                    written.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
                flush(self.parts)
        return after

    def join(self) -> Summary:
        """Make the file of a list all of which is done, then remove the parts."""
        failed = 0

        def list_tagged(failures: Path) -> Iterator[Row]:
            nonlocal failed
            with failures.open("w", encoding="utf-8", errors=_ODD) as listed:
                for row in self._read():
                    if "error" in row:
                        listed.write(json.dumps(row, ensure_ascii=False) + "\n")
                        failed += 1
                    else:
                        yield row

        write = _write_parquet if self.out.suffix.lower() == ".parquet" else _write_text
        place = partial(replacing, through=self.parts)  # what a crash leaves goes with the folder
        with explain_disk_faults(self.parts):
            with place(self.out) as out:  # the last to be there: then the work is finished
                with place(self.failures) as failures, place(self.summary) as told:
                    write(out, list_tagged(failures), self.settings)
                    count = self.settings["pictures"]
                    summary = Summary(count, count - failed, failed, self.settings, self.unread)
                    told.write_text(json.dumps(asdict(summary), indent=2, ensure_ascii=False) + "\n", "utf-8", _ODD)
                if not failed:
                    self.failures.unlink(missing_ok=True)
            flush(self.out.absolute().parent)
            self.remove_parts()
        return summary

    def read_summary(self) -> Summary:
        """What came of finished work."""
        with explaining(str(self.out), "is there, but its summary cannot be read", "replace it with --overwrite"):
            return Summary(**json.loads(self.summary.read_text("utf-8")))

    def _name(self, first: int, after: int) -> Path:
        return self.parts / f"{first:010d}-{after:010d}.jsonl"

    def _find_parts(self) -> list[tuple[int, int]]:
        """Stretches that are done, in order."""
        names = (re.fullmatch(r"(\d+)-(\d+)\.jsonl", name) for name in os.listdir(self.parts))  # noqa: PTH208
        return sorted((int(name[1]), int(name[2])) for name in names if name)

    def _read(self) -> Iterator[Row]:
        """All rows, each image's once, in order; parts overlap where two runs have worked side by side."""
        at = 0
        for first, after in self._find_parts():
            assert first <= at, "nothing is missing"
            path = self._name(first, after)
            try:
                rows = [json.loads(line) for line in path.read_bytes().splitlines()]
            except ValueError:
                rows = []
            if len(rows) != after - first:
                raise InputError(str(path), "damaged or cut short", "remove it, and its images are tagged again")
            yield from rows[at - first :]
            at = max(at, after)


class TagTable(NamedTuple):
    """What a finished job wrote: images, by image the labels that it gives and their probabilities, and its settings.

    `all_probs` are those of every label, in the order of `settings["labels"]`; None where they were not written.
    """

    images: list[Path]
    tags: list[dict[str, float]]
    all_probs: list[list[float]] | None
    settings: dict[str, Any]


def read_tags(path: Path) -> TagTable | None:
    """Read a file of tags; None for another table, or one without rows."""
    wrong = f"its tags or {path.name}.summary.json cannot be read"
    with explaining(str(path), wrong, "it is damaged, copy or write it again"):
        rows = _read_rows(path)
        if not rows:
            return None
        settings = json.loads(path.with_name(f"{path.name}.summary.json").read_text("utf-8"))["settings"]
        images = [Path(settings["root"], row["picture"]) for row in rows]
        tags = [dict(zip(row["labels"], map(float, row["probs"]), strict=True)) for row in rows]
        whole = [[float(prob) for prob in row["all_probs"]] for row in rows] if "all_probs" in rows[0] else None
        return TagTable(images, tags, whole, settings)


def _read_rows(path: Path) -> list[Row]:
    """The rows of a file of tags, by plain Python where there is no pyarrow; none of another table."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        parquet = import_extra("pyarrow.parquet", "parquet")
        ours = _are_tags(parquet.read_schema(path).names)  # else there may be images in it
        return parquet.read_table(path).to_pylist() if ours else []
    with suppress(ValueError, TypeError, csv.Error), path.open(encoding="utf-8-sig", newline="") as file:
        if suffix == ".jsonl":
            rows = (json.loads(line) for line in file if line.strip())
            first: Row = next(rows, {})
            return [first, *rows] if _are_tags(first) else []
        table = csv.DictReader(file)
        if suffix == ".csv" and _are_tags(table.fieldnames or ()):
            return [
                {name: text if name == "picture" else text.split(BETWEEN) if text else [] for name, text in row.items()}
                for row in table
            ]
    return []


def _are_tags(columns: Iterable[str]) -> bool:
    return {*columns} - {"all_probs"} == {"picture", "labels", "probs"}


def _write_list(paths: Iterable[Found], path: Path, tell: Progress) -> tuple[int, str, list[int]]:
    """Write a list of images as JSON, one per line; how many, a digest of it, and where each SHARD of them begins."""
    count, digest, index = 0, sha256(), list[int]()
    with path.open("wb") as file:
        for count, name in enumerate(paths, 1):
            if count % SHARD == 1:
                index.append(file.tell())
            line = json.dumps(name, default=to_json).encode() + b"\n"
            digest.update(line)
            file.write(line)
            if count % SHARD == 0:
                tell("find images", count, None)
    return count, digest.hexdigest(), index


def _compare(begun: Mapping[str, Any], settings: Mapping[str, Any], *, where: str) -> None:
    """Refuse to go on with work that was begun with other settings."""
    for name, value in json.loads(json.dumps(settings)).items():
        before = begun.get(name)
        if before != value and name in ("pictures", "list"):
            wrong = f"the images are not the {begun.get('pictures')} that it began with"
            raise InputError(where, wrong, "go on with those by --resume, or begin anew with --overwrite")
        if before != value:
            wrong = f"it was begun with other {name.replace('_', ' ')} ({cut(str(before))} then, {cut(str(value))} now)"
            raise InputError(where, wrong, "give the same, begin anew with --overwrite, or write to another file")


def _count_rows(settings: Mapping[str, Any]) -> int:
    """How many rows are held at once, in memory and as a Parquet row group."""
    return min(_ROWS, _NUMBERS // len(settings["labels"]) + 1)


def _write_parquet(path: Path, rows: Iterator[Row], settings: Mapping[str, Any]) -> None:
    pa, pq = (import_extra(name, "parquet") for name in ("pyarrow", "pyarrow.parquet"))
    columns = {"picture": pa.string(), "labels": pa.list_(pa.string()), "probs": pa.list_(pa.float32())}
    if settings["all_probs"]:
        columns["all_probs"] = pa.list_(pa.float32(), len(settings["labels"]))
    with pq.ParquetWriter(path, pa.schema(columns), compression="zstd") as writer:
        while group := list(islice(rows, _count_rows(settings))):
            for row in group:
                row["picture"] = row["picture"].encode("utf-8", _ODD).decode()
            writer.write_table(pa.Table.from_pylist(group, pa.schema(columns)))


def _write_text(path: Path, rows: Iterator[Row], settings: Mapping[str, Any]) -> None:
    """Lines of JSON; or of CSV, with a sign between the values of a list."""
    columns = ["picture", "labels", "probs", *(["all_probs"] if settings["all_probs"] else [])]
    with path.open("w", encoding="utf-8", errors=_ODD, newline="") as file:
        # The signs that end a writer's own lines are those that it quotes, and a name may hold either.
        lines = SimpleNamespace(write=lambda line: file.write(line.removesuffix("\r\n") + "\n"))
        table = csv.writer(lines) if path.suffix.lower() == ".csv" else None
        if table:
            table.writerow(columns)
        for row in rows:
            row["probs"] = [round(prob, 6) for prob in row["probs"]]  # for people
            if "all_probs" in row:  # to rank by: all digits that a float32 has
                row["all_probs"] = [float(f"{prob:.9g}") for prob in row["all_probs"]]
            if table:
                table.writerow([row["picture"], *(BETWEEN.join(map(str, row[name])) for name in columns[1:])])
            else:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
