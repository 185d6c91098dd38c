"""Decode pictures, in worker processes or once and for all, and ship batches of uint8 images with their targets."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pivotpatch.accel.device import send_tensor
from pivotpatch.data.decoding import MAX_PIXELS, decode_image
from pivotpatch.data.records import RecordSet
from pivotpatch.data.sampling import EpochSampler
from pivotpatch.data.workers import GROUP_SIGNALS, end_with_parent, hold_signals, refuse_group_signals
from pivotpatch.errors import InputError, choose_one_of

OnError = Literal["error", "skip"]
"""What an undecodable or missing picture does: end the run, or leave its batch and be listed."""

_CHUNK = 1 << 28  # bytes of pictures that wait in memory for their way to a device
_CPU = torch.device("cpu")


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
            decoded = self.decode(index)
            if isinstance(decoded, Failure):
                failures.append(decoded)
            else:
                images.append(decoded)
                read.append(index)
        pixels = np.stack(images) if images else np.empty((0, *self.size, 3), dtype=np.uint8)
        kept = np.array(read, dtype=np.int64)
        return Batch(
            torch.from_numpy(pixels).permute(0, 3, 1, 2),
            self.records.target(kept),
            torch.from_numpy(kept),
            tuple(failures),
        )

    def decode(self, index: int) -> NDArray[np.uint8] | Failure:
        """Pixels (H,W,3) of one picture, or why there are none."""
        place = self.records.place(index)
        name = self.records.images.name(place)
        try:
            source = self.records.images.source(place)
            return decode_image(source, size=self.size, max_pixels=self.max_pixels, name=name)
        except InputError as error:
            return Failure(index, name, copy(error))  # a copy holds no frames, hence no pixels

    def decode_into(self, pixels: NDArray[np.uint8], index: int) -> Failure | None:
        """Write one picture to `pixels` (H,W,3), or return why there is none."""
        decoded = self.decode(index)
        if isinstance(decoded, Failure):
            return decoded
        pixels[...] = decoded
        return None


class Loader(ABC):
    """Batches of a record set; each full pass moves the sampler to the next epoch.

    Attributes:
        records: the records.
        epoch_sampler: the order; set its epoch to resume.
        on_error: what a picture that cannot be read does.
        every_batch: whether a batch is handed out of which nothing could be read, or nothing is this process's.
        failures: pictures skipped since the pass began, for the list at its end.
    """

    def __init__(self, records: RecordSet, *, sampler: EpochSampler, on_error: OnError, every_batch: bool) -> None:
        self.records = records
        self.epoch_sampler = sampler
        self.on_error = on_error
        self.every_batch = every_batch
        self.failures: list[Failure] = []

    def __len__(self) -> int:
        return len(self.epoch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        self.failures = []
        for batch in self._load():
            if batch.failures and self.on_error == "error":
                raise batch.failures[0].error
            self.failures.extend(batch.failures)
            if self.every_batch or len(batch.indices) > 0:
                yield batch
        self.epoch_sampler.set_epoch(self.epoch_sampler.epoch + 1)

    @abstractmethod
    def _load(self) -> Iterator[Batch]:
        """All batches that the sampler names, as they are."""


class ImageLoader(Loader):
    """Batches that are decoded when they are needed, a few ahead where there are worker processes."""

    def __init__(
        self, dataset: ImageDataset, *, sampler: EpochSampler, num_workers: int, on_error: OnError, every_batch: bool
    ) -> None:
        super().__init__(dataset.records, sampler=sampler, on_error=on_error, every_batch=every_batch)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=_keep,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_start_worker,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # else each pass draws from the caller's random state
        )

    def _load(self) -> Iterator[Batch]:
        with hold_signals(*GROUP_SIGNALS):
            batches = iter(self._loader)  # starts the workers
        yield from batches


def _keep(batch: Any) -> Any:
    return batch  # `__getitems__` has made it already


def _start_worker(_number: int) -> None:
    refuse_group_signals()
    end_with_parent()


@dataclass(frozen=True, eq=False)
class HeldPictures:
    """The pictures of a record set, decoded.

    Attributes:
        records: whose pictures they are.
        images: (N,3,H,W) uint8, channels last in memory; what lies in the place of a failure means nothing.
        failures: the pictures that could not be read.
    """

    records: RecordSet
    images: Tensor
    failures: tuple[Failure, ...]


class HeldLoader(Loader):
    """Batches of pictures that are held in memory; images are on the device that holds them."""

    def __init__(
        self, held: HeldPictures, records: RecordSet, *, sampler: EpochSampler, on_error: OnError, every_batch: bool
    ) -> None:
        super().__init__(records, sampler=sampler, on_error=on_error, every_batch=every_batch)
        self._pixels = held.images.permute(0, 2, 3, 1)
        self._failed = {failure.index: failure for failure in held.failures}
        self._pin = torch.cuda.is_available()

    def _load(self) -> Iterator[Batch]:
        for chosen in self.epoch_sampler:
            read = np.array([index for index in chosen if index not in self._failed], dtype=np.int64)
            indices, target = torch.from_numpy(read), self.records.target(read)
            shape, pin = (len(read), *self._pixels.shape[1:]), self._pin and self._pixels.is_cpu
            pixels = self._pixels.new_empty(shape, pin_memory=pin)
            torch.index_select(self._pixels, 0, send_tensor(indices, self._pixels.device), out=pixels)
            if self._pin:
                indices, target = indices.pin_memory(), target.pin_memory()
            failures = tuple(self._failed[index] for index in chosen if index in self._failed)
            yield Batch(pixels.permute(0, 3, 1, 2), target, indices, failures)


def hold_pictures(
    records: RecordSet,
    *,
    size: tuple[int, int],
    device: torch.device = _CPU,
    threads: int | None = None,
    on_error: OnError = "error",
    max_pixels: int = MAX_PIXELS,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> HeldPictures:
    """Decode every picture once and keep it: 3 bytes a pixel.

    Args:
        records: what to decode.
        size: rows and columns of each image.
        device: where the images stay.
        threads: that decode; one a processor by default.
        on_error: a picture that cannot be read ends it with its `InputError`, or ("skip") is listed in `failures`.
        max_pixels: pictures that claim more cannot be read.
        progress: told how many pictures are done, and of how many.
    """
    _check_on_error(on_error, "hold_pictures")
    if threads is not None and threads < 1:
        raise InputError("hold_pictures", f"threads is {threads}", "give 1 or more")
    dataset = ImageDataset(records, size=size, max_pixels=max_pixels)
    count, bytes_each = len(records), 3 * size[0] * size[1]
    try:
        pixels = torch.empty((count, *size, 3), dtype=torch.uint8, device=device)
    except RuntimeError as error:  # what torch raises where memory is short
        wrong = f"{count:,} pictures need {count * bytes_each / 2**30:.1f} GiB ({str(error).splitlines()[0]})"
        raise InputError(f"memory of {device}", wrong, "choose a smaller size or hold no pictures") from error
    failures: list[Failure] = []
    step = max(_CHUNK // bytes_each, 1)
    pool = ThreadPoolExecutor(threads or _count_processors())
    try:
        for start in range(0, count, step):
            place = pixels[start : start + step]
            chunk = place if place.is_cpu else torch.empty_like(place, device=_CPU)
            indices = range(start, start + len(place))
            for index, failure in zip(indices, pool.map(dataset.decode_into, chunk.numpy(), indices), strict=True):
                if failure is not None:
                    if on_error == "error":
                        raise failure.error
                    failures.append(failure)
                if progress:
                    progress("decode pictures", index + 1, count)
            if chunk is not place:
                place.copy_(chunk)
    finally:
        pool.shutdown(cancel_futures=True)
    return HeldPictures(records, pixels.permute(0, 3, 1, 2), tuple(failures))


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
    rank: int = 0,
    world: int = 1,
    every_batch: bool = False,
    held: HeldPictures | None = None,
) -> Loader:
    """Feed batches of decoded pictures.

    Args:
        records: what to load.
        size: rows and columns of each image; views are cut and resized from it later, on the device.
        batch_size: B, 1 or more, of all processes together.
        shuffle: a new order each epoch, else that of the records.
        seed: of the order, 0 or more; the same seed and epoch give the same batches, whatever the number of workers.
        num_workers: processes that decode; 0 decodes in this one.
        on_error: a picture that cannot be read ends the pass with its `InputError`, or ("skip") is left out of its
            batch and listed in the loader's `failures`.
        drop_last: leave out the last batch where it is smaller.
        max_pixels: pictures that claim more cannot be read.
        rank: the number of this process among those that share each batch.
        world: how many processes share each batch.
        every_batch: hand out a batch too of which nothing could be read, or whose share for this process is empty, so
            that processes stay in step.
        held: the pictures of these records, decoded before; nothing is read then.
    """
    _check_on_error(on_error, "make_loader")
    if num_workers < 0:
        raise InputError("make_loader", f"num_workers is {num_workers}", "give 0 or more")
    sampler = EpochSampler(
        len(records), batch_size=batch_size, shuffle=shuffle, seed=seed, rank=rank, world=world, drop_last=drop_last
    )
    if held is not None:
        _check_held(held, records, size)
        return HeldLoader(held, records, sampler=sampler, on_error=on_error, every_batch=every_batch)
    dataset = ImageDataset(records, size=size, max_pixels=max_pixels)
    return ImageLoader(dataset, sampler=sampler, num_workers=num_workers, on_error=on_error, every_batch=every_batch)


def _check_on_error(on_error: str, where: str) -> None:
    if on_error not in get_args(OnError):
        raise InputError(where, f"on_error is {on_error!r}", choose_one_of(on_error, get_args(OnError)))


def _check_held(held: HeldPictures, records: RecordSet, size: tuple[int, int]) -> None:
    """The labels may differ, the pictures may not."""
    if held.records.images is not records.images or held.records.order is not records.order:
        raise InputError("make_loader", "the held pictures are not those of the records", "hold the pictures of these")
    if held.images.shape[2:] != size:
        wrong = f"the held pictures are of size {tuple(held.images.shape[2:])}, asked for is {size}"
        raise InputError("make_loader", wrong, "hold them at the size of the loader")


def _count_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
