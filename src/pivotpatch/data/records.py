"""What every reader returns: a label space and records, held in columns so that millions fit in memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, overload

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from pivotpatch.data.files import check_name
from pivotpatch.errors import InputError, choose_one_of, shorten

ImageSource = Path | bytes | NDArray[np.uint8]
"""A picture: a file, its encoded bytes, or decoded RGB pixels (H,W,3)."""


@dataclass(frozen=True)
class LabelSpace:
    """The labels of a data set, in the order of every target and logit."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        twice = [name for name in self.names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
        if twice:
            raise InputError("labels", f"{shorten(twice)} stand twice", "give each label one name")
        if not self.names:
            raise InputError("labels", "there is no label at all", "give at least one")
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
    """One picture and what is known of it.

    Attributes:
        name: the picture's name in its data set, for people and for messages.
        image: where its pixels are.
        positive: indices of the labels that are present.
        unknown: indices of the labels nobody looked for; all others are absent.
    """

    name: str
    image: ImageSource
    positive: tuple[int, ...]
    unknown: tuple[int, ...] = ()


class LabelLists:
    """A list of label indices for each record, flat in two arrays.

    Attributes:
        offsets: (N+1,) where each record's indices start.
        indices: all of them, one record after the other.
    """

    def __init__(self, offsets: NDArray[np.int64], indices: NDArray[np.int32]) -> None:
        self.offsets = offsets
        self.indices = indices

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[int]]) -> "LabelLists":
        """Pack one sequence of indices a record."""
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
        rows, indices = np.divmod(np.unique(rows * width + indices), width)
        offsets = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
        return cls(offsets, indices.astype(np.int32))

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

    def renumber(self, position: NDArray[np.int32]) -> "LabelLists":
        """Replace each index by its `position`, and leave it out where that is negative."""
        indices = position[self.indices]
        kept = indices >= 0
        before = np.zeros(len(kept) + 1, dtype=np.int64)
        np.cumsum(kept, out=before[1:])
        return LabelLists(before[self.offsets], indices[kept])


class ImageStore(Protocol):
    """The pictures of a data set, fetched one at a time."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The picture's name, without fetching it."""
        ...

    def source(self, index: int) -> ImageSource:
        """The picture itself."""
        ...


class FileStore:
    """Pictures that are files; their paths lie in one Arrow column."""

    def __init__(self, root: Path, paths: pa.Array) -> None:
        self.root = root
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """The path as the data set gives it."""
        return str(self.paths[index].as_py())

    def source(self, index: int) -> Path:
        """The file."""
        return self.root / self.name(index)


class RecordSet(Sequence[Record]):
    """The records of one split of one data set.

    Attributes:
        name: its address, for messages.
        labels: the label space.
        images: the pictures.
        positive: labels present, a list a record.
        unknown: labels nobody looked for, a list a record.
    """

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
        self.name = name
        self.labels = labels
        self.images = images
        self.positive = positive
        self.unknown = unknown
        # Position in `images` of each record; None where they agree, which costs nothing.
        self.order = order
        count = len(images) if order is None else len(order)
        if len(positive) != count or (unknown is not None and len(unknown) != count):
            raise InputError(name, f"{count} pictures but {len(positive)} label lists", "give one list a picture")

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
        """The records `indices` names, in that order; pictures are shared, not copied."""
        indices = np.asarray(indices, dtype=np.int64)
        return RecordSet(
            self.name,
            self.labels,
            images=self.images,
            positive=self.positive.select(indices),
            unknown=None if self.unknown is None else self.unknown.select(indices),
            order=indices if self.order is None else self.order[indices],
        )

    def keep_labels(self, names: Sequence[str]) -> "RecordSet":
        """The same pictures with these labels alone, in this order; a picture that has none of them stays."""
        labels = LabelSpace(tuple(names))
        position = np.full(len(self.labels), -1, dtype=np.int32)
        position[[self.labels.index(name) for name in names]] = np.arange(len(names))
        return RecordSet(
            self.name,
            labels,
            images=self.images,
            positive=self.positive.renumber(position),
            unknown=None if self.unknown is None else self.unknown.renumber(position),
            order=self.order,
        )

    def target(self, indices: NDArray[np.int64] | None = None) -> Tensor:
        """Target (N,L) of the records, or of those `indices` names: 1 present, 0 absent, NaN unknown."""
        chosen = self if indices is None else self.select(indices)
        target = torch.zeros(len(chosen), len(self.labels))
        target[chosen.positive.rows(), chosen.positive.indices.astype(np.int64)] = 1.0
        if chosen.unknown is not None:
            target[chosen.unknown.rows(), chosen.unknown.indices.astype(np.int64)] = torch.nan
        return target
