"""Pictures that are decoded once and kept: the same batches, from memory or a device."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from made_records import COUNT, SIZE, encoded, make_records

from pivotpatch.data import loading
from pivotpatch.data.address import open_records
from pivotpatch.data.loading import Batch, Loader, hold_pictures, make_loader
from pivotpatch.data.records import FileStore, RecordSet
from pivotpatch.errors import InputError


def assert_equal_passes(loader: Loader, other: Loader) -> None:
    ours, others = list(loader), list(other)
    assert len(ours) == len(others) > 0
    for one, two in zip(ours, others, strict=True):
        assert torch.equal(one.images, two.images)
        assert one.images.is_contiguous(memory_format=torch.channels_last)
        assert one.indices.tolist() == two.indices.tolist()
        assert torch.equal(one.target.nan_to_num(-1), two.target.nan_to_num(-1))
        assert [str(failure) for failure in one.failures] == [str(failure) for failure in two.failures]
    assert [str(failure) for failure in loader.failures] == [str(failure) for failure in other.failures]
    assert loader.epoch_sampler.epoch == other.epoch_sampler.epoch


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True, "seed": 4},
        {"shuffle": True, "drop_last": True},
        {"rank": 1, "world": 3},
        {"every_batch": True},
        {"every_batch": True, "rank": 2, "world": 3},
    ],
    ids=str,
)
def test_held_pictures_give_the_same_batches(damaged: RecordSet, options: dict[str, Any]) -> None:
    held = hold_pictures(damaged, size=SIZE, on_error="skip", threads=3)
    assert [failure.index for failure in held.failures] == [2, 4, 5, 8]
    loaders = [
        make_loader(damaged, size=SIZE, batch_size=2, on_error="skip", held=source, **options)
        for source in (held, None)
    ]
    assert_equal_passes(*loaders)
    assert_equal_passes(*loaders)  # the second epoch has another order
    for loader in loaders:
        loader.epoch_sampler.set_epoch(5, start=2)
    assert_equal_passes(*loaders)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_pictures_are_held_a_few_at_a_time(damaged: RecordSet, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_CHUNK", 3 * 3 * SIZE[0] * SIZE[1])  # three pictures, and two in the last
    held = hold_pictures(damaged, size=SIZE, device=torch.device(device), on_error="skip", threads=2)
    assert held.images.device.type == device
    assert [failure.index for failure in held.failures] == [2, 4, 5, 8]
    whole = [0, 1, 3, 6, 7, 9, 10]
    assert held.images[whole, 2, 0, 0].tolist() == whole  # the blue channel holds the index


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_batches_come_from_the_device_without_waiting_for_it(damaged: RecordSet) -> None:
    held = hold_pictures(damaged, size=SIZE, device=torch.device("cuda"), on_error="skip")
    loader, other = (
        make_loader(damaged, size=SIZE, batch_size=2, on_error="skip", every_batch=True, held=source)
        for source in (held, None)
    )
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


def test_every_kind_of_store_can_be_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIVOTPATCH_CACHE", str(tmp_path / "cache"))
    for index in range(40):
        (tmp_path / f"{index}.png").write_bytes(encoded(index % COUNT))
    rows = {"image": [encoded(index % COUNT) for index in range(40)], "labels": ["a", "b"] * 20}
    pq.write_table(pa.table(rows), tmp_path / "t.parquet", row_group_size=7)
    sets = [
        make_records(FileStore(tmp_path, pa.array([f"{index}.png" for index in range(40)]))),
        open_records(f"table:{tmp_path / 't.parquet'}"),
        open_records("scenes:@val?count=40&size=32"),
    ]
    for records in sets:
        chosen = records.select(np.arange(39, 3, -1))
        held = hold_pictures(chosen, size=SIZE, threads=8)
        options: dict[str, Any] = {"size": SIZE, "batch_size": 5, "shuffle": True}
        assert_equal_passes(make_loader(chosen, held=held, **options), make_loader(chosen, **options))


def test_an_unreadable_picture_ends_holding_or_the_pass(damaged: RecordSet) -> None:
    with pytest.raises(InputError, match="^row 2: is in none of the known formats"):
        hold_pictures(damaged, size=SIZE)
    held = hold_pictures(damaged, size=SIZE, on_error="skip")
    loader = iter(make_loader(damaged, size=SIZE, batch_size=2, held=held))
    assert next(loader).indices.tolist() == [0, 1]
    with pytest.raises(InputError, match="^row 2: is in none of the known formats"):
        next(loader)


def test_held_pictures_serve_other_labels(records: RecordSet) -> None:
    held = hold_pictures(records, size=SIZE)
    (batch,) = make_loader(records.keep_labels(["c"]), size=SIZE, batch_size=COUNT, held=held)
    torch.testing.assert_close(batch.target, records.target()[:, 2:], equal_nan=True)


def test_batches_of_held_pictures_are_copies(records: RecordSet) -> None:
    held = hold_pictures(records, size=SIZE)
    loader = make_loader(records, size=SIZE, batch_size=COUNT, held=held)
    first: Batch = next(iter(loader))
    before = first.images.clone()
    first.images.zero_()
    assert torch.equal(next(iter(loader)).images, before)


def test_progress_counts_every_picture(damaged: RecordSet) -> None:
    told: list[tuple[str, int, int | None]] = []
    hold_pictures(damaged, size=SIZE, on_error="skip", progress=lambda *what: told.append(what))
    assert told == [("decode pictures", done, COUNT) for done in range(1, COUNT + 1)]


def test_wrong_ways_to_hold_are_refused(records: RecordSet) -> None:
    with pytest.raises(InputError, match="hold_pictures: on_error is 'skp'; did you mean 'skip'"):
        hold_pictures(records, size=SIZE, on_error="skp")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="hold_pictures: threads is 0; give 1 or more"):
        hold_pictures(records, size=SIZE, threads=0)
    with pytest.raises(InputError, match=r"memory of cpu: 11 pictures need [\d.]+ GiB \(.+\); choose a smaller size"):
        hold_pictures(records, size=(2_000_000, 2_000_000))
    held = hold_pictures(records, size=SIZE)
    with pytest.raises(InputError, match=r"held pictures are of size \(12, 16\), asked for is \(8, 8\); hold them at"):
        make_loader(records, size=(8, 8), batch_size=2, held=held)
    with pytest.raises(InputError, match="the held pictures are not those of the records; hold the pictures of these"):
        make_loader(records[::-1], size=SIZE, batch_size=2, held=held)
