"""Every process sees the same batches, and each record is the part of one process alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotpatch.data.sampling import EpochSampler
from pivotpatch.errors import InputError


def flat(sampler: EpochSampler) -> list[int]:
    return [index for batch in sampler for index in batch]


@settings(max_examples=200, deadline=None)
@given(
    count=st.integers(0, 60),
    batch_size=st.integers(1, 20),
    world=st.integers(1, 9),
    start=st.integers(0, 8),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_processes_share_the_batches_of_one(
    count: int, batch_size: int, world: int, start: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    def sample(rank: int, world: int, start: int = start) -> EpochSampler:
        return EpochSampler(
            count,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=3,
            epoch=epoch,
            start=start,
            rank=rank,
            world=world,
            drop_last=drop_last,
        )

    whole, parts = sample(0, 1), [sample(rank, world) for rank in range(world)]
    assert all(len(part) == len(whole) == len(list(whole)) for part in parts)
    for number, (batch, *shares) in enumerate(zip(whole, *parts, strict=True), start):
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        joined = np.full(len(batch), -1)
        for part, share in zip(parts, shares, strict=True):
            joined[part.rows(number)] = share  # each share in its rows is the batch of one process again
        assert joined.tolist() == batch
    everything = flat(sample(0, 1, start=0))
    assert flat(whole) == everything[start * batch_size :]
    kept = count - count % batch_size if drop_last else count
    assert len(everything) == kept == len(set(everything))
    if not shuffle:
        assert everything == list(range(kept))


def test_neighbouring_seeds_and_epochs_do_not_share_an_order() -> None:
    orders = {
        tuple(flat(EpochSampler(50, batch_size=7, shuffle=True, seed=seed, epoch=epoch)))
        for seed in range(6)
        for epoch in range(6)
    }
    assert len(orders) == 36


def test_order_depends_on_nothing_but_seed_and_epoch() -> None:
    orders = [flat(EpochSampler(50, batch_size=size, shuffle=True, seed=2, epoch=1)) for size in (1, 8, 50, 99)]
    assert all(order == orders[0] for order in orders)


def test_rows_of_a_batch_that_is_not_there() -> None:
    sampler = EpochSampler(10, batch_size=4, shuffle=False, seed=0)
    assert sampler.batches == 3
    assert sampler.rows(2).tolist() == [0, 1]
    with pytest.raises(IndexError):
        sampler.rows(3)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="EpochSampler: seed is -1; give a whole number, 0 or more"):
        EpochSampler(5, batch_size=1, shuffle=True, seed=-1)
    with pytest.raises(InputError, match="EpochSampler: batch_size is 0; give a whole number, 1 or more"):
        EpochSampler(5, batch_size=0, shuffle=True, seed=0)
    for rank in (-1, 2):
        with pytest.raises(InputError, match=f"EpochSampler: rank is {rank} of 2; give a rank from 0 to world - 1"):
            EpochSampler(5, batch_size=1, shuffle=True, seed=0, rank=rank, world=2)


def test_a_place_before_the_first_batch_is_refused() -> None:
    sampler = EpochSampler(37, batch_size=4, shuffle=True, seed=0, epoch=2, start=5)
    with pytest.raises(InputError, match="epoch is 0 and start -3; give whole numbers, 0 or more"):
        sampler.set_epoch(0, start=-3)
    with pytest.raises(InputError, match="epoch is -1 and start 0"):
        sampler.set_epoch(-1)
    assert (sampler.epoch, sampler.start) == (2, 5)
    sampler.set_epoch(0, start=50)
    assert len(list(sampler)) == len(sampler) == 0
