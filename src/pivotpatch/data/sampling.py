"""Which pictures each batch of an epoch holds, and which of them are this process's."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from pivotpatch.errors import InputError


class EpochSampler(Sampler[list[int]]):
    """The batches of one epoch: this process's share of each.

    The order is a function of seed and epoch alone. Every `batch_size` positions of it are a global batch; of these
    the process `rank` takes each `world`-th, so that shares differ by one at most. A last batch smaller than `world`
    leaves some processes an empty share, which is a batch nevertheless: all processes count the same batches.

    Attributes:
        count: records.
        batch_size: of a global batch, over all processes.
        shuffle: whether each epoch has its own order, else that of the records.
        seed: of the run.
        epoch: the one that comes next.
        start: global batches of this epoch that are already done and left out; for resuming.
        rank: the number of this process.
        world: how many processes there are.
        drop_last: whether the last batch is left out where it is smaller.
    """

    def __init__(
        self,
        count: int,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        epoch: int = 0,
        start: int = 0,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1:
            raise InputError("EpochSampler", f"batch_size is {batch_size}", "give a whole number, 1 or more")
        if seed < 0:
            raise InputError("EpochSampler", f"seed is {seed}", "give a whole number, 0 or more")
        if not 0 <= rank < world:
            raise InputError("EpochSampler", f"rank is {rank} of {world}", "give a rank from 0 to world - 1")
        self.count = count
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world = world
        self.drop_last = drop_last
        self.set_epoch(epoch, start=start)

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Go to an epoch, or into the middle of it."""
        if epoch < 0 or start < 0:
            raise InputError("EpochSampler", f"epoch is {epoch} and start {start}", "give whole numbers, 0 or more")
        self.epoch = epoch
        self.start = start

    @property
    def batches(self) -> int:
        """Global batches of a whole epoch."""
        return self.count // self.batch_size if self.drop_last else -(-self.count // self.batch_size)

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
