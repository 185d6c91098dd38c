import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import COUNT, ListStore, picture, records_of
from made_records import encoded as bytes_of
from numpy.typing import NDArray

from pivotpatch.data.address import open_records
from pivotpatch.data.records import FileStore
from pivotpatch.data.split import split_records, write_split
from pivotpatch.errors import InputError
from pivotpatch.runtime.decoding import decode_image

THIRDS = {"train": 0.8, "val": 0.1, "test": 0.1}


def long_tail(seed: int, *, count: int = 400, width: int = 20) -> NDArray[np.bool_]:
    """Labels from half of all images down to about one in a hundred."""
    shares = np.geomspace(0.5, 0.01, width)
    return np.random.default_rng(seed).random((count, width)) < shares


def split(shown: NDArray[np.bool_], fractions: dict[str, float], seed: int) -> dict[str, NDArray[np.int64]]:
    return split_records(records_of(shown), fractions, generator=np.random.default_rng(seed))


def deviation(shown: NDArray[np.bool_], parts: dict[str, NDArray[np.int64]], fractions: dict[str, float]) -> float:
    """Mean distance of each part's share of each label from the share it should have."""
    total = shown.sum(axis=0)
    there = total > 0
    shares = [shown[indices].sum(axis=0)[there] / total[there] for indices in parts.values()]
    return float(np.mean([np.abs(share - asked) for share, asked in zip(shares, fractions.values(), strict=True)]))


@settings(max_examples=60)
@given(
    count=st.integers(4, 60),
    width=st.integers(1, 6),
    density=st.floats(0, 1),
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_parts_are_disjoint_complete_and_of_the_asked_size(
    count: int, width: int, density: float, weights: list[int], seed: int
) -> None:
    shown = np.random.default_rng(seed).random((count, width)) < density
    fractions = {f"part{i}": weight / sum(weights) for i, weight in enumerate(weights)}
    parts = split(shown, fractions, seed)
    assert list(parts) == list(fractions)
    assert np.array_equal(np.sort(np.concatenate(list(parts.values()))), np.arange(count))
    for name, indices in parts.items():
        assert len(indices) >= 1
        assert np.array_equal(indices, np.sort(indices))
        # Parts that were below one record took theirs from the others.
        below = sum(fraction * count < 1 for fraction in fractions.values())
        assert abs(len(indices) - fractions[name] * count) < 1 + below + 1e-6


def covered(shown: NDArray[np.bool_], parts: NDArray[np.int64], count: int) -> int:
    """In how many parts the labels are that have enough images, summed."""
    enough = shown.sum(axis=0) >= count
    return sum(int(shown[parts == part][:, enough].any(axis=0).sum()) for part in range(count))


def test_coverage_is_near_the_best_of_all_splits() -> None:
    reached, best = 0, 0
    for seed in range(60):
        shown = np.random.default_rng(seed).random((7, 4)) < 0.35
        found = split(shown, {"a": 0.55, "b": 0.45}, seed)
        assert [len(indices) for indices in found.values()] == [4, 3]
        parts = np.zeros(7, dtype=np.int64)
        parts[found["b"]] = 1
        reached += covered(shown, parts, 2)
        candidates = itertools.combinations(range(7), 3)
        best += max(covered(shown, np.isin(np.arange(7), chosen).astype(np.int64), 2) for chosen in candidates)
    assert reached >= 0.98 * best


def test_labels_are_shared_out_far_better_than_at_random() -> None:
    stratified, random = [], []
    for seed in range(10):
        shown = long_tail(seed, count=2000)
        parts = split(shown, THIRDS, seed)
        stratified.append(deviation(shown, parts, THIRDS))
        order = np.random.default_rng(seed).permutation(len(shown))
        cuts = np.cumsum([len(indices) for indices in parts.values()])[:-1]
        random.append(deviation(shown, dict(zip(parts, np.split(order, cuts), strict=True)), THIRDS))
    assert np.mean(stratified) < 0.3 * np.mean(random)


def test_images_without_labels_are_shared_out_too() -> None:
    shown = long_tail(3, count=1000, width=3) & (np.arange(1000) % 2 == 0)[:, None]
    blank = ~shown.any(axis=1)
    shares = [blank[indices].mean() for indices in split(shown, THIRDS, 0).values()]
    assert np.allclose(shares, blank.mean(), atol=0.02)


@pytest.mark.parametrize(("fractions", "message"), [
    ({"train": 0.8, "val": 0.1}, r"9 records cannot be split into 0.8, 0.1, in all 0.9; give each part more than 0"),
    ({"train": 1.5, "val": -0.5}, r"cannot be split into 1.5, -0.5, in all 1"),
    ({"a@b": 1.0}, r"parts are named a@b; use letters"),
    ({str(i): 0.1 for i in range(10)}, r"9 records cannot be split into 0.1, 0.1"),
])  # fmt: skip
def test_impossible_fractions(fractions: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        split(np.ones((9, 2), dtype=bool), fractions, 0)


@pytest.mark.parametrize("place", ["above", "beside"])
def test_table_opens_again_with_all_that_went_in(place: str, tmp_path: Path) -> None:
    shown = long_tail(7, count=40, width=4)
    shown[:, 3] = False  # a label that never occurs, and others with signs that tables use themselves
    target = np.where(~shown & (np.random.default_rng(8).random(shown.shape) < 0.2), np.nan, shown)
    paths = FileStore(tmp_path / "my images & more" / "deep", pa.array([f"{i}.jpg" for i in range(40)]))
    records = records_of(target, images=paths, labels=("zebra", "cat, domestic", 'a "b"', "Ünü"))
    parts = split_records(records, THIRDS, generator=np.random.default_rng(0))
    folder = tmp_path if place == "above" else tmp_path / "50%25 of it?" / "me@home+&=é"
    addresses = write_split(records, parts, folder=folder)
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["labels.json", "split.parquet"]
    for name, indices in parts.items():
        again = open_records(addresses[name])
        assert again.labels == records.labels
        for record, index in zip(again, indices, strict=True):
            assert record.image == records[int(index)].image
            assert (record.positive, record.unknown) == (records[int(index)].positive, records[int(index)].unknown)


@pytest.mark.parametrize("encoded", [True, False])
def test_images_without_files_go_into_parquet(encoded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pivotpatch.data.split._BATCH", 16)
    pixels = [np.asarray(picture(index)) for index in range(COUNT)] * 3
    files = [bytes_of(index) for index in range(COUNT)] * 3
    records = records_of(long_tail(0, count=len(files), width=3), images=ListStore([*files] if encoded else [*pixels]))
    parts = split_records(records, {"a": 0.5, "b": 0.5}, generator=np.random.default_rng(0))
    addresses = write_split(records, parts, folder=tmp_path / "out")
    again = open_records(addresses["b"])
    assert [record.name for record in again] == [f"row {index}" for index in parts["b"]]
    for record, index in zip(again, parts["b"], strict=True):
        assert record.positive == records[int(index)].positive
        assert np.array_equal(decode_image(record.image), pixels[index])
        assert not encoded or record.image == files[index]


@pytest.mark.parametrize("label", ["?odd", " a"])
def test_labels_that_look_like_marks_are_refused(label: str, tmp_path: Path) -> None:
    records = records_of(np.ones((2, 1), dtype=bool), labels=(label,))
    with pytest.raises(InputError, match="cannot be told from the marks of a table; rename it"):
        write_split(records, {"a": np.array([0, 1])}, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_labels_of_another_data_set_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_bytes('["größe"]'.encode("latin-1"))
    with pytest.raises(InputError, match=r"labels.json: belongs to another data set; .* folder of its own"):
        write_split(records_of(np.ones((2, 1), dtype=bool)), {"a": np.array([0, 1])}, folder=tmp_path)
    assert (tmp_path / "labels.json").read_bytes() == '["größe"]'.encode("latin-1")


def test_another_split_is_not_overwritten_and_the_same_may_be_made_again(tmp_path: Path) -> None:
    records, parts = records_of(np.ones((3, 1), dtype=bool)), {"a": np.array([0, 1]), "b": np.array([2])}
    assert write_split(records, parts, folder=tmp_path) == write_split(records, parts, folder=tmp_path)
    before = (tmp_path / "split.parquet").read_bytes()
    with pytest.raises(InputError, match="split.parquet: holds another split; remove it, or write into a folder"):
        write_split(records, {"a": np.array([0, 2]), "b": np.array([1])}, folder=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("split*")} == {"split.parquet": before}


def test_an_image_outside_the_folder_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "images").mkdir()
    rows = [f"../images/{number}.jpg" if number == 3 else f"{number}.jpg" for number in range(6)]
    for row in rows:
        (tmp_path / "data" / row).write_bytes(bytes_of(0))
    table = tmp_path / "data" / "photos.csv"
    table.write_text("image,labels\n" + "".join(f"{row},cat\n" for row in rows))
    records = open_records(f"table:{table}?allow_escape=true")
    parts = write_split(records, {"a": np.arange(6)}, folder=tmp_path / "split")
    assert [record.name for record in open_records(parts["a"])] == rows
