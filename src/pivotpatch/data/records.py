"""What every reader returns: a label space and records, held in columns so that millions fit in memory."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, overload

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from pivotpatch.errors import InputError, choose_one_of, shorten
from pivotpatch.runtime.files import check_name

ImageSource = Path | bytes | NDArray[np.uint8]
"""An image: a file, its encoded bytes, or decoded RGB pixels (H,W,3)."""
Tell = Callable[[str], None]
"""Takes one line about what can be used, but perhaps not as its owner thinks."""
_BATCH = 1 << 16  # paths that are held at once while a list of them is written


@dataclass(frozen=True)
class LabelSpace:
    """The labels of a data set, in the order of every target and logit."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice or not self.names:
            wrong = f"{shorten(twice)} stand twice" if twice else "there is no label at all"
            raise InputError("labels", wrong, "give at least one label, and each once")
        for name in self.names:
            check_name(name, where="labels")

    def __len__(self) -> int:
        return len(self.names)

    def index(self, name: str) -> int:
        """Position of a label; an unknown name is answered with the nearest one."""
        try:
            return self.names.index(name)
        except ValueError:
            raise InputError("labels", f"unknown label {name!r}", choose_one_of(name, self.names)) from None


@dataclass(frozen=True, slots=True)
class Record:
    """One image and what is known of it."""

    name: str  # in its data set, for people and for messages
    image: ImageSource
    positive: tuple[int, ...]  # indices of the labels that are present
    unknown: tuple[int, ...] = ()  # indices of the labels nobody looked for; all others are absent


class LabelLists:
    """A list of label indices for each record, flat: all `indices`, and (N+1,) `offsets` where each record's start."""

    def __init__(self, offsets: NDArray[np.int64], indices: NDArray[np.int32]) -> None:
        self.offsets = offsets
        self.indices = indices

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[int]]) -> "LabelLists":
        """Pack one sequence of indices per record."""
        held = list(lists)
        offsets = np.zeros(len(held) + 1, dtype=np.int64)
        np.cumsum([len(item) for item in held], out=offsets[1:])
        return cls(offsets, np.fromiter((i for item in held for i in item), dtype=np.int32, count=int(offsets[-1])))

    @classmethod
    def from_pairs(cls, rows: NDArray[np.int64], indices: NDArray[np.int64], *, count: int) -> "LabelLists":
        """Pack (record, index) pairs of `count` records, given in any order; a pair that comes twice counts once.

        >>> lists = LabelLists.from_pairs(np.array([2, 0, 2, 2]), np.array([7, 3, 1, 7]), count=4)
        >>> [lists[record] for record in range(4)]
        [(3,), (), (1, 7), ()]
        """
        width = int(indices.max(initial=0)) + 1
        # Not np.unique: pairs are mostly in order already, which a stable sort uses and hashing does not.
        keys = np.sort(rows * width + indices, kind="stable")
        keys = keys[np.diff(keys, prepend=-1) > 0]
        return cls(np.searchsorted(keys, np.arange(count + 1) * width), (keys % width).astype(np.int32))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(self.indices[self.offsets[index] : self.offsets[index + 1]].tolist())

    def rows(self) -> NDArray[np.int64]:
        """The record of each entry of `indices`."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.offsets))

    def select(self, order: NDArray[np.int64]) -> "LabelLists":
        """The lists of the records `order` names, in that order."""
        lengths = self.offsets[order + 1] - self.offsets[order]
        offsets = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        return LabelLists(offsets, self.indices[np.repeat(self.offsets[order], lengths) + within])

    def renumber(self, position: NDArray[np.int64]) -> "LabelLists":
        """Replace each index by its `position`, and leave it out where that is negative."""
        indices = position[self.indices]
        return LabelLists.from_pairs(self.rows()[indices >= 0], indices[indices >= 0], count=len(self))


class ImageStore(Protocol):
    """The images of a data set, fetched one at a time."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The image's name, without fetching it."""
        ...

    def source(self, index: int) -> ImageSource:
        """The image itself."""
        ...


class FileStore:
    """Images that are files; their paths lie in one Arrow column, as text or, where not all is UTF-8, as bytes."""

    def __init__(self, root: Path, paths: pa.Array | pa.ChunkedArray) -> None:
        self.root = root
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """The path as the data set gives it; signs that are not UTF-8 are replaced."""
        return os.fsencode(self.paths[index].as_py()).decode("utf-8", "replace")

    def source(self, index: int) -> Path:
        """The file."""
        return self.root / os.fsdecode(self.paths[index].as_py())


def write_paths(paths: Iterable[str], file: Path) -> tuple[int, str]:
    """Write paths to an Arrow file as they come; returns how many, and a digest of them in this order."""
    length, digest, rest = 0, hashlib.sha256(), iter(paths)
    schema = pa.schema([("path", pa.binary())])  # a name need not be UTF-8
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_file(stream, schema) as writer:
        while batch := [os.fsencode(path) for path in islice(rest, _BATCH)]:
            writer.write(pa.record_batch([pa.array(batch, pa.binary())], schema))
            digest.update(b"\0".join([*batch, b""]))
            length += len(batch)
    return length, digest.hexdigest()


class RecordSet(Sequence[Record]):
    """The records of one split of one data set; `name` is its address, `unknown` are labels nobody looked for."""

    def __init__(
        self,
        name: str,
        labels: LabelSpace,
        *,
        images: ImageStore,
        positive: LabelLists,
        unknown: LabelLists | None = None,
        order: NDArray[np.int64] | None = None,
    ) -> None:
        self.name, self.labels, self.images = name, labels, images
        self.positive, self.unknown = positive, unknown
        self.order = order  # position in `images` of each record; None where they agree, which costs nothing
        assert len(positive) == (len(images) if order is None else len(order))
        assert unknown is None or len(unknown) == len(positive)

    def __len__(self) -> int:
        return len(self.positive)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> "RecordSet": ...
    def __getitem__(self, index: int | slice) -> "Record | RecordSet":
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        index = range(len(self))[index]
        place = self.place(index)
        unknown = () if self.unknown is None else self.unknown[index]
        return Record(self.images.name(place), self.images.source(place), self.positive[index], unknown)

    def place(self, index: int) -> int:
        """Position in `images` of the record `index`."""
        return index if self.order is None else int(self.order[index])

    def select(self, indices: NDArray[np.int64]) -> "RecordSet":
        """The records `indices` names, in that order; images are shared, not copied."""
        indices = np.asarray(indices, dtype=np.int64)
        order = indices if self.order is None else self.order[indices]
        positive = self.positive.select(indices)
        unknown = None if self.unknown is None else self.unknown.select(indices)
        return RecordSet(self.name, self.labels, images=self.images, positive=positive, unknown=unknown, order=order)

    def keep_labels(self, names: Sequence[str]) -> "RecordSet":
        """The same images with these labels alone, in this order; an image that has none of them stays."""
        position = np.full(len(self.labels), -1, dtype=np.int64)
        position[[self.labels.index(name) for name in names]] = np.arange(len(names))
        positive = self.positive.renumber(position)
        unknown = None if self.unknown is None else self.unknown.renumber(position)
        labels = LabelSpace(tuple(names))
        return RecordSet(self.name, labels, images=self.images, positive=positive, unknown=unknown, order=self.order)

    def target(self, indices: NDArray[np.int64] | None = None) -> Tensor:
        """Target (N,L) of the records, or of those `indices` names: 1 present, 0 absent, NaN unknown."""
        chosen = self if indices is None else self.select(indices)
        target = torch.zeros(len(chosen), len(self.labels))
        target[chosen.positive.rows(), chosen.positive.indices.astype(np.int64)] = 1.0
        if chosen.unknown is not None:
            target[chosen.unknown.rows(), chosen.unknown.indices.astype(np.int64)] = torch.nan
        return target


def keep_common_labels(records: RecordSet, labels: Sequence[str], *, whose: str, tell: Tell) -> RecordSet:
    """The same images with the labels that both know alone, in the order of `labels`.

    `whose` names the owner of `labels`; `tell` hears what is judged and what is left out, if the data set lacks some.
    """
    asked, there = dict.fromkeys(labels), dict.fromkeys(records.labels.names)
    common = [name for name in asked if name in there]
    missing = [name for name in asked if name not in there]
    others = [name for name in there if name not in asked]
    if not common:
        wrong = f"{whose} knows none of its labels ({shorten(others)})"
        raise InputError(records.name, wrong, choose_one_of(others[0], labels))
    if missing:
        unknown = f"; not known to {whose}: {shorten(others)}" if others else ""
        judged = f"judging {len(common)} of {len(labels)} labels: {shorten(common, limit=10)}"
        tell(f"{judged}; not in {records.name}: {shorten(missing)}{unknown}")
    return records if tuple(common) == records.labels.names else records.keep_labels(common)
