"""Decode images, in worker processes or once and for all, and ship batches of uint8 images with their targets."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from threading import Thread
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from pivotpatch.accel.device import send_tensor
from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError, explaining
from pivotpatch.process import Progress, count_cores, ignore
from pivotpatch.runtime.decoding import decode_image

OnError = Literal["error", "skip"]
"""What an undecodable or missing image does: end the run, or leave its batch and be listed."""

_CHUNK = 1 << 27  # bytes of images that are decoded before they go where they are held
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Failure:
    """An image that could not be read: its position in the record set, its name, and what was wrong with it."""

    index: int
    name: str
    error: InputError


class Batch(NamedTuple):
    """B images that could be read, and those that could not."""

    images: Tensor  # (B,C,H,W) uint8, channels last in memory
    target: Tensor  # (B,L), NaN unknown
    indices: Tensor  # (B,) positions in the record set
    failures: tuple[Failure, ...]  # the images that are missing from it


@dataclass
class EpochSampler:
    """Which of `count` images each batch of an epoch holds, and which of them are this process's.

    The order is a function of seed and epoch alone. Every `batch_size` positions of it are a global batch, of which the
    process `rank` takes each `world`-th. A share may be empty, which is a batch nevertheless: all processes count the
    same batches. `epoch` comes next, less its first `start` batches, which are done.
    """

    count: int
    _: KW_ONLY
    batch_size: int
    shuffle: bool
    seed: int
    rank: int = 0
    world: int = 1
    epoch: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        assert self.batch_size > 0 <= self.rank < self.world, self

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Go to an epoch, or into the middle of it."""
        self.epoch, self.start = epoch, start

    @property
    def batches(self) -> int:
        """Global batches of a whole epoch."""
        return -(-self.count // self.batch_size)

    def rows(self, number: int) -> NDArray[np.int64]:
        """Positions within the global batch `number` that are this process's.

        >>> EpochSampler(10, batch_size=8, shuffle=False, seed=0, rank=1, world=3).rows(0)
        array([1, 4, 7])
        """
        size = min(self.batch_size, self.count - range(self.batches)[number] * self.batch_size)
        return np.arange(self.rank, size, self.world)

    def __len__(self) -> int:
        return max(self.batches - self.start, 0)

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(self.count)
        if self.shuffle:
            np.random.default_rng((self.seed, self.epoch)).shuffle(order)
        for number in range(self.start, self.batches):
            yield order[number * self.batch_size + self.rows(number)].tolist()


@dataclass
class _Images(Dataset[Batch]):
    """The images of a record set, decoded at one size (H,W) when a list of indices is asked for."""

    records: RecordSet
    size: tuple[int, int]
    threads: int = 1
    interpolation: str = "bilinear"

    def __getitem__(self, indices: list[int]) -> Batch:
        pixels = np.empty((len(indices), *self.size, 3), dtype=np.uint8)
        with ThreadPoolExecutor(self.threads) as pool:
            failures = list(pool.map(self.decode, pixels, indices))
        read = np.array([failure is None for failure in failures], dtype=bool)
        kept = np.array(indices, dtype=np.int64)[read]
        return Batch(
            torch.from_numpy(pixels[read]).permute(0, 3, 1, 2),
            self.records.target(kept),
            torch.from_numpy(kept),
            tuple(failure for failure in failures if failure is not None),
        )

    def decode(self, pixels: NDArray[np.uint8], index: int) -> Failure | None:
        """Write one image to `pixels` (H,W,3), or return why there is none."""
        name = self.records.name_at(index)
        try:
            resize = partial(resize_quickly, interpolation=self.interpolation)
            pixels[:] = decode_image(self.records.source_at(index), size=self.size, name=name, resize=resize)
        except InputError as error:
            return Failure(index, name, copy(error))  # a copy holds no frames, hence no pixels
        return None


@dataclass(eq=False)
class Loader:
    """Batches of a record set; each full pass moves the sampler to the next epoch."""

    records: RecordSet
    epoch_sampler: EpochSampler  # the order; set its epoch to resume
    on_error: OnError
    every_batch: bool
    batches: DataLoader[Batch]  # those that the sampler names
    failures: list[Failure] = field(default_factory=list)  # images skipped since the pass began

    def __len__(self) -> int:
        return len(self.epoch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        self.failures = []
        for batch in self.batches:
            if batch.failures and self.on_error == "error":
                raise batch.failures[0].error
            self.failures.extend(batch.failures)
            if self.every_batch or len(batch.indices) > 0:
                yield batch
        self.epoch_sampler.set_epoch(self.epoch_sampler.epoch + 1)


def make_loader(
    records: RecordSet,
    *,
    size: tuple[int, int],
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    num_workers: int = 0,
    on_error: OnError = "error",
    rank: int = 0,
    world: int = 1,
    every_batch: bool = False,
    held: Dataset[Batch] | None = None,
    interpolation: str = "bilinear",
) -> Loader:
    """Feed batches of decoded images.

    Args:
        records: what to load.
        size: rows and columns of each image; views are cut and resized from it later, on the device.
        batch_size: B, 1 or more, of all processes together.
        shuffle: a new order each epoch, else that of the records.
        seed: of the order, 0 or more; the same seed and epoch give the same batches, whatever the number of workers.
        num_workers: processes that decode; 0 decodes in threads of this one.
        on_error: an image that cannot be read ends the pass with its `InputError`, or ("skip") is left out of its
            batch and listed in the loader's `failures`.
        rank: the number of this process among those that share each batch.
        world: how many processes share each batch.
        every_batch: hand out a batch too of which nothing could be read, or whose share for this process is empty, so
            that processes stay in step.
        held: the images of these records, decoded before, or what was made of them; nothing is read then.
        interpolation: how images are resized, "bilinear" or "bicubic".
    """
    sampler = EpochSampler(len(records), batch_size=batch_size, shuffle=shuffle, seed=seed, rank=rank, world=world)
    dataset: Dataset[Batch] = _Images(records, size, 1 if num_workers else count_cores(), interpolation)
    if isinstance(held, HeldImages):
        same = held.records.images is records.images and held.records.order is records.order  # labels may differ
        assert same and held.images.shape[2:] == size, "held images of other records, or of another size"  # noqa: PT018
        held = replace(held, records=records)
    if held is not None:
        dataset, num_workers = held, 0
    batches: DataLoader[Batch] = DataLoader(
        dataset,
        sampler=sampler,
        batch_size=None,  # the sampler names whole batches
        num_workers=num_workers,
        collate_fn=_keep,
        pin_memory=torch.cuda.is_available() and held is None,
        worker_init_fn=_start_worker,
        persistent_workers=num_workers > 0,
        generator=torch.Generator(),  # else each pass draws from the caller's random state
    )
    return Loader(records, sampler, on_error, every_batch, batches)


def _keep(batch: Any) -> Any:
    return batch


@dataclass(frozen=True, eq=False)
class HeldImages(Dataset[Batch]):
    """The images (N,3,H,W) uint8 of a record set; what lies in the place of a failure means nothing."""

    records: RecordSet
    images: Tensor
    failures: Mapping[int, Failure]  # by their index

    def __getitem__(self, chosen: list[int]) -> Batch:
        """A batch of held images, on the device that holds them."""
        stored, pin = self.images.permute(0, 2, 3, 1), torch.cuda.is_available()
        read = np.array([index for index in chosen if index not in self.failures], dtype=np.int64)
        indices, target = torch.from_numpy(read), self.records.target(read)
        pixels = stored.new_empty((len(read), *stored.shape[1:]), pin_memory=pin and stored.is_cpu)
        torch.index_select(stored, 0, send_tensor(indices, stored.device), out=pixels)
        if pin:
            indices, target = indices.pin_memory(), target.pin_memory()
        failures = tuple(self.failures[index] for index in chosen if index in self.failures)
        return Batch(pixels.permute(0, 3, 1, 2), target, indices, failures)


def count_held_bytes(count: int, size: tuple[int, int]) -> int:
    """Bytes that `hold_images` takes for `count` images of a size: 3 per pixel.

    >>> count_held_bytes(82_081, (224, 224)) / 2**30
    11.5...
    """
    return 3 * count * size[0] * size[1]


def hold_images(
    records: RecordSet,
    *,
    size: tuple[int, int],
    device: torch.device = _CPU,
    on_error: OnError = "error",
    progress: Progress = ignore,
) -> HeldImages:
    """Decode every image once, in threads, and keep it: 3 bytes per pixel.

    Args:
        records: what to decode.
        size: rows and columns of each image.
        device: where the images stay.
        on_error: an image that cannot be read ends it with its `InputError`, or ("skip") is listed in `failures`.
        progress: told how many images are done, and of how many.
    """
    dataset, count = _Images(records, size, count_cores()), len(records)
    wrong = f"{count:,} images need {count_held_bytes(count, size) / 2**30:.1f} GiB"
    with explaining(f"memory of {device}", wrong, "choose a smaller size or hold no images", of=RuntimeError):
        pixels = torch.empty((count, *size, 3), dtype=torch.uint8, device=device)
    failures: dict[int, Failure] = {}
    step = max(_CHUNK // count_held_bytes(1, size), 1)
    for start in range(0, count, step):
        batch = dataset[list(range(start, min(start + step, count)))]
        if batch.failures and on_error == "error":
            raise batch.failures[0].error
        failures |= {failure.index: failure for failure in batch.failures}
        pixels[batch.indices] = batch.images.permute(0, 2, 3, 1).to(device)
        progress("decode images", min(start + step, count), count)
    return HeldImages(records, pixels.permute(0, 3, 1, 2), failures)


def _start_worker(_number: int) -> None:
    """Leave it to the main process what Ctrl-C, or SIGTERM to the whole group, means; obey its own SIGTERM alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # only Linux can tell who sends a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        Thread(target=_obey_parent, daemon=True).start()


def _obey_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker process"
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)


def resize_quickly(
    pixels: NDArray[np.uint8], size: tuple[int, int], *, interpolation: str = "bilinear"
) -> NDArray[np.uint8]:
    """As `resize_pixels`, by torch: equal but for a rounding in some of 100,000 pixels, and 3 times as fast."""
    if pixels.shape[:2] == size:
        return pixels
    if pixels.shape[0] > size[0] and pixels.shape[1] < size[1]:
        # torch would widen all the rows first.
        pixels = resize_quickly(pixels, (size[0], pixels.shape[1]), interpolation=interpolation)
    # The order of these dimensions keeps torch on the path that needs no transposition.
    images = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))[None].permute(0, 3, 1, 2)
    resized = F.interpolate(images, size=size, mode=interpolation, align_corners=False, antialias=True)
    return cast("NDArray[np.uint8]", resized[0].permute(1, 2, 0).numpy())
