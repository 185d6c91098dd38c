"""Batches: what is in them, in which order, from files or memory, and what happens to images that cannot be read."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import COUNT, SIZE, picture

from pivotpatch.data import loading
from pivotpatch.data.loading import EpochSampler, Loader, hold_images, make_loader
from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError
from pivotpatch.runtime.decoding import decode_image

# Worker processes are forked, of which newer Pythons warn wherever a thread runs, as torch's do.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
WORKERS = [0, pytest.param(2, marks=pytest.mark.slow)]


def flat(batches: EpochSampler | Loader) -> list[int]:
    """The indices of all batches, one after the other."""
    if isinstance(batches, Loader):
        return [index for batch in batches for index in batch.indices.tolist()]
    return [index for share in batches for index in share]


@settings(max_examples=100)
@given(
    count=st.integers(0, 60),
    batch_size=st.integers(1, 20),
    world=st.integers(1, 9),
    start=st.integers(0, 8),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_processes_share_the_batches_of_one(
    count: int, batch_size: int, world: int, start: int, epoch: int, shuffle: bool
) -> None:
    def sample(rank: int, world: int, start: int = start) -> EpochSampler:
        options: dict[str, Any] = {"epoch": epoch, "start": start, "rank": rank, "world": world}
        return EpochSampler(count, batch_size=batch_size, shuffle=shuffle, seed=3, **options)

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
    assert sorted(everything) == list(range(count))
    if not shuffle:
        assert everything == list(range(count))


def test_order_depends_on_seed_and_epoch_and_nothing_else() -> None:
    def order(batch_size: int, seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(flat(EpochSampler(50, batch_size=batch_size, shuffle=True, seed=seed, epoch=epoch)))

    assert len({order(7, seed, epoch) for seed in range(6) for epoch in range(6)}) == 36
    assert len({order(batch_size, 2, 1) for batch_size in (1, 8, 50, 99)}) == 1


def test_batches_hold_each_image_with_its_target(records: RecordSet) -> None:
    batches = list(make_loader(records, size=SIZE, batch_size=4))
    assert [batch.indices.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    for batch in batches:
        assert batch.images.shape == (len(batch.indices), 3, *SIZE)
        assert batch.images.dtype == torch.uint8
        torch.testing.assert_close(batch.target, records.target()[batch.indices], equal_nan=True)
        for image, index in zip(batch.images, batch.indices.tolist(), strict=True):
            expected = decode_image(np.asarray(picture(index)), size=SIZE)
            assert image.permute(1, 2, 0).numpy().tolist() == expected.tolist()


@pytest.mark.parametrize("num_workers", WORKERS)
def test_each_pass_is_the_next_epoch_and_can_begin_in_the_middle(records: RecordSet, num_workers: int) -> None:
    before = torch.get_rng_state()
    loader = make_loader(records, size=SIZE, batch_size=3, shuffle=True, seed=5, num_workers=num_workers)
    next(iter(loader))  # a pass that is broken off begins anew
    epochs = [flat(loader) for _ in range(3)]
    for epoch, order in enumerate(epochs):
        assert order == flat(EpochSampler(COUNT, batch_size=3, shuffle=True, seed=5, epoch=epoch))
    loader.epoch_sampler.set_epoch(1, start=2)
    assert len(loader) == 2
    assert flat(loader) == epochs[1][6:]
    assert (loader.epoch_sampler.epoch, loader.epoch_sampler.start) == (2, 0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("world", [1, 3, 16])
def test_processes_stay_in_step_and_see_each_record_once(damaged: RecordSet, world: int, num_workers: int) -> None:
    options: dict[str, Any] = {"size": SIZE, "batch_size": 2, "on_error": "skip", "num_workers": num_workers}
    shares = [list(make_loader(damaged, rank=rank, world=world, every_batch=True, **options)) for rank in range(world)]
    assert [len(share) for share in shares] == [6] * world
    batches = [batch for share in shares for batch in share]
    assert sorted(i for batch in batches for i in batch.indices.tolist()) == [0, 1, 3, 6, 7, 9, 10]
    assert sorted(failure.index for batch in batches for failure in batch.failures) == [2, 4, 5, 8]
    for batch in batches:
        assert batch.images.shape == (len(batch.indices), 3, *SIZE)
        assert batch.target.shape == (len(batch.indices), 3)
    assert any(len(batch.indices) == 0 for batch in batches)


@pytest.mark.parametrize("options", [{}, pytest.param({"num_workers": 2}, marks=pytest.mark.slow), {"held": True}])
def test_an_unreadable_image_ends_the_pass_by_default(damaged: RecordSet, options: dict[str, Any]) -> None:
    if "held" in options:
        options = {"held": hold_images(damaged, size=SIZE, on_error="skip")}
    loader = iter(make_loader(damaged, size=SIZE, batch_size=2, **options))
    assert next(loader).indices.tolist() == [0, 1]
    with pytest.raises(InputError, match=r"^row 2: is in none of the known formats; give one of [\w, ]+$"):
        next(loader)


@pytest.mark.parametrize("options", [{"shuffle": True, "seed": 4}, {"every_batch": True, "rank": 1, "world": 3}])
def test_held_images_give_the_same_batches(damaged: RecordSet, options: dict[str, Any]) -> None:
    held = hold_images(damaged, size=SIZE, on_error="skip")
    options |= {"size": SIZE, "batch_size": 2, "on_error": "skip"}
    loader, other = make_loader(damaged, held=held, **options), make_loader(damaged, **options)
    for epoch in (0, 1, 5):
        for each in (loader, other):
            each.epoch_sampler.set_epoch(epoch, start=epoch // 2)
        for one, two in zip(loader, other, strict=True):
            assert one.images.is_contiguous(memory_format=torch.channels_last)
            for ours, theirs in zip(one[:3], two[:3], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
            assert list(map(str, one.failures)) == list(map(str, two.failures))
        assert list(map(str, loader.failures)) == list(map(str, other.failures)) != []


def test_held_images_serve_other_labels_as_copies(records: RecordSet) -> None:
    held = hold_images(records, size=SIZE)
    loader = make_loader(records.keep_labels(["c"]), size=SIZE, batch_size=COUNT, held=held)
    (batch,) = loader
    torch.testing.assert_close(batch.target, records.target()[:, 2:], equal_nan=True)
    batch.images.zero_()
    assert held.images.any()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_images_are_held_a_few_at_a_time(damaged: RecordSet, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_CHUNK", 3 * 3 * SIZE[0] * SIZE[1])  # three images, and two in the last
    told: list[tuple[str, int, int | None]] = []
    held = hold_images(
        damaged, size=SIZE, device=torch.device(device), on_error="skip", progress=lambda *what: told.append(what)
    )
    assert held.images.device.type == device
    assert held.images.nbytes == loading.count_held_bytes(COUNT, SIZE)
    assert list(held.failures) == [2, 4, 5, 8]
    whole = [0, 1, 3, 6, 7, 9, 10]
    assert held.images[whole, 2, 0, 0].tolist() == whole  # the blue channel holds the index
    assert [(done, total) for _, done, total in told] == [(done, COUNT) for done in (3, 6, 9, COUNT)]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_batches_come_from_the_device_without_waiting_for_it(damaged: RecordSet) -> None:
    held = hold_images(damaged, size=SIZE, device=torch.device("cuda"), on_error="skip")
    options: dict[str, Any] = {"size": SIZE, "batch_size": 2, "on_error": "skip", "every_batch": True}
    loader, other = make_loader(damaged, held=held, **options), make_loader(damaged, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = list(loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch, expected in zip(batches, other, strict=True):
        assert batch.images.is_cuda
        assert torch.equal(batch.images.cpu(), expected.images)
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert batch.target.is_pinned() or len(batch.target) == 0


def test_wrong_ways_to_hold_are_refused(records: RecordSet, damaged: RecordSet) -> None:
    with pytest.raises(InputError, match="^row 2: is in none of the known formats"):
        hold_images(damaged, size=SIZE)
    with pytest.raises(InputError, match=r"memory of cpu: 11 images need [\d.]+ GiB \(.+\); choose a smaller size"):
        hold_images(records, size=(4_000_000, 4_000_000))
    held = hold_images(records, size=SIZE)
    for other, size in ((records, (8, 8)), (records[::-1], SIZE)):
        with pytest.raises(AssertionError, match="held images of other records, or of another size"):
            make_loader(other, size=size, batch_size=2, held=held)
