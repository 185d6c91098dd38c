"""What every reader returns: a label space and records, held in columns so that millions fit in memory."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, overload

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from pivotpatch.errors import InputError, check_known, choose_one_of, shorten
from pivotpatch.runtime.decoding import ImageSource as ImageSource
from pivotpatch.runtime.files import check_name

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Tell = Callable[[str], None]
"""Takes one line about what can be used, but perhaps not as its owner thinks."""


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
        check_known(name, self.names, where="labels", what="label")
        return self.names.index(name)


@dataclass(frozen=True, slots=True)
class Record:
    """One image and what is known of it."""

    name: str  # in its data set, for people and for messages
    image: ImageSource
    positive: tuple[int, ...]  # indices of the labels that are present
    unknown: tuple[int, ...] = ()  # indices of the labels nobody looked for; all others are absent


def pack_states(
    rows: NDArray[np.int64],
    labels: NDArray[np.int64],
    *,
    shape: tuple[int, int],
    unknown: NDArray[np.bool_] | bool = False,
) -> "csr_array":
    """Label states (N,L) of (record, label) pairs in any order: 1 present, -1 unknown; twice the same counts once.

    >>> pack_states(np.array([1, 0, 1, 1]), np.array([0, 3, 1, 0]), shape=(2, 4)).toarray().tolist()
    [[0, 0, 0, 1], [1, 1, 0, 0]]
    """
    from scipy.sparse import csr_array  # one image is tagged without it

    # Not np.unique: pairs are mostly in order already, which a stable sort uses and hashing does not. Of a label that
    # is both, the unknown one sorts first and stays.
    keys = np.sort(2 * (rows * shape[1] + labels) + np.logical_not(unknown), kind="stable")
    keys = keys[np.diff(keys // 2, prepend=-1) > 0]
    offsets = np.searchsorted(keys // 2, np.arange(shape[0] + 1) * shape[1])
    kind = np.int32 if len(keys) < 1 << 31 else np.int64
    held = (keys % 2 * 2 - 1).astype(np.int8), (keys // 2 % shape[1]).astype(kind), offsets.astype(kind)
    return csr_array(held, shape=shape)


class ImageStore(Protocol):
    """The images of a data set, fetched one at a time."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The image's name, without fetching it."""
        ...

    def source(self, index: int) -> ImageSource:
        """The image itself."""
        ...


@dataclass(frozen=True, eq=False)
class FileStore:
    """Images that are files; their paths lie in one Arrow column of text."""

    root: Path
    paths: pa.Array | pa.ChunkedArray

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """The path as the data set gives it."""
        return str(self.paths[index].as_py())

    def source(self, index: int) -> Path:
        """The file."""
        return self.root / self.name(index)


@dataclass(eq=False, repr=False)
class RecordSet(Sequence[Record]):
    """The records of one split of one data set."""

    name: str  # its address
    labels: LabelSpace
    _: KW_ONLY
    images: ImageStore
    states: "csr_array" = None  # (N,L) 1 for a label that is present, -1 for one nobody looked for; None: all absent
    order: NDArray[np.int64] | None = None  # position in `images` of each record; None where they agree
    notes: tuple[str, ...] = ()  # what its owner may not expect, a line each

    def __post_init__(self) -> None:
        shape = len(self.images) if self.order is None else len(self.order), len(self.labels)
        if self.states is None:
            self.states = pack_states(*np.empty((2, 0), dtype=np.int64), shape=shape)
        assert self.states.shape == shape

    def __len__(self) -> int:
        return int(self.states.shape[0])

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> "RecordSet": ...
    def __getitem__(self, index: int | slice) -> "Record | RecordSet":
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        index = range(len(self))[index]
        held = slice(*self.states.indptr[index : index + 2])
        labels, states = self.states.indices[held], self.states.data[held]
        positive, unknown = (tuple(labels[states == state].tolist()) for state in (1, -1))
        return Record(self.name_at(index), self.source_at(index), positive, unknown)

    def place(self, index: int) -> int:
        """Position in `images` of the record `index`."""
        return index if self.order is None else int(self.order[index])

    def name_at(self, index: int) -> str:
        """The name of the record `index`, whose image is not fetched."""
        return self.images.name(self.place(index))

    @property
    def names(self) -> list[str]:
        """The name of each record, without its image."""
        return [self.name_at(index) for index in range(len(self))]

    def source_at(self, index: int) -> ImageSource:
        """The image of the record `index`."""
        return self.images.source(self.place(index))

    def select(self, indices: NDArray[np.int64]) -> "RecordSet":
        """The records `indices` names, in that order; images are shared, not copied."""
        indices = np.asarray(indices, dtype=np.int64)
        order = indices if self.order is None else self.order[indices]
        return replace(self, states=self.states[indices], order=order)

    def keep_labels(self, names: Sequence[str] | None) -> "RecordSet":
        """The same images with these labels alone, in this order (None: all); an image that has none of them stays."""
        if names is None or tuple(names) == self.labels.names:
            return self
        for name in names:
            check_known(name, self.labels.names, where=self.name, what="label")
        states = self.states[:, [self.labels.names.index(name) for name in names]].sorted_indices()
        return replace(self, states=states, labels=LabelSpace(tuple(names)))

    def count_labels(self, state: int = 1) -> NDArray[np.int64]:
        """How many images show each label, (L,); with -1, of how many it is unknown."""
        return np.bincount(self.states.indices[self.states.data == state], minlength=len(self.labels))

    def take_labels(self, names: Sequence[str], *, chosen: bool) -> "RecordSet":
        """The same images with these labels, in this order: unknown where this set has none such, which is noted.

        So are labels that are left out, unless they were `chosen` to be. A set without any of them is refused.
        """
        from scipy.sparse import csr_array, hstack

        there = set(self.labels.names)
        missing = [name for name in names if name not in there]
        others = [] if chosen else sorted(there.difference(names))
        if len(missing) == len(names) or not (missing or others):
            return self.keep_labels(names)
        more = [f"without {shorten(missing)}, so not judged by it"] if missing else []
        more += [f"{shorten(others)} not among the labels that are learned"] if others else []
        count, wide = len(self), len(missing)  # not by a dense array, which many images would make large
        places = np.tile(np.arange(wide, dtype=np.int32), count), np.arange(count + 1) * wide
        unknown = csr_array((np.full(count * wide, -1, dtype=np.int8), *places), shape=(count, wide))
        states = csr_array(hstack([self.states, unknown], format="csr"))
        whole = replace(self, states=states, labels=LabelSpace((*self.labels.names, *missing)))
        notes = (f"{self.name}: {'; '.join(more)}",) if more else ()
        return replace(whole.keep_labels(names), notes=(*self.notes, *notes))

    def count_pairs(self) -> NDArray[np.int64]:
        """How many images show both of two labels, (L,L); on the diagonal those that show one. Unknown is not shown."""
        shown = (self.states == 1).astype(np.int64)
        return (shown.T @ shown).toarray()

    def target(self, indices: NDArray[np.int64] | None = None) -> Tensor:
        """Target (N,L) of the records, or of those `indices` names: 1 present, 0 absent, NaN unknown."""
        chosen = self.states if indices is None else self.states[indices]
        target = torch.from_numpy(chosen.toarray()).float()
        return target.masked_fill_(target < 0, torch.nan)


def keep_common_labels(records: RecordSet, labels: Sequence[str], *, whose: str, tell: Tell) -> RecordSet:
    """The same images with the labels that both know alone, in the order of `labels`.

    `whose` names the owner of `labels`; `tell` hears what is judged and what is left out, if anything is.
    """
    asked, there = dict.fromkeys(labels), dict.fromkeys(records.labels.names)
    common = [name for name in asked if name in there]
    missing = [name for name in asked if name not in there]
    others = [name for name in there if name not in asked]
    if not common:
        wrong = f"{whose} knows none of its labels ({shorten(others)})"
        raise InputError(records.name, wrong, choose_one_of(others[0], labels))
    judged = [f"judging {len(common)} of {len(labels)} labels: {shorten(common, limit=10)}"] if missing else []
    judged += [f"not in {records.name}: {shorten(missing)}"] if missing else []
    judged += [f"not known to {whose}: {shorten(others)}"] if others else []
    if judged:
        tell("; ".join(judged))
    return records.keep_labels(common)
