"""Batches: what is in them, in which order, and what happens to pictures that cannot be read."""

import pickle
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from pivotpatch.core.errors import InputError
from pivotpatch.data.decoding import decode_image
from pivotpatch.data.loading import EpochSampler, ImageDataset, make_loader
from pivotpatch.data.records import FileStore, ImageSource, LabelLists, LabelSpace, RecordSet

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
    assert epochs == [list(EpochSampler(COUNT, shuffle=True, seed=5, epoch=epoch)) for epoch in range(3)]
    loader.epoch_sampler.set_epoch(1, start=6)
    assert len(loader) == 2
    assert [i for batch in loader for i in batch.indices.tolist()] == epochs[1][6:]
    assert loader.epoch_sampler.epoch == 2
    assert loader.epoch_sampler.start == 0


def test_neighbouring_seeds_and_epochs_do_not_share_an_order() -> None:
    orders = {tuple(EpochSampler(50, shuffle=True, seed=seed, epoch=epoch)) for seed in range(6) for epoch in range(6)}
    assert len(orders) == 36


def test_a_broken_off_pass_begins_anew(records: RecordSet) -> None:
    loader = make_loader(records, size=SIZE, batch_size=2, shuffle=True, num_workers=2)
    first = next(iter(loader)).indices.tolist()
    assert [i for batch in loader for i in batch.indices.tolist()][:2] == first
    assert loader.epoch_sampler.epoch == 1


def test_drop_last(records: RecordSet) -> None:
    loader = make_loader(records, size=SIZE, batch_size=4, drop_last=True)
    assert [len(batch.indices) for batch in loader] == [4, 4]


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
    with pytest.raises(InputError, match="make_loader: batch_size is 0 and num_workers 0; give a batch_size of 1"):
        make_loader(records, size=SIZE, batch_size=0)
    with pytest.raises(InputError, match="make_loader: batch_size is 2 and num_workers -1; give .* 0 or more"):
        make_loader(records, size=SIZE, batch_size=2, num_workers=-1)
    with pytest.raises(InputError, match="EpochSampler: seed is -1; give a whole number, 0 or more"):
        make_loader(records, size=SIZE, batch_size=2, seed=-1)


def test_a_place_before_the_first_sample_is_refused() -> None:
    sampler = EpochSampler(37, shuffle=True, seed=0, epoch=2, start=5)
    with pytest.raises(InputError, match="epoch is 0 and start -3; give whole numbers, 0 or more"):
        sampler.set_epoch(0, start=-3)
    with pytest.raises(InputError, match="epoch is -1 and start 0"):
        sampler.set_epoch(-1)
    assert (sampler.epoch, sampler.start) == (2, 5)
    sampler.set_epoch(0, start=50)
    assert len(list(sampler)) == len(sampler) == 0


def test_the_error_survives_a_process_boundary() -> None:
    error = InputError("a.jpg", "is empty", "replace it")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
