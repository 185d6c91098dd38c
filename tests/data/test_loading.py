"""Batches: what is in them, in which order, and what happens to pictures that cannot be read."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pyarrow as pa
import pytest
import torch
from made_records import COUNT, SIZE, encoded, make_records, picture

from pivotpatch.data.decoding import decode_image
from pivotpatch.data.loading import ImageDataset, make_loader
from pivotpatch.data.records import FileStore, ImageSource, RecordSet
from pivotpatch.data.sampling import EpochSampler
from pivotpatch.errors import InputError

# Worker processes are forked, of which newer Pythons warn wherever a thread runs, as torch's do.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


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
