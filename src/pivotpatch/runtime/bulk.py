"""Tag any number of images: constant memory, any number of processes, and every row once whenever a process ends.

Unfinished work lies in `tags.parquet.parts/`: settings.json, the list of images (images.jsonl), and a part for each
stretch of the list that is done, rows as lines of JSON in a file named by its first image and the one after its last.
A part is there whole or not at all, and nothing else says how far the work is, so that it can end at any moment and go
on with any number of processes. In the end the parts become one file; once that is there, the work is finished.
"""

import csv
import glob
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pivotpatch.errors import InputError, cut, import_extra
from pivotpatch.process import Share
from pivotpatch.runtime.decoding import decode_image, read_ahead
from pivotpatch.runtime.engine import Engine
from pivotpatch.runtime.prediction import TagRule
from pivotpatch.runtime.tag_names import TagRules
from pivotpatch.writing import explain_disk_faults, flush, holding

Progress = Callable[[str, int, int | None], None]
"""Told what is done, how much of it, and of how much."""
Row = dict[str, Any]
"""What is known of one image: its name as `picture`, and its `labels` and their `probs`, or an `error`."""

SUFFIXES = (".parquet", ".jsonl", ".csv")
_SETTINGS, _IMAGES = "settings.json", "images.jsonl"
_UNREAD = "unread"  # in the settings' file
_ROWS, _NUMBERS = 1 << 13, 1 << 20  # held at once, at most
_PART_SECONDS = 10.0  # of work that a kill may cost
_TOLD = 10_000  # images between two words of progress while they are found
_BETWEEN = "|"  # stands between the labels of a CSV file
_ODD = "backslashreplace"  # what becomes of a file's name that is no Unicode; JSON reads it back


FITTED = TagRule()
ALONE = Share()


@dataclass(frozen=True)
class Summary:
    """How many images there were, how many have a row or could not be read, and what the rows depend on.

    Attributes:
        pictures: images that were named.
        tagged: those with a row.
        failed: those that could not be read.
        settings: what the rows depend on.
        unread: files that were no images that can be read here, by suffix.
    """

    pictures: int
    tagged: int
    failed: int
    settings: Mapping[str, Any]
    unread: Mapping[str, int] = field(default_factory=dict)


def tag_pictures(
    engine: Engine,
    paths: Iterable[str] | None,
    out: Path,
    *,
    rule: TagRule = FITTED,
    rules: TagRules | None = None,
    all_probs: bool = False,
    unread: Mapping[str, int] | None = None,
    note: Mapping[str, Any] | None = None,
    share: Share = ALONE,
    overwrite: bool = False,
    batch_size: int = 64,
    threads: int = 1,
    on_error: Literal["skip", "error"] = "skip",
    progress: Progress | None = None,
    stopping: Callable[[], bool] | None = None,
) -> Summary | None:
    """Write the tags of images to a file, one row per image in the order of `paths`.

    Columns are `picture`, `labels` and `probs`, both lists with the most probable first. What could not be read is
    listed in `<out>.failures.jsonl` instead, settings and counts are in `<out>.summary.json`.

    Work that was ended in whatever way goes on where the same is asked for again: no row is lost and none comes twice.
    Processes that share the work need not start or end together, nor be as many as before. Any other that comes while
    one is at work is refused (not on Windows, nor on network disks without locks).

    Args:
        engine: the model.
        paths: files, as `find_images` yields them; None goes on with the images that unfinished work began with.
        out: a .parquet, .jsonl or .csv file.
        rule: which labels an image gets.
        rules: which of them become tags, and what those are called.
        all_probs: add a column with the probability of every label, in the order that the summary lists.
        unread: files that were left out, by suffix, for the summary; complete once all `paths` have come.
        note: what else the rows depend on, such as the model's name; plain types. It is kept in the summary, and work
            goes on only where it is the same.
        share: which images are this process's.
        overwrite: begin anew whatever is there; not for several processes at one file.
        batch_size: images at once.
        threads: that decode while the model is at work.
        on_error: an image that cannot be read is listed, or ("error") ends the work with its `InputError`.
        progress: told how many images are found, then how many of this process's are done, and of how many.
        stopping: asked after each batch whether to stop; what is done is kept.

    Returns:
        What came of it; None where it was stopped, or other processes have not finished their shares.
    """
    job = check_out(out, share, overwrite=overwrite, resume=paths is None)
    names = engine.labels if rules is None else (*map(rules.call, engine.labels), *rules.added)
    odd = [label for label in names if _BETWEEN in label]
    if odd and out.suffix.lower() == ".csv":
        wrong = f"the label {odd[0]!r} holds {_BETWEEN!r}, which stands between labels"
        raise InputError(str(out), wrong, "write .parquet or .jsonl")
    settings = {
        **(note or {}),
        "labels": engine.labels,
        "thresholds": engine.thresholds,
        **asdict(rule),
        "tags": rules and {**asdict(rules), "rename": dict(zip(engine.labels, names, strict=False))},
        "all_probs": all_probs,
        "share": [share.rank, share.world] if share.shards else None,
    }
    tell = progress or (lambda *_: None)
    with holding(job.lock, shared=not share.alone) as held:
        if not held:
            raise InputError(str(job.out), "another process is at work on it", "wait for it, or write to another file")
        if share.alone:
            job.clear_away(everything=overwrite)
        if not (job.resume(settings) if paths is None else job.begin(settings, _watch(paths, tell), unread)):
            return job.read_summary()
        mine = share.stretch(job.settings["pictures"])
        gaps = job.find_gaps(mine)
        done = len(mine) - sum(map(len, gaps))
        if gaps:
            tell("tag", done, len(mine))

        def goes_on(count: int) -> bool:
            nonlocal done
            done += count
            tell("tag", done, len(mine))
            return not (stopping and stopping())

        try:
            for gap in gaps:
                read = read_ahead(
                    job.list_images(gap),
                    lambda image: _read(image, engine.picture_size),
                    batch_size=batch_size,
                    threads=max(threads, 1),
                )
                images, stop = job.list_images(gap), on_error == "error"
                tagged = _tag(read, images, engine, rule, rules=rules, all_probs=all_probs, stop=stop)
                with closing(tagged), closing(read):
                    if not job.keep(gap.start, tagged, goes_on):
                        return None
            whole = mine if share.shards else range(job.settings["pictures"])
            return None if job.find_gaps(whole) else job.join(whole)
        except (OSError, InputError):
            if not job.out.exists():
                raise
            return job.read_summary()  # another process has finished it


def _watch(paths: Iterable[str], tell: Progress) -> Iterator[str]:
    """The same paths; tell how many have been found."""
    for number, path in enumerate(paths, 1):
        if number % _TOLD == 0:
            tell("find images", number, None)
        yield path


def _read(image: tuple[str, Path], side: int) -> NDArray[np.uint8]:
    """Pixels (S,S,3) of an image, given by its name and its file."""
    return decode_image(image[1], size=(side, side))


def _tag(
    read: Iterable[list[NDArray[np.uint8] | InputError]],
    images: Iterator[tuple[str, Path]],
    engine: Engine,
    rule: TagRule,
    *,
    rules: TagRules | None,
    all_probs: bool,
    stop: bool,
) -> Generator[list[Row], None, None]:
    """The rows of each batch, one for each image, read or not."""
    thresholds = np.array(engine.thresholds or (0.5,) * len(engine.labels), dtype=np.float32)
    for batch in read:
        pixels = [each for each in batch if not isinstance(each, InputError)]
        answers: Iterator[NDArray[np.float32]] = iter(engine.ask(np.stack(pixels)).probs if pixels else ())
        rows: list[Row] = []
        for each, (name, _) in zip(batch, images, strict=False):
            if isinstance(each, InputError):
                if stop:
                    raise each
                rows.append({"picture": name, "error": str(each)})
                continue
            probs = next(answers)
            given = rule.rank(probs, thresholds)
            tags = [(engine.labels[label], float(probs[label])) for label in given]
            tags = tags if rules is None else rules.apply(tags)
            row = {"picture": name, "labels": [label for label, _ in tags], "probs": [prob for _, prob in tags]}
            rows.append({**row, "all_probs": probs.tolist()} if all_probs else row)
        yield rows


def check_out(out: Path, share: Share, *, overwrite: bool = False, resume: bool = False) -> "TagJob":
    """The job that `tag_pictures` would do; refused where it would not."""
    if not 0 <= share.rank < share.world:
        raise InputError("share", f"rank {share.rank} of {share.world}", "give a rank from 0 to world - 1")
    if out.suffix.lower() not in SUFFIXES or out.is_dir():
        raise InputError(str(out), "is no file that tags can be written to", f"end it in {', '.join(SUFFIXES)}")
    if out.suffix.lower() == ".parquet":
        import_extra("pyarrow", "parquet")
    if not out.absolute().parent.is_dir():
        raise InputError(str(out), f"there is no folder {out.parent}", "make it first")
    job = TagJob(share.name(out))
    if overwrite and not share.alone:
        wrong = f"{share.world} processes cannot tell what is old from what one of them has begun"
        raise InputError("--overwrite", wrong, f"remove {job.out} and {job.parts} first")
    # One of several processes may come when the others have finished; an end in the last moment leaves its parts.
    unfinished = job.parts.exists() or job.leftovers
    if job.out.exists() and not (overwrite or resume or share.world > 1 or unfinished):
        raise InputError(str(job.out), "exists already", "write to another file, or replace it with --overwrite")
    return job


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

    @property
    def leftovers(self) -> list[Path]:
        """Hidden folders that a crash has left beside the parts."""
        return sorted(self.parts.parent.glob(f".{glob.escape(self.out.name)}.*.parts"))

    def clear_away(self, *, everything: bool) -> None:
        """Remove what a crash may have left beside the parts; or the parts, too, and the finished file."""
        for path in self.leftovers:
            shutil.rmtree(path, ignore_errors=True)
        if everything:
            self.remove_parts()
            self.out.unlink(missing_ok=True)

    def remove_parts(self) -> None:
        """Remove unfinished work, for others to see in one step."""
        gone = _hide(self.parts)
        with suppress(FileNotFoundError):
            self.parts.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def begin(self, settings: dict[str, Any], paths: Iterable[str], unread: Mapping[str, int] | None) -> bool:
        """List the images and begin, or go on where the same was begun; False where the same is finished."""
        scratch = _hide(self.parts)
        with explain_disk_faults(self.parts):
            scratch.mkdir()
            try:
                length, digest = _write_list(paths, scratch / _IMAGES)
                if length == 0:
                    raise InputError(str(self.out), "no image is named", "name files, folders or patterns")
                settings |= {"root": str(Path.cwd()), "pictures": length, "list": digest}
                kept = {**settings, _UNREAD: {} if unread is None else unread}  # nothing that work must agree on
                (scratch / _SETTINGS).write_text(json.dumps(kept, indent=2) + "\n", "utf-8")
                for path in (*scratch.iterdir(), scratch):
                    flush(path)
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
        path = self.parts / _SETTINGS
        try:
            self.settings = json.loads(path.read_text("utf-8"))
            self.unread = self.settings.pop(_UNREAD, {})
        except FileNotFoundError:
            if self.out.exists():  # another process has finished it in this moment
                return self.resume(settings)
            raise InputError(str(self.parts), "there is no unfinished work", "name images to begin") from None
        except (OSError, ValueError) as error:
            raise InputError(str(path), f"cannot be read ({error})", "begin anew with --overwrite") from None
        _compare(self.settings, settings, where=str(self.parts))
        return True

    def list_images(self, stretch: range) -> Iterator[tuple[str, Path]]:
        """Name and file of each image of a stretch of the list, which is not held."""
        root = Path(self.settings["root"])
        with (self.parts / _IMAGES).open("rb") as lines:
            for line in islice(lines, stretch.start, stretch.stop):
                name = json.loads(line)
                yield name, root / name

    def find_gaps(self, stretch: range) -> list[range]:
        """What is left to do of a stretch of the list."""
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
            written = _hide(self.parts / "part")  # where it stays after a crash, it goes with the folder
            with explain_disk_faults(self.parts):
                written.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
                flush(written)
                written.replace(self._name(start, after))
                flush(self.parts)
        return after

    def join(self, stretch: range) -> Summary:
        """Make the file of a stretch all of which is done, then remove the parts."""
        out, failures, told = (_hide(self.parts / path.name) for path in (self.out, self.failures, self.summary))
        failed = 0

        def list_tagged() -> Iterator[Row]:
            nonlocal failed
            with failures.open("w", encoding="utf-8", errors=_ODD) as listed:
                for row in self._read(stretch):
                    if "error" in row:
                        listed.write(json.dumps(row, ensure_ascii=False) + "\n")
                        failed += 1
                    else:
                        yield row

        with explain_disk_faults(self.parts):
            write = _write_parquet if self.out.suffix.lower() == ".parquet" else _write_text
            write(out, list_tagged(), self.settings)
            summary = Summary(len(stretch), len(stretch) - failed, failed, self.settings, self.unread)
            told.write_text(json.dumps(asdict(summary), indent=2, ensure_ascii=False) + "\n", "utf-8", _ODD)
            for path in (out, failures, told):
                flush(path)
            if failed:
                failures.replace(self.failures)
            else:
                self.failures.unlink(missing_ok=True)  # of earlier work
            told.replace(self.summary)
            out.replace(self.out)  # the last: now the work is finished
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

    def _name(self, first: int, after: int) -> Path:
        return self.parts / f"{first:010d}-{after:010d}.jsonl"

    def _find_parts(self) -> list[tuple[int, int]]:
        """Stretches that are done, in order."""
        names = (re.fullmatch(r"(\d+)-(\d+)\.jsonl", name) for name in os.listdir(self.parts))  # noqa: PTH208
        return sorted((int(name[1]), int(name[2])) for name in names if name)

    def _read(self, stretch: range) -> Iterator[Row]:
        """Rows of a stretch, each image's once, in order; parts overlap where two runs have worked side by side."""
        at = stretch.start
        for first, after in self._find_parts():
            if first < stretch.stop and after > at:
                assert first <= at, "nothing is missing"
                path = self._name(first, after)
                try:
                    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
                except ValueError:
                    rows = []
                if len(rows) != after - first:
                    raise InputError(str(path), "damaged or cut short", "remove it, and its images are tagged again")
                yield from rows[at - first : stretch.stop - first]
                at = after


def _write_list(paths: Iterable[str], path: Path) -> tuple[int, str]:
    """Write a list of images, a JSON string per line; how many there are, and a digest of the list."""
    count, digest = 0, sha256()
    with path.open("wb") as file:
        for count, name in enumerate(paths, 1):  # noqa: B007
            line = json.dumps(name).encode() + b"\n"
            digest.update(line)
            file.write(line)
    return count, digest.hexdigest()


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


def _hide(path: Path) -> Path:
    """A hidden name that nobody else has, in the same folder."""
    return path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")


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
        table = csv.writer(file, lineterminator="\n") if path.suffix.lower() == ".csv" else None
        if table:
            table.writerow(columns)
        for row in rows:
            for name in columns[2:]:
                row[name] = [round(prob, 6) for prob in row[name]]  # further digits of a float32 say nothing
            if table:
                table.writerow([row["picture"], *(_BETWEEN.join(map(str, row[name])) for name in columns[1:])])
            else:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
