"""Batches: what is in them, in which order, and what happens to pictures that cannot be read."""

import os
import pickle
import signal
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from pivotpatch.core.errors import InputError
from pivotpatch.data import loading
from pivotpatch.data.address import open_records
from pivotpatch.data.decoding import decode_image
from pivotpatch.data.loading import Batch, ImageDataset, Loader, hold_pictures, make_loader
from pivotpatch.data.records import FileStore, ImageSource, LabelLists, LabelSpace, RecordSet
from pivotpatch.data.sampling import EpochSampler

SIZE = (12, 16)
COUNT = 11

# Worker processes are forked, of which newer Pythons warn wherever a thread runs, as torch's do.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class ListStore:
    """Pictures given one by one."""

    def __init__(self, sources: list[ImageSource]) -> None:
        self.sources = sources

    def __len__(self) -> int:
        return len(self.sources)

    def name(self, index: int) -> str:
        return f"row {index}"

    def source(self, index: int) -> ImageSource:
        return self.sources[index]


def picture(index: int) -> Image.Image:
    """A picture whose colour tells its index."""
    return Image.new("RGB", (20 + index, 24), (20 * index, 255 - 20 * index, index))


def encoded(index: int) -> bytes:
    stream = BytesIO()
    picture(index).save(stream, "PNG")
    return stream.getvalue()


def make_records(sources: list[ImageSource] | FileStore) -> RecordSet:
    store = sources if isinstance(sources, FileStore) else ListStore(sources)
    return RecordSet(
        "test",
        LabelSpace(("a", "b", "c")),
        images=store,
        positive=LabelLists.from_lists([[i % 3] for i in range(len(store))]),
        unknown=LabelLists.from_lists([[(i + 1) % 3] if i % 2 else [] for i in range(len(store))]),
    )


@pytest.fixture
def records() -> RecordSet:
    return make_records([encoded(index) for index in range(COUNT)])


@pytest.fixture
def damaged() -> RecordSet:
    """Pictures 2, 4, 5 and 8 cannot be read."""
    return make_records([b"damaged" if index in (2, 4, 5, 8) else encoded(index) for index in range(COUNT)])


def expected_target(index: int) -> list[float]:
    target = [0.0, 0.0, 0.0]
    target[index % 3] = 1.0
    if index % 2:
        target[(index + 1) % 3] = torch.nan
    return target


@pytest.mark.parametrize("kind", ["files", "bytes", "arrays"])
def test_batches_hold_each_picture_with_its_target(kind: str, tmp_path: Path) -> None:
    if kind == "files":
        for index in range(COUNT):
            (tmp_path / f"{index}.png").write_bytes(encoded(index))
        source: list[ImageSource] | FileStore = FileStore(tmp_path, pa.array([f"{i}.png" for i in range(COUNT)]))
    elif kind == "bytes":
        source = [encoded(index) for index in range(COUNT)]
    else:
        source = [np.asarray(picture(index)) for index in range(COUNT)]
    batches = list(make_loader(make_records(source), size=SIZE, batch_size=4))
    assert [len(batch.indices) for batch in batches] == [4, 4, 3]
    assert [i for batch in batches for i in batch.indices.tolist()] == list(range(COUNT))
    for batch in batches:
        assert batch.images.shape == (len(batch.indices), 3, *SIZE)
        assert batch.images.dtype == torch.uint8
        for image, target, index in zip(batch.images, batch.target, batch.indices.tolist(), strict=True):
            assert (
                image.permute(1, 2, 0).numpy().tolist() == decode_image(np.asarray(picture(index)), size=SIZE).tolist()
            )
            torch.testing.assert_close(target, torch.tensor(expected_target(index)), equal_nan=True)


def test_a_selection_keeps_pictures_and_targets_together(records: RecordSet) -> None:
    chosen = records.select(np.array([7, 1, 3]))
    (batch,) = make_loader(chosen, size=SIZE, batch_size=8)
    assert batch.images[:, 2, 0, 0].tolist() == [7, 1, 3]  # the blue channel holds the original index
    assert batch.indices.tolist() == [0, 1, 2]
    torch.testing.assert_close(batch.target, chosen.target(), equal_nan=True)


def test_one_sample(records: RecordSet, damaged: RecordSet) -> None:
    sample = ImageDataset(records, size=SIZE)[-1]
    assert sample.index == COUNT - 1
    assert sample.image.shape == (3, *SIZE)
    assert sample.image[:, 0, 0].tolist() == [200, 55, 10]
    assert sample.target.tolist()[1] == 1.0
    with pytest.raises(InputError, match="row 4: is in none of the known formats"):
        ImageDataset(damaged, size=SIZE)[4]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_order_is_a_function_of_seed_and_epoch(records: RecordSet, num_workers: int) -> None:
    loader = make_loader(records, size=SIZE, batch_size=3, shuffle=True, seed=5, num_workers=num_workers)
    epochs = [[i for batch in loader for i in batch.indices.tolist()] for _ in range(3)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    for epoch, order in enumerate(epochs):
        batches = EpochSampler(COUNT, batch_size=3, shuffle=True, seed=5, epoch=epoch)
        assert order == [index for batch in batches for index in batch]
    loader.epoch_sampler.set_epoch(1, start=2)
    assert len(loader) == 2
    assert [i for batch in loader for i in batch.indices.tolist()] == epochs[1][6:]
    assert loader.epoch_sampler.epoch == 2
    assert loader.epoch_sampler.start == 0


def test_a_broken_off_pass_begins_anew(records: RecordSet) -> None:
    loader = make_loader(records, size=SIZE, batch_size=2, shuffle=True, num_workers=2)
    first = next(iter(loader)).indices.tolist()
    assert [i for batch in loader for i in batch.indices.tolist()][:2] == first
    assert loader.epoch_sampler.epoch == 1


def test_drop_last(records: RecordSet) -> None:
    loader = make_loader(records, size=SIZE, batch_size=4, drop_last=True)
    assert [len(batch.indices) for batch in loader] == [4, 4]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 16])
def test_processes_stay_in_step_and_see_each_record_once(damaged: RecordSet, world: int, num_workers: int) -> None:
    shares = [
        list(
            make_loader(
                damaged,
                size=SIZE,
                batch_size=2,
                on_error="skip",
                num_workers=num_workers,
                rank=rank,
                world=world,
                every_batch=True,
            )
        )
        for rank in range(world)
    ]
    assert [len(share) for share in shares] == [6] * world
    assert sorted(i for share in shares for batch in share for i in batch.indices.tolist()) == [0, 1, 3, 6, 7, 9, 10]
    assert sorted(f.index for share in shares for batch in share for f in batch.failures) == [2, 4, 5, 8]
    for batch in (batch for share in shares for batch in share):
        assert batch.images.shape == (len(batch.indices), 3, *SIZE)
        assert batch.images.dtype == torch.uint8
        assert batch.target.shape == (len(batch.indices), 3)
    assert any(len(batch.indices) == 0 for share in shares for batch in share)


PASS_IN_STEPS = """
import signal, sys
from pivotpatch.data.address import open_records
from pivotpatch.data.loading import make_loader

loader = make_loader(open_records("scenes:@val?count=8&size=32"), size=(8, 8), batch_size=1, num_workers=2)
for batch in loader:
    for number in (signal.SIGINT, signal.SIGTERM):  # as a training loop that finishes its step; workers run already
        signal.signal(number, lambda *_: None)
    print(batch.indices.item(), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="only SIGINT can be refused here")
def test_a_pass_survives_signals_to_the_process_group() -> None:
    """As Ctrl-C in a terminal sends them, or a service manager."""
    command = [sys.executable, "-c", PASS_IN_STEPS]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        for index in range(8):
            assert running.stdout.readline() == f"{index}\n"
            os.killpg(running.pid, signal.SIGINT if index % 2 else signal.SIGTERM)
            running.stdin.write("go on\n")
            running.stdin.flush()
        _, errors = running.communicate(timeout=60)  # the workers end with the main process, whose loader still lives
    assert (running.returncode, errors) == (0, "")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_unreadable_picture_ends_the_pass_by_default(damaged: RecordSet, num_workers: int) -> None:
    loader = iter(make_loader(damaged, size=SIZE, batch_size=2, num_workers=num_workers))
    assert next(loader).indices.tolist() == [0, 1]
    with pytest.raises(InputError, match=r"^row 2: is in none of the known formats; give one of [\w, ]+$"):
        next(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipped_pictures_are_left_out_and_listed(damaged: RecordSet, num_workers: int) -> None:
    loader = make_loader(damaged, size=SIZE, batch_size=2, on_error="skip", num_workers=num_workers)
    for _ in range(2):  # the second pass lists its own failures only
        batches = list(loader)
        # Of the batch (4, 5) nothing could be read.
        assert [batch.indices.tolist() for batch in batches] == [[0, 1], [3], [6, 7], [9], [10]]
        assert [[failure.index for failure in batch.failures] for batch in batches] == [[], [2], [], [8], []]
        assert [(failure.index, failure.name) for failure in loader.failures] == [
            (index, f"row {index}") for index in (2, 4, 5, 8)
        ]
        assert str(loader.failures[1].error).startswith("row 4: is in none of the known formats")
        for batch in batches:
            assert batch.images[:, 2, 0, 0].tolist() == batch.indices.tolist()
            torch.testing.assert_close(batch.target, damaged.target(batch.indices.numpy()), equal_nan=True)


def test_nothing_readable_at_all() -> None:
    loader = make_loader(make_records([b"", b"damaged", b"x"]), size=SIZE, batch_size=2, on_error="skip")
    assert list(loader) == []
    assert len(loader.failures) == 3


def test_a_missing_file_is_skipped_by_name(tmp_path: Path) -> None:
    (tmp_path / "here.png").write_bytes(encoded(1))
    store = FileStore(tmp_path, pa.array(["here.png", "sub/gone.png"]))
    loader = make_loader(make_records(store), size=SIZE, batch_size=2, on_error="skip")
    assert [batch.indices.tolist() for batch in loader] == [[0]]
    assert loader.failures[0].name == "sub/gone.png"
    assert str(tmp_path / "sub" / "gone.png") in str(loader.failures[0].error)


def test_pixel_limit_reaches_the_decoder(records: RecordSet) -> None:
    loader = make_loader(records, size=SIZE, batch_size=4, max_pixels=24 * 22, on_error="skip")
    assert [i for batch in loader for i in batch.indices.tolist()] == [0, 1, 2]


def test_the_callers_random_state_is_left_alone(records: RecordSet) -> None:
    before = torch.get_rng_state()
    list(make_loader(records, size=SIZE, batch_size=4, shuffle=True))
    assert torch.equal(before, torch.get_rng_state())


def test_wrong_arguments_are_refused(records: RecordSet) -> None:
    with pytest.raises(InputError, match="make_loader: on_error is 'skp'; did you mean 'skip'"):
        make_loader(records, size=SIZE, batch_size=2, on_error="skp")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"test: pictures of size \(0, 5\); give rows"):
        make_loader(records, size=(0, 5), batch_size=2)
    with pytest.raises(InputError, match="batch_size is 0; give a whole number, 1 or more"):
        make_loader(records, size=SIZE, batch_size=0)
    with pytest.raises(InputError, match="make_loader: num_workers is -1; give 0 or more"):
        make_loader(records, size=SIZE, batch_size=2, num_workers=-1)


def test_the_error_survives_a_process_boundary() -> None:
    error = InputError("a.jpg", "is empty", "replace it")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


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
