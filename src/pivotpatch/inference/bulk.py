"""Tag any number of images: constant memory, any number of processes, and every row once whenever a process ends."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pivotpatch.data.loading import Batch, OnError, make_loader
from pivotpatch.data.records import LabelLists, LabelSpace, PathStore, RecordSet
from pivotpatch.errors import InputError
from pivotpatch.inference.bulk_job import BETWEEN, Summary, TagJob, make_schema
from pivotpatch.inference.engine import Engine
from pivotpatch.inference.prediction import TagRule
from pivotpatch.writing import holding

Progress = Callable[[str, int, int | None], None]
"""Told what is done, how much of it, and of how much."""

_PART_ROWS, _PART_NUMBERS = 1 << 13, 1 << 22  # of a part, at most
_PART_SECONDS = 10.0  # of work that a kill may cost
_TOLD = 10_000  # images between two words of progress while they are found
_SEGMENT = 1 << 20  # images that a loader is told of at once: a few bytes each


class Share(NamedTuple):
    """The part of all images that one of several processes takes, in one stretch.

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
        """The images that are this process's.

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
        all_probs: add a column with the probability of every label, in the order that the summary lists.
        note: what else the rows depend on, such as the model's name; plain types. It is kept in the summary, and work
            goes on only where it is the same.
        share: which images are this process's.
        overwrite: begin anew whatever is there; not for several processes at one file.
        batch_size: images at once.
        num_workers: processes that decode; 0, or less than a batch, decodes in this one.
        on_error: an image that cannot be read is listed, or ("error") ends the work with its `InputError`.
        progress: told how many images are found, then how many of this process's are done, and of how many.
        stopping: asked after each batch whether to stop; what is done is kept.
    """
    job = check_out(out, share, overwrite=overwrite, resume=paths is None)
    _check_labels(engine, job.out)
    settings = {
        **(note or {}),
        "labels": engine.labels,
        "top_k": rule.top_k,
        "thresholds": _find_limits(rule, engine),
        "all_probs": all_probs,
        "share": [share.rank, share.world] if share.shards else None,
    }
    with holding(job.lock, shared=not share.alone) as held:
        if not held:
            wrong = "another process is at work on it"
            raise InputError(str(job.out), wrong, "wait for it, or write to another file")
        if share.alone:
            job.clear_away(everything=overwrite)
        if not (job.resume(settings) if paths is None else job.begin(settings, _watch(paths, progress))):
            return Tagging(job.out, job.read_summary())
        mine = share.stretch(job.count)
        whole = mine if share.shards else range(job.count)
        tagger = _Tagger(engine, job, rule, batch_size=batch_size, num_workers=num_workers)
        try:
            if not tagger.tag(mine, on_error=on_error, progress=progress, stopping=stopping):
                return Tagging(job.out, None, stopped=True)
            return Tagging(job.out, None if job.find_gaps(whole) else job.join(whole))
        except (OSError, InputError):
            if not job.out.exists():
                raise
            return Tagging(job.out, job.read_summary())  # another process has finished it


def _watch(paths: Iterable[str], progress: Progress | None) -> Iterator[str]:
    """The same paths; tell how many have been found."""
    for number, path in enumerate(paths, 1):
        if progress and number % _TOLD == 0:
            progress("find images", number, None)
        yield path


def check_out(out: Path, share: Share, *, overwrite: bool = False, resume: bool = False) -> TagJob:
    """The files that `tag_pictures` would write; refused where it would not."""
    if not 0 <= share.rank < share.world:
        raise InputError("share", f"rank {share.rank} of {share.world}", "give a rank from 0 to world - 1")
    job = TagJob(share.name(out))
    if overwrite and not share.alone:
        wrong = f"{share.world} processes cannot tell what is old from what one of them has begun"
        raise InputError("--overwrite", wrong, f"remove {job.out} and {job.parts} first")
    # One of several processes may come when the others have finished; an end in the last moment leaves its parts.
    unfinished = job.parts.exists() or job.leftovers
    if job.out.exists() and not (overwrite or resume or share.world > 1 or unfinished):
        raise InputError(str(job.out), "exists already", "write to another file, or replace it with --overwrite")
    return job


def _check_labels(engine: Engine, out: Path) -> None:
    odd = [label for label in engine.labels if BETWEEN in label]
    if odd and out.suffix.lower() == ".csv":
        wrong = f"the label {odd[0]!r} holds {BETWEEN!r}, which stands between labels"
        raise InputError(str(out), wrong, "write .parquet or .jsonl")


def _find_limits(rule: TagRule, engine: Engine) -> tuple[float, ...] | None:
    """L numbers above which a label is given; None where probabilities of any size will do."""
    if rule.threshold is not None:
        return (rule.threshold,) * len(engine.labels)
    return None if rule.top_k is not None else engine.thresholds or (0.5,) * len(engine.labels)


class _Tagger:
    """Fills the parts of a job."""

    def __init__(self, engine: Engine, job: TagJob, rule: TagRule, *, batch_size: int, num_workers: int) -> None:
        self._engine = engine
        self._job = job
        self._labels = pa.array(engine.labels, pa.string())
        self._limits = np.array(_find_limits(rule, engine) or -1, dtype=np.float32)
        self._top_k = rule.top_k
        self._schema = make_schema(len(engine.labels) if job.settings["all_probs"] else None)
        self._batch_size = batch_size
        self._num_workers = num_workers

    def tag(
        self, mine: range, *, on_error: OnError, progress: Progress | None, stopping: Callable[[], bool] | None
    ) -> bool:
        """Do what is left of a stretch; whether it came to its end."""
        gaps = self._job.find_gaps(mine)
        done = len(mine) - sum(map(len, gaps))
        progress = progress or (lambda *_: None)
        if gaps:
            progress("tag", done, len(mine))
        for segment in (gap[at : at + _SEGMENT] for gap in gaps for at in range(0, len(gap), _SEGMENT)):
            with _Part(self._job, segment.start, most=min(_PART_ROWS, _PART_NUMBERS // len(self._labels) + 1)) as part:
                store = self._job.list_images(segment)
                for batch in self._load(store):
                    if batch.failures and on_error == "error":
                        raise batch.failures[0].error
                    rows = self._make_rows(batch, store)
                    part.add(rows)
                    done += len(rows)
                    progress("tag", done, len(mine))
                    if stopping and stopping():
                        return False
        return True

    def _load(self, store: PathStore) -> Iterator[Batch]:
        """All images of a store in order."""
        nothing_known = LabelLists(np.zeros(len(store) + 1, dtype=np.int64), np.empty(0, dtype=np.int32))
        loader = make_loader(
            RecordSet("pictures", LabelSpace(("any",)), images=store, positive=nothing_known),
            size=(self._engine.picture_size, self._engine.picture_size),
            batch_size=self._batch_size,
            num_workers=min(self._num_workers, len(store) // self._batch_size),  # few images are not worth a start
            on_error="skip",
            every_batch=True,
        )
        for batch in loader:
            loader.failures.clear()  # they are in the batch, and may be many
            yield batch

    def _make_rows(self, batch: Batch, store: PathStore) -> pa.Table:
        """A row for each image of a batch, read or not."""
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
            "picture": [store.name(place) for place in places.tolist()],
            "labels": pa.ListArray.from_arrays(offsets, self._labels.take(pa.array(ranked[given]))),
            "probs": pa.ListArray.from_arrays(offsets, pa.array(np.take_along_axis(probs, ranked, axis=1)[given])),
            "all_probs": pa.FixedSizeListArray.from_arrays(pa.array(probs.ravel()), len(self._labels)),
            "error": [errors.get(place) for place in places.tolist()],
        }
        return pa.table({name: columns[name] for name in self._schema.names}, schema=self._schema)


class _Part:
    """Rows on their way to the disk: written when they are many, some seconds old, or at the end, whatever ends it."""

    def __init__(self, job: TagJob, start: int, *, most: int) -> None:
        self._job = job
        self._start = start
        self._most = most
        self._held: list[pa.Table] = []
        self._since = time.monotonic()

    def __enter__(self) -> "_Part":
        return self

    def __exit__(self, *_: object) -> None:
        self._write()

    def add(self, rows: pa.Table) -> None:
        """Take the rows that come next."""
        self._held.append(rows)
        if sum(map(len, self._held)) >= self._most or time.monotonic() - self._since > _PART_SECONDS:
            self._write()

    def _write(self) -> None:
        if self._held:
            rows = pa.concat_tables(self._held)
            self._job.write(self._start, rows)
            self._start += len(rows)
        self._held, self._since = [], time.monotonic()
