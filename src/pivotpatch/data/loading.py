"""Decode each picture once, in worker processes, and ship batches of uint8 images with their targets."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from pivotpatch.core.errors import InputError, choose_one_of
from pivotpatch.data.decoding import MAX_PIXELS, decode_image
from pivotpatch.data.records import RecordSet

OnError = Literal["error", "skip"]
"""What an undecodable or missing picture does: end the run, or leave its batch and be listed."""


@dataclass(frozen=True)
class Failure:
    """A picture that could not be read.

    Attributes:
        index: its position in the record set.
        name: its name in the data set.
        error: what was wrong with it.
    """

    index: int
    name: str
    error: InputError


@dataclass(frozen=True)
class Sample:
    """One picture.

    Attributes:
        image: (C,H,W) uint8.
        target: (L,), NaN unknown.
        index: its position in the record set.
    """

    image: Tensor
    target: Tensor
    index: int


class Batch(NamedTuple):
    """B pictures that could be read, and those that could not.

    Attributes:
        images: (B,C,H,W) uint8, channels last in memory.
        target: (B,L), NaN unknown.
        indices: (B,) positions in the record set.
        failures: the pictures that are missing from this batch.
    """

    images: Tensor
    target: Tensor
    indices: Tensor
    failures: tuple[Failure, ...]


class ImageDataset(Dataset[Sample]):
    """The pictures of a record set at one size.

    Attributes:
        records: the records.
        size: rows and columns that every picture is squashed to.
        max_pixels: pictures that claim more are refused.
    """

    def __init__(self, records: RecordSet, *, size: tuple[int, int], max_pixels: int = MAX_PIXELS) -> None:
        if min(size) < 1:
            raise InputError(records.name, f"pictures of size {size}", "give rows and columns of 1 or more")
        self.records = records
        self.size = size
        self.max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Sample:
        batch = self.__getitems__([range(len(self))[index]])
        if batch.failures:
            raise batch.failures[0].error
        return Sample(batch.images[0], batch.target[0], int(batch.indices[0]))

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A whole batch: what `DataLoader` asks for where a data set offers it."""
        images, read, failures = [], [], []
        for index in indices:
            place = self.records.place(index)
            name = self.records.images.name(place)
            try:
                source = self.records.images.source(place)
                images.append(decode_image(source, size=self.size, max_pixels=self.max_pixels, name=name))
                read.append(index)
            except InputError as error:
                failures.append(Failure(index, name, copy(error)))  # a copy holds no frames, hence no pixels
        pixels = np.stack(images) if images else np.empty((0, *self.size, 3), dtype=np.uint8)
        kept = np.array(read, dtype=np.int64)
        return Batch(
            torch.from_numpy(pixels).permute(0, 3, 1, 2),
            self.records.target(kept),
            torch.from_numpy(kept),
            tuple(failures),
        )


class EpochSampler(Sampler[int]):
    """The order of one epoch, a function of three numbers alone.

    Attributes:
        seed: of the run.
        epoch: each has its own order.
        start: samples of this epoch that are already done and left out; for resuming.
    """

    def __init__(self, count: int, *, shuffle: bool, seed: int, epoch: int = 0, start: int = 0) -> None:
        if seed < 0:
            raise InputError("EpochSampler", f"seed is {seed}", "give a whole number, 0 or more")
        self.count = count
        self.shuffle = shuffle
        self.seed = seed
        self.set_epoch(epoch, start=start)

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Go to an epoch, or into the middle of it."""
        if epoch < 0 or start < 0:
            raise InputError("EpochSampler", f"epoch is {epoch} and start {start}", "give whole numbers, 0 or more")
        self.epoch = epoch
        self.start = start

    def __len__(self) -> int:
        return max(self.count - self.start, 0)

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self.count)
        if self.shuffle:
            np.random.default_rng((self.seed, self.epoch)).shuffle(order)
        yield from map(int, order[self.start :])


class ImageLoader(DataLoader[Batch]):
    """Batches of a record set.

    Each full pass moves the sampler to the next epoch. A batch of which nothing could be read is not handed out.

    Attributes:
        epoch_sampler: the order; set its epoch to resume.
        failures: pictures skipped since the pass began, for the list at its end.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        *,
        sampler: EpochSampler,
        batch_size: int,
        num_workers: int,
        on_error: OnError,
        drop_last: bool,
    ) -> None:
        self.epoch_sampler = sampler
        self.on_error = on_error
        self.failures: list[Failure] = []
        super().__init__(
            dataset,  # type: ignore[arg-type]  # `__getitems__` makes the batch, so a sample never leaves
            batch_size=batch_size,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=_keep,
            pin_memory=torch.cuda.is_available(),
            drop_last=drop_last,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # else each pass draws from the caller's random state
        )

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self.failures = []
        batch: Batch
        for batch in super().__iter__():
            if batch.failures and self.on_error == "error":
                raise batch.failures[0].error
            self.failures.extend(batch.failures)
            if len(batch.indices) > 0:
                yield batch
        self.epoch_sampler.set_epoch(self.epoch_sampler.epoch + 1)


def _keep(batch: Any) -> Any:
    return batch  # `__getitems__` has made it already


def make_loader(
    records: RecordSet,
    *,
    size: tuple[int, int],
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    num_workers: int = 0,
    on_error: OnError = "error",
    drop_last: bool = False,
    max_pixels: int = MAX_PIXELS,
) -> ImageLoader:
    """Feed batches of decoded pictures.

    Args:
        records: what to load.
        size: rows and columns of each image; views are cut and resized from it later, on the device.
        batch_size: B, 1 or more.
        shuffle: a new order each epoch, else that of the records.
        seed: of the order, 0 or more; the same seed and epoch give the same batches, whatever the number of workers.
        num_workers: processes that decode; 0 decodes in this one.
        on_error: a picture that cannot be read ends the pass with its `InputError`, or ("skip") is left out of its
            batch and listed in the loader's `failures`.
        drop_last: leave out the last batch where it is smaller.
        max_pixels: pictures that claim more cannot be read.
    """
    if on_error not in get_args(OnError):
        raise InputError("make_loader", f"on_error is {on_error!r}", choose_one_of(on_error, get_args(OnError)))
    if batch_size < 1 or num_workers < 0:
        wrong = f"batch_size is {batch_size} and num_workers {num_workers}"
        raise InputError("make_loader", wrong, "give a batch_size of 1 or more and num_workers of 0 or more")
    return ImageLoader(
        ImageDataset(records, size=size, max_pixels=max_pixels),
        sampler=EpochSampler(len(records), shuffle=shuffle, seed=seed),
        batch_size=batch_size,
        num_workers=num_workers,
        on_error=on_error,
        drop_last=drop_last,
    )
