import json
import os
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from made_records import make_records, noise, records_of
from PIL import Image
from written_tables import write_table

from pivotpatch.data import check as checking
from pivotpatch.data.address import open_records
from pivotpatch.data.check import DataSummary, Depth, check_data, doubt_labels, find_unreadable, plot_overview
from pivotpatch.data.records import FileStore, RecordSet
from pivotpatch.errors import InputError, cut


def write_files(folder: Path, files: dict[str, bytes], *, name: str = "made", extra: tuple[str, ...] = ()) -> RecordSet:
    """Records of files that are written, and of names of which nothing is."""
    folder.mkdir(exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return make_records(FileStore(folder, pa.array([*files, *extra])), name=name)


def check(records: RecordSet, *, depth: Depth = "headers") -> DataSummary:
    return check_data([records], depth=depth).summaries[0]


def test_labels_are_counted_as_a_plain_loop_counts_them() -> None:
    # More records than one block, with unknown labels and one that never occurs.
    rng = np.random.default_rng(0)
    target = (rng.random((20_000, 5)) < [0.5, 0.2, 0.05, 0.3, 0.0]).astype(float)
    target[:, 3] = np.maximum(target[:, 3], target[:, 2])
    target[rng.random(target.shape) < [0, 0.1, 0.3, 0, 0.5]] = np.nan
    summary = check(records_of(target, labels="abcde"), depth="labels")
    assert summary.num_records == 20_000
    assert summary.label_counts.tolist() == [int((target[:, i] == 1).sum()) for i in range(5)]
    assert summary.unknown_share == pytest.approx(np.isnan(target).mean())
    assert summary.labels_per_image == pytest.approx((target == 1).sum(axis=1).mean())
    assert summary.never == ("e",)
    expected = np.full((5, 5), np.nan)
    for row in range(5):
        for column in range(5):
            given = target[target[:, row] == 1, column]
            given = given[~np.isnan(given)]  # only images where the other label is known
            if len(given):
                expected[row, column] = given.mean()
    np.testing.assert_allclose(summary.cooccurrence, expected, rtol=1e-12)
    held = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert held["cooccurrence"][4] == [None] * 5


@pytest.mark.parametrize("depth", ["headers", "pixels"])
def test_missing_and_broken_files_are_named(depth: Depth, tmp_path: Path) -> None:
    sound = noise(0)
    files = {"good.jpg": sound, "text.jpg": b"no image", "same.jpg": b"no image", "empty.jpg": b""}
    extra = ("gone.jpg", "folder.jpg", "pipe", "loop", "dangling", "good.jpg/below")
    records = write_files(tmp_path, files, extra=extra)
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nothing")
    told: list[tuple[str, int, int]] = []
    (summary,) = check_data([records], depth=depth, progress=lambda *step: told.append(step)).summaries
    assert summary.missing == ("gone.jpg", "loop", "dangling", "good.jpg/below")
    assert {image.name: image.why for image in summary.broken} == {
        "text.jpg": "is in none of the known formats",
        "same.jpg": "is in none of the known formats",
        "empty.jpg": "is empty",
        "folder.jpg": "cannot be read (it is no regular file)",
        "pipe": "cannot be read (it is no regular file)",
    }
    assert (summary.checked, summary.pictures, summary.duplicates) == (depth, "files", ())
    assert told[-1] == ("look at images", 10, 10)


def test_labels_alone_are_checked_where_nothing_is_to_be_opened(tmp_path: Path) -> None:
    summary = check(write_files(tmp_path, {"a": b"broken"}, extra=("gone",)), depth="labels")
    assert (summary.missing, summary.broken) == ((), ())
    summary = check(open_records("scenes:@val?count=3"), depth="pixels")
    assert (summary.pictures, summary.checked) == ("drawn", "labels")
    with pytest.raises(InputError, match="made: holds no records; give a data set with at least one image"):
        check(write_files(tmp_path, {"a": noise(0)}).select(np.arange(0)))


def test_equal_pixels_are_found_by_decoding_and_equal_beginnings_are_not_enough(tmp_path: Path) -> None:
    pixels = np.zeros((100, 100, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.bmp")
    pixels[0, 0] = 1  # a BMP file begins with its last row
    for level in (0, 9):
        Image.fromarray(pixels).save(tmp_path / f"{level}.png", compress_level=level)
    Image.fromarray(pixels).save(tmp_path / "b.bmp")
    Image.fromarray(pixels.reshape(50, 200, 3)).save(tmp_path / "other shape.png")
    assert (tmp_path / "a.bmp").read_bytes()[:20_000] == (tmp_path / "b.bmp").read_bytes()[:20_000]
    names = ["a.bmp", "b.bmp", "0.png", "9.png", "other shape.png"]
    records = make_records(FileStore(tmp_path, pa.array(names)))
    assert check(records).duplicates == ()
    assert check(records, depth="pixels").duplicates == (("b.bmp", "0.png", "9.png"),)


def test_doubles_within_and_between_data_sets(tmp_path: Path) -> None:
    train = write_files(tmp_path / "a", {"1": noise(1), "2": noise(2), "3": noise(1), "4": noise(4)}, name="train")
    test = write_files(tmp_path / "b", {"5": noise(5), "6": noise(2), "7": noise(1)}, name="test")
    report = check_data([train, test])
    assert [summary.duplicates for summary in report.summaries] == [(("1", "3"),), ()]
    assert check(train.select(np.array([3, 2, 0]))).duplicates == (("3", "1"),)
    held = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert held["shared"][0][0] == {"address": "train", "name": "1"}
    assert [[tuple(image) for image in group] for group in report.shared] == [
        [("train", "1"), ("train", "3"), ("test", "7")],
        [("train", "2"), ("test", "6")],
    ]


@pytest.mark.parametrize("count", [1, 130])
def test_the_overview_shows_what_the_summary_holds(count: int) -> None:
    odd = "$\\frac{", "a very long name that goes on and on and on"  # neither mathematics nor wider than its place
    names = [*odd, *(f"label {i}" for i in range(count))][:count]
    shown = np.random.default_rng(0).random((500, count)) < 0.3
    summary = check(records_of(shown, labels=names), depth="labels")
    bars, matrix, _ = plot_overview(summary).axes
    order = np.argsort(-summary.label_counts, kind="stable")[:100]
    ticks = [[text.get_text() for text in axes.get_yticklabels()] for axes in (bars, matrix)]
    assert ticks == [[cut(names[i], 24) for i in order]] * 2
    assert [bar.get_width() for bar in bars.patches] == summary.label_counts[order].tolist()  # type: ignore[attr-defined]
    drawn = cast("np.ma.MaskedArray[tuple[int, int], np.dtype[np.float64]]", matrix.images[0].get_array())
    shares = summary.cooccurrence[np.ix_(order, order)]
    assert np.array_equal(np.ma.getmaskarray(drawn), np.eye(len(order), dtype=bool))
    assert np.array_equal(drawn.compressed(), shares[~np.eye(len(order), dtype=bool)])


def encode(kind: str, seed: int) -> bytes:
    held = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(held, kind)
    return held.getvalue()


@pytest.mark.parametrize("embedded", [False, True])
def test_what_is_found_before_training_is_what_decoding_would_find(embedded: bool, tmp_path: Path) -> None:
    kinds = ("JPEG", "PNG", "GIF", "WEBP", "BMP")
    files = {f"{kind}.{kind.lower()}": encode(kind, 0) for kind in kinds}
    files |= {f"cut.{kind.lower()}": encode(kind, 1)[:-200] for kind in kinds[:4]}
    files |= {"none.jpg": b"", "text.jpg": b"no image", "more.jpg": encode("JPEG", 2) + b"\0" * 500}
    records = write_files(tmp_path, files, extra=() if embedded else ("gone.jpg",))
    if embedded:
        columns: dict[str, list[Any]] = {
            "image": [{"bytes": held, "path": name} for name, held in files.items()],
            "labels": ["x"] * len(files),
        }
        records = open_records(f"table:{write_table(tmp_path / 't.parquet', columns)}")
    whole = check(records, depth="pixels")
    assert (whole.checked, whole.pictures) == ("pixels", "embedded" if embedded else "files")
    expected = {image.name for image in whole.broken} | {*check(records).missing}
    assert {"cut.jpeg", "cut.png", "cut.webp", "none.jpg", "text.jpg"} <= expected
    assert not {"more.jpg", "BMP.bmp"} & expected
    told = list[tuple[str, int, int]]()
    found = find_unreadable([records, records], progress=lambda *what: told.append(what))
    assert sorted(Path(fault.parts[0]).name for fault in found) == sorted([*expected, *expected])
    assert told == [("look at images", 2 * len(records), 2 * len(records))]


def test_of_many_images_some_are_opened_and_all_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_OPENED", 4)
    files = {f"{place}.jpg": b"no image" if place else noise(0) for place in range(11)}
    records = write_files(tmp_path, files, extra=("gone.jpg",))
    found = [Path(fault.parts[0]).name for fault in find_unreadable([records])]
    assert found == ["3.jpg", "6.jpg", "9.jpg", "gone.jpg"]
    lost = write_files(tmp_path / "lost", {}, extra=tuple("abcdefg"))
    assert [fault.parts[0][-1] for fault in find_unreadable([lost])] == [*"abcd"]  # enough of them
    assert find_unreadable([open_records("scenes:@train?count=9&size=32")]) == []  # drawn when asked for


def test_labels_that_are_perhaps_not_meant_so_are_told(tmp_path: Path) -> None:
    labels = ["Person", "person", "traffic light", "person|Person|traffic  light", "person"]
    write_table(tmp_path / "t.csv", {"image": list("abcde"), "labels": labels})
    records = open_records(f"table:{tmp_path / 't.csv'}")
    lines = doubt_labels(records)
    assert lines == [
        "2 labels are seen in one image alone, too few to learn and to split (label more, or see data.labels): "
        "traffic  light, traffic light",
        "labels that differ by capitals or blanks alone are learned as different ones (write them alike): "
        "Person (2) and person (3), traffic  light (1) and traffic light (1)",
    ]
    assert check(records, depth="labels").notes == tuple(lines)
    assert doubt_labels(records.select(np.arange(3)), records.select(np.arange(3, 5))) == lines
    write_table(tmp_path / "t.csv", {"image": list("ab"), "cat": [0, 0], "dog": [1, 0]})
    assert doubt_labels(*[open_records(f"table:{tmp_path / 't.csv'}")] * 2) == []


LISTS = "(?delimiter=%2C parts them at commas, ?delimiter=%20 at blanks)"


@pytest.mark.parametrize(("columns", "line"), [
    ({"cat": [1, 1, -1], "dog, wild": [1, 0, 1]}, "1 label is in every image where that is known, so not learned "
     "(add images without; 0 or no mention means absent): cat"),
    ({"labels": ["big cat", "dog cat", "cat"]}, None),  # as many words as labels: they may be names
    ({"labels": ["a b|b a|a a|b b", "a b b", "a a b"]}, f"6 labels are perhaps lists {LISTS}: a a, a a b, a b, a b b, "
     "b a, b b"),
    ({"labels": ["cat, dog", "cow|eel", "cow"]}, f"1 label is perhaps a list {LISTS}: cat, dog"),
])  # fmt: skip
def test_columns_perhaps_read_wrongly_are_told(tmp_path: Path, columns: dict[str, list[Any]], line: str | None) -> None:
    address = f"table:{write_table(tmp_path / 't.csv', {'image': list('abc'), **columns})}"
    told = [note for note in check(open_records(address), depth="labels").notes if "seen in one" not in note]
    assert [note.removeprefix(f"{address[6:]}: ") for note in told] == ([] if line is None else [line])
    if "labels" in columns:
        parted = open_records(f"{address}?delimiter=|")  # as it was asked for
        assert not any("perhaps" in note for note in parted.notes)


@pytest.mark.parametrize(("there", "asked", "told"), [
    ("7.JPG", "7.jpg", "there is no such file, but '7.JPG' is there"),
    ("7.jpg", "7", "there is no such file, but '7.jpg' is there"),
    ("7.jpg", " 7.jpg", "there is no such file, but '7.jpg' is there"),
    ("7.jpg", "8.jpg", "there is no such file"),
    ("7.xml", "7.jpg", "there is no such file"),
    ("7.jpg", "https://example.org/7.jpg", "images are not fetched from the web; download them first"),
])  # fmt: skip
def test_what_is_near_a_missing_image_is_told(tmp_path: Path, there: str, asked: str, told: str) -> None:
    fault = find_unreadable([write_files(tmp_path, {there: noise(0)}, extra=(asked,))])[0]
    assert fault.parts[1] == told
