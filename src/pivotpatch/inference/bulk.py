"""Tag any number of pictures: constant memory, any number of processes, and every row once whenever a process ends."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from pivotpatch.data.loading import Batch, OnError, make_loader
from pivotpatch.data.records import LabelLists, LabelSpace, PathStore, RecordSet
from pivotpatch.errors import InputError
from pivotpatch.inference.bulk_file import (
    BETWEEN,
    Parts,
    Summary,
    TagFiles,
    clear_away,
    make_schema,
    name_files,
    read_summary,
)
from pivotpatch.inference.engine import Engine
from pivotpatch.inference.prediction import Prediction, Tag
from pivotpatch.writing import holding

Progress = Callable[[str, int, int | None], None]
"""Told what is done, how much of it, and of how much."""

_PART_ROWS, _PART_NUMBERS = 1 << 13, 1 << 22  # of a part, at most
_PART_SECONDS = 10.0  # of work that a kill may cost
_TOLD = 10_000  # pictures between two words of progress while they are found
_SEGMENT = 1 << 20  # pictures that a loader is told of at once: a few bytes each


@dataclass(frozen=True)
class TagRule:
    """Which labels a picture gets; the fitted thresholds decide by default.

    Attributes:
        threshold: takes the place of all thresholds.
        top_k: most labels; without a threshold, the most probable ones whatever their thresholds.
    """

    threshold: float | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise InputError("threshold", f"{self.threshold} is no probability", "give 0 to 1")
        if self.top_k is not None and self.top_k < 1:
            raise InputError("top_k", f"it is {self.top_k}", "give 1 or more")

    def limits(self, engine: Engine) -> tuple[float, ...] | None:
        """L numbers above which a label is given; None where probabilities of any size will do."""
        if self.threshold is not None:
            return (self.threshold,) * len(engine.labels)
        return None if self.top_k is not None else engine.thresholds or (0.5,) * len(engine.labels)

    def choose(self, prediction: Prediction) -> tuple[Tag, ...]:
        """The tags of one picture, the most probable first."""
        if self.threshold is not None:
            prediction = replace(prediction, thresholds=torch.full_like(prediction.thresholds, self.threshold))
        elif self.top_k is not None:
            return prediction.top(self.top_k)
        return prediction.tags[: self.top_k]


class Share(NamedTuple):
    """The part of all pictures that one of several processes takes, in one stretch.

    Attributes:
        rank: the number of the process.
        world: how many there are.
        shards: whether each makes a file of its own, so that they need not see each other's disk; else the last one to
            finish makes the one file.
    """

    rank: int = 0
    world: int = 1
    shards: bool = False

    @property
    def alone(self) -> bool:
        """Whether no other process works for the same file."""
        return self.shards or self.world == 1

    def name(self, out: Path) -> Path:
        """The file that this process works for."""
        return out.with_stem(f"{out.stem}-{self.rank:05d}-of-{self.world:05d}") if self.shards else out

    def stretch(self, count: int) -> range:
        """The pictures that are this process's.

        >>> [Share(rank, 3).stretch(10) for rank in range(3)]
        [range(0, 3), range(3, 6), range(6, 10)]
        """
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world)


FITTED = TagRule()
ALONE = Share()


class Tagging(NamedTuple):
    """How far the work is.

    Attributes:
        out: the file that is worked for.
        summary: what came of it; None as long as it is not finished, here or in other processes.
        stopped: whether it was asked to stop.
    """

    out: Path
    summary: Summary | None
    stopped: bool = False


def tag_pictures(
    engine: Engine,
    paths: Iterable[str] | None,
    out: Path,
    *,
    rule: TagRule = FITTED,
    all_probs: bool = False,
    note: Mapping[str, Any] | None = None,
    share: Share = ALONE,
    overwrite: bool = False,
    batch_size: int = 64,
    num_workers: int = 0,
    on_error: OnError = "skip",
    progress: Progress | None = None,
    stopping: Callable[[], bool] | None = None,
) -> Tagging:
    """Write the tags of pictures to a file, one row a picture in the order of `paths`.

    Columns are `picture`, `labels` and `probs`, both lists with the most probable first. What could not be read is
    listed in `<out>.failures.jsonl` instead, settings and counts are in `<out>.summary.json`.

    Work that was ended in whatever way goes on where the same is asked for again: no row is lost and none comes twice.
    Processes that share the work need not start or end together, nor be as many as before. Any other that comes while
    one is at work is refused (not on Windows, nor on network disks without locks).

    Args:
        engine: the network.
        paths: files, as `find_images` yields them; None goes on with the pictures that unfinished work began with.
        out: a .parquet, .jsonl or .csv file.
        rule: which labels a picture gets.
        all_probs: add a column with the probability of every label, in the order that the summary lists.
        note: what else the rows depend on, such as the model's name; plain types. It is kept in the summary, and work
            goes on only where it is the same.
        share: which pictures are this process's.
        overwrite: begin anew whatever is there; not for several processes at one file.
        batch_size: pictures at once.
        num_workers: processes that decode; 0, or less than a batch, decodes in this one.
        on_error: a picture that cannot be read is listed, or ("error") ends the work with its `InputError`.
        progress: told how many pictures are found, then how many of this process's are done, and of how many.
        stopping: asked after each batch whether to stop; what is done is kept.
    """
    files = check_out(out, share, overwrite=overwrite, resume=paths is None)
    _check_labels(engine, files)
    settings = {
        **(note or {}),
        "labels": engine.labels,
        "top_k": rule.top_k,
        "thresholds": rule.limits(engine),
        "all_probs": all_probs,
        "share": [share.rank, share.world] if share.shards else None,
    }
    with holding(files.lock, shared=not share.alone) as held:
        if not held:
            wrong = "another process is at work on it"
            raise InputError(str(files.out), wrong, "wait for it, or write to another file")
        if share.alone:
            clear_away(files, everything=overwrite)
        parts = (
            Parts.resume(files, settings) if paths is None else Parts.begin(files, settings, _watch(paths, progress))
        )
        if parts is None:
            return Tagging(files.out, read_summary(files))
        tagger = _Tagger(engine, parts, rule=rule, all_probs=all_probs, batch_size=batch_size, num_workers=num_workers)
        mine = share.stretch(parts.count)
        whole = mine if share.shards else range(parts.count)
        try:
            if not tagger.tag(mine, on_error=on_error, progress=progress, stopping=stopping):
                return Tagging(files.out, None, stopped=True)
            return Tagging(files.out, None if parts.find_gaps(whole) else parts.join(whole))
        except (OSError, InputError):
            if not files.out.exists():
                raise
            return Tagging(files.out, read_summary(files))  # another process has finished it


def _watch(paths: Iterable[str], progress: Progress | None) -> Iterator[str]:
    """The same paths; tell how many have been found."""
    for number, path in enumerate(paths, 1):
        if progress and number % _TOLD == 0:
            progress("find pictures", number, None)
        yield path


def check_out(out: Path, share: Share, *, overwrite: bool = False, resume: bool = False) -> TagFiles:
    """The files that `tag_pictures` would write; refused where it would not."""
    if not 0 <= share.rank < share.world:
        raise InputError("share", f"rank {share.rank} of {share.world}", "give a rank from 0 to world - 1")
    files = name_files(share.name(out))
    if overwrite and not share.alone:
        wrong = f"{share.world} processes cannot tell what is old from what one of them has begun"
        raise InputError("--overwrite", wrong, f"remove {files.out} and {files.parts} first")
    # One of several processes may come when the others have finished; an end in the last moment leaves its parts.
    if files.out.exists() and not (overwrite or resume or share.world > 1 or files.unfinished):
        raise InputError(str(files.out), "exists already", "write to another file, or replace it with --overwrite")
    return files


def _check_labels(engine: Engine, files: TagFiles) -> None:
    odd = [label for label in engine.labels if BETWEEN in label]
    if odd and files.out.suffix.lower() == ".csv":
        wrong = f"the label {odd[0]!r} holds {BETWEEN!r}, which stands between labels"
        raise InputError(str(files.out), wrong, "write .parquet or .jsonl")


class _Tagger:
    """Fills the parts."""

    def __init__(
        self, engine: Engine, parts: Parts, *, rule: TagRule, all_probs: bool, batch_size: int, num_workers: int
    ) -> None:
        self._engine = engine
        self._parts = parts
        self._labels = pa.array(engine.labels, pa.string())
        self._limits = np.array(rule.limits(engine) or -1, dtype=np.float32)
        self._top_k = rule.top_k
        self._schema = make_schema(len(engine.labels) if all_probs else None)
        self._batch_size = batch_size
        self._num_workers = num_workers

    def tag(
        self, mine: range, *, on_error: OnError, progress: Progress | None, stopping: Callable[[], bool] | None
    ) -> bool:
        """Do what is left of a stretch; whether it came to its end."""
        gaps = self._parts.find_gaps(mine)
        done = len(mine) - sum(map(len, gaps))
        progress = progress or (lambda *_: None)
        if gaps:
            progress("tag", done, len(mine))
        for segment in (gap[at : at + _SEGMENT] for gap in gaps for at in range(0, len(gap), _SEGMENT)):
            store = self._parts.pictures(segment)
            part = _Part(self._parts, segment.start, most=min(_PART_ROWS, _PART_NUMBERS // len(self._labels) + 1))
            for batch in self._load(store):
                if batch.failures and on_error == "error":
                    part.write()
                    raise batch.failures[0].error
                rows = self._make_rows(batch, store, start=segment.start)
                part.add(rows)
                done += len(rows)
                progress("tag", done, len(mine))
                if stopping and stopping():
                    part.write()
                    return False
            part.write()
        return True

    def _load(self, store: PathStore) -> Iterator[Batch]:
        """All pictures of a store in order."""
        nothing_known = LabelLists(np.zeros(len(store) + 1, dtype=np.int64), np.empty(0, dtype=np.int32))
        loader = make_loader(
            RecordSet("pictures", LabelSpace(("any",)), images=store, positive=nothing_known),
            size=(self._engine.picture_size, self._engine.picture_size),
            batch_size=self._batch_size,
            num_workers=min(self._num_workers, len(store) // self._batch_size),  # few pictures are not worth a start
            on_error="skip",
            every_batch=True,
        )
        for batch in loader:
            loader.failures.clear()  # they are in the batch, and may be many
            yield batch

    def _make_rows(self, batch: Batch, store: PathStore, *, start: int) -> pa.Table:
        """A row for each picture of a batch, read or not."""
        errors = {failure.index: str(failure.error) for failure in batch.failures}
        places = np.sort(np.concatenate([batch.indices.numpy(), np.array(list(errors), dtype=np.int64)]))
        read = ~np.isin(places, list(errors))
        probs = np.zeros((len(places), len(self._labels)), dtype=np.float32)
        if read.any():
            probs[read] = self._engine(batch.images).probs.numpy()
        ranked = np.argsort(-probs, axis=1, kind="stable")[:, : self._top_k]
        given = np.take_along_axis((probs > self._limits) & read[:, None], ranked, axis=1)
        offsets = pa.array(np.concatenate([[0], given.sum(1).cumsum()]), pa.int32())
        columns = {
            "index": places + start,
            "picture": [store.name(place) for place in places.tolist()],
            "error": [errors.get(place) for place in places.tolist()],
            "labels": pa.ListArray.from_arrays(offsets, self._labels.take(pa.array(ranked[given]))),
            "probs": pa.ListArray.from_arrays(offsets, pa.array(np.take_along_axis(probs, ranked, axis=1)[given])),
            "all_probs": pa.FixedSizeListArray.from_arrays(pa.array(probs.ravel()), len(self._labels)),
        }
        return pa.table({name: columns[name] for name in self._schema.names}, schema=self._schema)


class _Part:
    """Rows on their way to the disk: written when they are many, or some seconds old."""

    def __init__(self, parts: Parts, start: int, *, most: int) -> None:
        self._parts = parts
        self._start = start
        self._most = most
        self._held: list[pa.Table] = []
        self._since = time.monotonic()

    def add(self, rows: pa.Table) -> None:
        """Take the rows that come next."""
        self._held.append(rows)
        if sum(map(len, self._held)) >= self._most or time.monotonic() - self._since > _PART_SECONDS:
            self.write()

    def write(self) -> None:
        """Keep what is there."""
        if self._held:
            rows = pa.concat_tables(self._held)
            self._parts.write(self._start, rows)
            self._start += len(rows)
            self._held = []
        self._since = time.monotonic()
