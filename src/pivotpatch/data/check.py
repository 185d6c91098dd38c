"""Tell what a data set holds: its labels and their company, missing, broken and doubled pictures."""

import hashlib
import os
import signal
import stat
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pivotpatch.data.decoding import check_header, decode_image
from pivotpatch.data.embedded import EmbeddedStore
from pivotpatch.data.loading import hold_signals
from pivotpatch.data.records import FileStore, ImageSource, RecordSet
from pivotpatch.errors import InputError

Depth = Literal["labels", "headers", "pixels"]
"""How far pictures are looked at: not at all, to their headers, or to their last pixel."""

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many pictures are done, and of how many."""

_CHUNK = 64
_HEAD = 8192
_ROWS = 1 << 14


@dataclass(frozen=True)
class BrokenPicture:
    """A picture that cannot be decoded, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class DataSummary:
    """What one data set holds.

    Attributes:
        address: where it is.
        num_records: N, its pictures.
        labels: the names of its labels.
        label_counts: (L,) pictures that show each label.
        unknown_share: share of all picture-label pairs of which nobody knows.
        histogram: how many pictures have no label, one, two, and so on.
        cooccurrence: (L,L) P(column | row): of the pictures that show the row's label and of which the column's is
            known, the share that shows the column's too; NaN where there is no such picture.
        pictures: whether they are files, inside a table, or drawn when asked for.
        checked: how far they were looked at.
        missing: names of pictures whose files are not there.
        broken: pictures that are there and cannot be decoded, as far as was looked.
        duplicates: groups of names with the same content: the same bytes, or where pixels were checked, the same
            pixels.
    """

    address: str
    num_records: int
    labels: tuple[str, ...]
    label_counts: NDArray[np.int64]
    unknown_share: float
    histogram: tuple[int, ...]
    cooccurrence: NDArray[np.float64]
    pictures: Literal["files", "embedded", "drawn"]
    checked: Depth
    missing: tuple[str, ...] = ()
    broken: tuple[BrokenPicture, ...] = ()
    duplicates: tuple[tuple[str, ...], ...] = ()

    @property
    def labels_per_picture(self) -> float:
        """How many labels a picture has on average."""
        return float(self.label_counts.sum()) / self.num_records

    @property
    def never(self) -> tuple[str, ...]:
        """Labels that no picture shows."""
        return tuple(name for name, count in zip(self.labels, self.label_counts, strict=True) if count == 0)

    def to_dict(self) -> dict[str, object]:
        """All of it in types that JSON knows; NaN becomes None."""
        counts = dict(zip(self.labels, self.label_counts.tolist(), strict=True))
        company = [[None if np.isnan(p) else p for p in row] for row in self.cooccurrence.tolist()]
        derived = {"labels_per_picture": self.labels_per_picture, "never": self.never}
        return asdict(self) | {"label_counts": counts, "cooccurrence": company} | derived


class PictureAt(NamedTuple):
    """A picture of one of several data sets."""

    address: str
    name: str


@dataclass(frozen=True)
class DataReport:
    """What several data sets hold, and the groups of pictures with the same content that lie in more than one."""

    summaries: tuple[DataSummary, ...]
    shared: tuple[tuple[PictureAt, ...], ...]

    def to_dict(self) -> dict[str, object]:
        """All of it in types that JSON knows."""
        shared = [[picture._asdict() for picture in group] for group in self.shared]
        return {"summaries": [summary.to_dict() for summary in self.summaries], "shared": shared}


def check_data(
    sets: Sequence[RecordSet], *, depth: Depth = "headers", workers: int = 1, progress: Progress | None = None
) -> DataReport:
    """Summarise data sets, and look at their pictures.

    Equal pictures are found exactly: files with the same size and beginning are read to their end and compared by
    content. Pictures that are drawn when asked for cannot be missing or broken, and are not looked at.

    Args:
        sets: one or more data sets.
        depth: how far to look at pictures. "headers" finds what is missing or no picture at all; only "pixels" finds
            a picture that is cut short.
        workers: processes that decode; 1 decodes in this one.
        progress: told how many pictures have been looked at.
    """
    kinds = [_kind_of_pictures(records) for records in sets]
    total = sum(len(records) for records, kind in zip(sets, kinds, strict=True) if kind != "drawn")
    looks: list[list[_Look]] = []
    with _open_pool(depth, workers) as pool:
        for records, kind in zip(sets, kinds, strict=True):
            looks.append([])
            if depth == "labels" or kind == "drawn":
                continue
            done = sum(len(held) for held in looks)
            for results in _look_at(records, depth, pool):
                looks[-1].extend(results)
                if progress:
                    progress("look at pictures", done + len(looks[-1]), total)
        groups = list(_find_equal(sets, looks, depth))
    summaries = []
    for place, (records, kind) in enumerate(zip(sets, kinds, strict=True)):
        within = [[record for at, record in group if at == place] for group in groups]
        names = [tuple(_name(records, record) for record in group) for group in within if len(group) > 1]
        seen = depth if looks[place] else "labels"
        summaries.append(_summarise(records, looks[place], pictures=kind, checked=seen, duplicates=tuple(names)))
    across = (group for group in groups if len({at for at, _ in group}) > 1)
    shared = (tuple(PictureAt(sets[at].name, _name(sets[at], record)) for at, record in group) for group in across)
    return DataReport(tuple(summaries), tuple(shared))


class _Look(NamedTuple):
    """What one look at a picture tells.

    Attributes:
        key: the same for the same content; at a file's header, only a first sieve.
        fault: why it cannot be decoded.
        missing: whether its file is not there.
    """

    key: bytes = b""
    fault: str = ""
    missing: bool = False


def _kind_of_pictures(records: RecordSet) -> Literal["files", "embedded", "drawn"]:
    if not len(records):
        raise InputError(records.name, "holds no records", "give a data set with at least one picture")
    if isinstance(records.images, FileStore):
        return "files"
    return "embedded" if isinstance(records.images, EmbeddedStore) else "drawn"


def _name(records: RecordSet, index: int) -> str:
    return records.images.name(records.place(index))


def _source(records: RecordSet, index: int) -> ImageSource:
    return records.images.source(records.place(index))


def _digest(*pieces: bytes | memoryview) -> bytes:
    whole = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        whole.update(piece)
    return whole.digest()


def _look_at_header(source: ImageSource) -> _Look:
    if isinstance(source, bytes):
        return _Look(_digest(source), _find_header_fault(BytesIO(source)))
    assert isinstance(source, Path)  # drawn pictures never get here
    with source.open("rb") as file:
        key = _digest(os.fstat(file.fileno()).st_size.to_bytes(8, "little"), file.read(_HEAD))
        return _Look(key, _find_header_fault(file))


def _find_header_fault(file: IO[bytes]) -> str:
    file.seek(0)
    try:
        check_header(file)
    except InputError as error:
        return error.parts[1]
    return ""


def _look_at_pixels(source: ImageSource) -> _Look:
    try:
        pixels = np.ascontiguousarray(decode_image(source))
    except InputError as error:
        return _Look(fault=error.parts[1])
    return _Look(_digest(repr(pixels.shape).encode(), pixels.data))


def _look_closely(source: ImageSource, look: Callable[[ImageSource], _Look]) -> _Look:
    """One look, after the same first questions to a file however deep the look is: a pipe would never answer."""
    try:
        if isinstance(source, Path) and not stat.S_ISREG(source.stat().st_mode):
            return _Look(fault="is not a plain file")
        return look(source)
    except (FileNotFoundError, NotADirectoryError):
        return _Look(missing=True)
    except OSError as error:
        return _Look(fault=f"cannot be read ({error.strerror})")


def _look_at_headers_of(sources: Sequence[ImageSource]) -> list[_Look]:
    return [_look_closely(source, _look_at_header) for source in sources]


def _look_at_pixels_of(sources: Sequence[ImageSource]) -> list[_Look]:
    return [_look_closely(source, _look_at_pixels) for source in sources]


def _look_at(records: RecordSet, depth: Depth, pool: Executor | None) -> Iterator[list[_Look]]:
    """Looks at all pictures, in order, a few chunks ahead so that memory stays flat."""
    look = _look_at_pixels_of if depth == "pixels" else _look_at_headers_of
    pending: deque[Future[list[_Look]]] = deque()
    for start in range(0, len(records), _CHUNK):
        sources = [_source(records, index) for index in range(start, min(start + _CHUNK, len(records)))]
        if pool is None:
            yield look(sources)
            continue
        with hold_signals(signal.SIGINT):
            pending.append(pool.submit(look, sources))
        if len(pending) > 2 * (os.cpu_count() or 1):
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@contextmanager
def _open_pool(depth: Depth, workers: int) -> Iterator[Executor | None]:
    """Threads for headers, which wait for the disk; processes for pixels, which are work."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if depth == "labels" or (depth == "pixels" and workers == 1):
            yield None
            return
        pool: Executor = (
            ThreadPoolExecutor(8)
            if depth == "headers"
            else ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
        )
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Leave interrupts to the parent, which then ends the workers, and keep its screen clean."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")


def _find_equal(
    sets: Sequence[RecordSet], looks: Sequence[Sequence[_Look]], depth: Depth
) -> Iterator[list[tuple[int, int]]]:
    """Groups of pictures with equal content, each given by its data set and record."""
    sieve: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for place, held in enumerate(looks):
        for record, look in enumerate(held):
            if look.key and not look.fault:
                sieve[look.key].append((place, record))
    for key, group in sieve.items():
        if len(group) == 1:
            continue
        equal: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for place, record in group:
            source = _source(sets[place], record)
            equal[_hash_file(source) if depth == "headers" and isinstance(source, Path) else key].append(
                (place, record)
            )
        yield from (members for members in equal.values() if len(members) > 1)


def _hash_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()


def _summarise(
    records: RecordSet,
    looks: Sequence[_Look],
    *,
    pictures: Literal["files", "embedded", "drawn"],
    checked: Depth,
    duplicates: tuple[tuple[str, ...], ...],
) -> DataSummary:
    unknown = 0 if records.unknown is None else len(records.unknown.indices)
    return DataSummary(
        address=records.name,
        num_records=len(records),
        labels=records.labels.names,
        label_counts=np.bincount(records.positive.indices, minlength=len(records.labels)),
        unknown_share=unknown / (len(records) * len(records.labels)),
        histogram=tuple(np.bincount(np.diff(records.positive.offsets)).tolist()),
        cooccurrence=count_company(records),
        pictures=pictures,
        checked=checked,
        missing=tuple(_name(records, i) for i, look in enumerate(looks) if look.missing),
        broken=tuple(BrokenPicture(_name(records, i), look.fault) for i, look in enumerate(looks) if look.fault),
        duplicates=duplicates,
    )


def count_company(records: RecordSet) -> NDArray[np.float64]:
    """P(column | row) (L,L) as in `DataSummary.cooccurrence`."""
    together = torch.zeros(len(records.labels), len(records.labels), dtype=torch.float64)
    known = torch.zeros_like(together)
    for start in range(0, len(records), _ROWS):
        target = records.target(np.arange(start, min(start + _ROWS, len(records))))
        present = (target == 1).float()
        together += present.T @ present
        known += present.T @ (~target.isnan()).float()
    return (together / known).numpy()  # 0 / 0 is NaN: nothing is known
