import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image

from pivotpatch.data.address import open_records
from pivotpatch.data.check import DataSummary, Depth, check_data
from pivotpatch.data.records import FileStore, ImageSource, ImageStore, LabelLists, LabelSpace, RecordSet
from pivotpatch.errors import InputError


def jpeg(seed: int, *, side: int = 32) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def make_records(images: ImageStore, *, name: str = "made", shown: NDArray[np.bool_] | None = None) -> RecordSet:
    shown = np.ones((len(images), 1), dtype=bool) if shown is None else shown
    labels = LabelSpace(tuple(f"label{i}" for i in range(shown.shape[1])))
    positive = LabelLists.from_lists([np.flatnonzero(row).tolist() for row in shown])
    return RecordSet(name, labels, images=images, positive=positive)


def write_files(folder: Path, files: dict[str, bytes], *, name: str = "made", extra: tuple[str, ...] = ()) -> RecordSet:
    """Records of files that are written, and of names of which nothing is."""
    folder.mkdir(exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return make_records(FileStore(folder, pa.array([*files, *extra])), name=name)


def check(records: RecordSet, *, depth: Depth = "headers") -> DataSummary:
    return check_data([records], depth=depth).summaries[0]


def write_table(path: Path, files: dict[str, bytes]) -> RecordSet:
    """Records of a table with the pictures in it."""
    pictures = [{"bytes": content, "path": name} for name, content in files.items()]
    pq.write_table(pa.table({"image": pictures, "labels": [["cat"]] * len(files)}), path)
    return open_records(f"table:{path}")


class DrawnPictures:
    """Pictures of which nobody may ask for one."""

    def __len__(self) -> int:
        return 100

    def name(self, index: int) -> str:
        return f"picture {index}"

    def source(self, index: int) -> ImageSource:
        raise AssertionError(index)


@pytest.fixture
def labelled() -> tuple[RecordSet, NDArray[np.float64]]:
    """More records than one block, with unknown labels and one that never occurs, and their target (N,L)."""
    rng = np.random.default_rng(0)
    target = (rng.random((20_000, 5)) < [0.5, 0.2, 0.05, 0.3, 0.0]).astype(float)
    target[:, 3] = np.maximum(target[:, 3], target[:, 2])
    target[rng.random(target.shape) < [0, 0.1, 0.3, 0, 0.5]] = np.nan
    records = RecordSet(
        "labelled",
        LabelSpace(("a", "b", "c", "d", "e")),
        images=FileStore(Path("nowhere"), pa.array([f"{i}.jpg" for i in range(len(target))])),
        positive=LabelLists.from_lists([np.flatnonzero(row == 1).tolist() for row in target]),
        unknown=LabelLists.from_lists([np.flatnonzero(np.isnan(row)).tolist() for row in target]),
    )
    return records, target


def test_labels_are_counted_as_a_plain_loop_counts_them(labelled: tuple[RecordSet, NDArray[np.float64]]) -> None:
    records, target = labelled
    summary = check(records, depth="labels")
    assert summary.num_records == 20_000
    assert summary.label_counts.tolist() == [int((target[:, i] == 1).sum()) for i in range(5)]
    assert summary.unknown_share == pytest.approx(np.isnan(target).mean())
    each = (target == 1).sum(axis=1)
    assert summary.labels_per_picture == pytest.approx(each.mean())
    assert list(summary.histogram) == [int((each == k).sum()) for k in range(each.max() + 1)]
    assert summary.never == ("e",)


def test_company_counts_only_pictures_where_the_other_label_is_known(
    labelled: tuple[RecordSet, NDArray[np.float64]],
) -> None:
    records, target = labelled
    expected = np.full((5, 5), np.nan)
    for row in range(5):
        for column in range(5):
            given = target[target[:, row] == 1, column]
            given = given[~np.isnan(given)]
            if len(given):
                expected[row, column] = given.mean()
    found = check(records, depth="labels").cooccurrence
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert found[2, 3] == 1
    assert np.isnan(found[4]).all()


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    sound = jpeg(0)
    files = {"good.jpg": sound, "text.jpg": b"not a picture", "empty.jpg": b"", "cut header.jpg": sound[:100]}
    records = write_files(tmp_path, files, extra=("gone.jpg", "folder.jpg"))
    (tmp_path / "folder.jpg").mkdir()
    summary = check(records)
    assert summary.missing == ("gone.jpg",)
    assert {picture.name: picture.why for picture in summary.broken} == {
        "text.jpg": "is in none of the known formats",
        "empty.jpg": "is empty",
        "cut header.jpg": "cannot be decoded (Truncated File Read)",
        "folder.jpg": "is not a plain file",
    }
    assert summary.checked == "headers"
    assert summary.pictures == "files"


@pytest.mark.parametrize("embedded", [False, True])
def test_only_pixels_show_that_a_picture_is_cut_short(embedded: bool, tmp_path: Path) -> None:
    files = {"good.jpg": jpeg(0, side=64), "cut.jpg": jpeg(1, side=64)[:-1000]}
    records = write_table(tmp_path / "made.parquet", files) if embedded else write_files(tmp_path, files)
    assert check(records).broken == ()
    summary = check(records, depth="pixels")
    (broken,) = summary.broken
    assert broken.name == "cut.jpg"
    assert "truncated" in broken.why
    assert summary.checked == "pixels"
    assert summary.pictures == ("embedded" if embedded else "files")


def test_missing_file_is_missing_at_every_depth(tmp_path: Path) -> None:
    records = write_files(tmp_path, {"good.jpg": jpeg(0)}, extra=("gone.jpg",))
    for depth in ("headers", "pixels"):
        summary = check(records, depth=depth)
        assert (summary.missing, summary.broken) == (("gone.jpg",), ())


@pytest.mark.parametrize("depth", ["headers", "pixels"])
def test_what_is_no_plain_file_gets_one_verdict(depth: Depth, tmp_path: Path) -> None:
    records = write_files(tmp_path, {"good.jpg": jpeg(0)}, extra=("pipe", "loop", "dangling", "good.jpg/below"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nothing")
    summary = check(records, depth=depth)
    assert [tuple(vars(picture).values()) for picture in summary.broken] == [
        ("pipe", "is not a plain file"),
        ("loop", f"cannot be read ({os.strerror(errno.ELOOP)})"),
    ]
    assert summary.missing == ("dangling", "good.jpg/below")


def test_picture_with_too_many_pixels_is_broken(tmp_path: Path) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4) + kind + body + zlib.crc32(kind + body).to_bytes(4)

    too_long = "1 x 100001 pixels: a side has more than 100000"
    too_many = "pixels are more than the limit of 89478485"
    cases = {
        (10_000, 10_000): f"10000 x 10000 = 100000000 {too_many}",
        (60_000, 60_000): f"60000 x 60000 = 3600000000 {too_many}",
        (1, 100_001): too_long,
    }
    for (width, height), why in cases.items():
        header = chunk(b"IHDR", width.to_bytes(4) + height.to_bytes(4) + bytes([8, 2, 0, 0, 0]))
        bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
        (broken,) = check(write_files(tmp_path, {"bomb.png": bomb})).broken
        assert broken.why == why


def test_doubles_within_and_between_data_sets(tmp_path: Path) -> None:
    train = write_files(tmp_path / "a", {"1": jpeg(1), "2": jpeg(2), "3": jpeg(1), "4": jpeg(4)}, name="train")
    test = write_files(tmp_path / "b", {"5": jpeg(5), "6": jpeg(2), "7": jpeg(1)}, name="test")
    report = check_data([train, test])
    assert [summary.duplicates for summary in report.summaries] == [(("1", "3"),), ()]
    assert [[tuple(picture) for picture in group] for group in report.shared] == [
        [("train", "1"), ("train", "3"), ("test", "7")],
        [("train", "2"), ("test", "6")],
    ]


def test_same_size_and_beginning_are_not_enough(tmp_path: Path) -> None:
    pixels = np.zeros((2, 100, 100, 3), dtype=np.uint8)
    pixels[1, 0, 0] = 1  # a BMP file begins with its last row
    contents = []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "BMP")
        contents.append(file.getvalue())
    assert contents[0][:20_000] == contents[1][:20_000]
    for depth in ("headers", "pixels"):
        assert check(write_files(tmp_path, dict(zip("ab", contents, strict=True))), depth=depth).duplicates == ()


def test_same_pixels_in_other_bytes_are_found_by_decoding(tmp_path: Path) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8))
    picture.save(tmp_path / "a.png", compress_level=0)
    picture.save(tmp_path / "b.png", compress_level=9)
    Image.fromarray(np.asarray(picture).reshape(10, 40, 3)).save(tmp_path / "other shape.png")
    records = make_records(FileStore(tmp_path, pa.array(["a.png", "b.png", "other shape.png"])))
    assert check(records).duplicates == ()
    assert check(records, depth="pixels").duplicates == (("a.png", "b.png"),)


def test_broken_files_are_not_counted_as_doubles(tmp_path: Path) -> None:
    assert check(write_files(tmp_path, {"a": b"same", "b": b"same"})).duplicates == ()


def test_records_chosen_from_a_larger_set_are_the_ones_checked(tmp_path: Path) -> None:
    records = write_files(tmp_path, {"a": jpeg(0), "b": b"broken", "c": jpeg(0), "d": jpeg(3)}, extra=("e",))
    summary = check(records.select(np.array([4, 2, 0])))
    assert (summary.missing, summary.broken, summary.duplicates) == (("e",), (), (("c", "a"),))


def test_drawn_pictures_are_not_drawn_to_be_checked() -> None:
    summary = check(make_records(DrawnPictures()), depth="pixels")
    assert (summary.pictures, summary.checked, summary.duplicates) == ("drawn", "labels", ())


def test_fast_check_opens_no_file(tmp_path: Path) -> None:
    summary = check(write_files(tmp_path, {"a": b"broken"}, extra=("gone",)), depth="labels")
    assert (summary.checked, summary.missing, summary.broken) == ("labels", (), ())


def test_processes_find_what_one_finds(tmp_path: Path) -> None:
    files = {f"{i:03}.jpg": jpeg(i % 150) for i in range(200)} | {"200.jpg": b"broken"}
    records = write_files(tmp_path, files, extra=("gone.jpg",))
    told: list[tuple[str, int, int]] = []
    one = check_data([records], depth="pixels")
    two = check_data([records], depth="pixels", workers=2, progress=lambda *step: told.append(step))
    assert json.dumps(one.to_dict()) == json.dumps(two.to_dict())
    assert len(two.summaries[0].duplicates) == 50
    assert told[-1] == ("look at pictures", 202, 202)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_interrupt_ends_the_workers(tmp_path: Path) -> None:
    records = write_files(tmp_path, {f"{i}.jpg": jpeg(i) for i in range(100)})

    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_data([records], progress=interrupt)


def test_interrupt_of_workers_that_are_still_starting_is_quiet(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{i}.jpg": jpeg(i) for i in range(200)})
    script = (
        "import sys, time; from pathlib import Path; import pyarrow as pa\n"
        "from pivotpatch.data.check import check_data\n"
        "from pivotpatch.data.records import FileStore, LabelLists, LabelSpace, RecordSet\n"
        "class Store(FileStore):\n"
        "    def source(self, index):\n"
        "        if index == 64: print('first worker started', flush=True); time.sleep(30)\n"
        "        return super().source(index)\n"
        "images = Store(Path(sys.argv[1]), pa.array([f'{i}.jpg' for i in range(200)]))\n"
        "positive = LabelLists.from_lists([[0]] * 200)\n"
        "records = RecordSet('made', LabelSpace(('cat',)), images=images, positive=positive)\n"
        "try: check_data([records], depth='pixels', workers=2)\n"
        "except KeyboardInterrupt: sys.exit(130)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first worker started\n"
        time.sleep(0.5)  # so that the worker is amid its imports
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to parent and workers
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")


def test_report_is_json(labelled: tuple[RecordSet, NDArray[np.float64]], tmp_path: Path) -> None:
    pictures = write_files(tmp_path, {"a": jpeg(0), "b": jpeg(0), "c": b"x"}, extra=("d",))
    report = check_data([pictures, pictures])
    held = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    first = held["summaries"][0]
    assert first["missing"] == ["d"]
    assert first["broken"] == [{"name": "c", "why": "is in none of the known formats"}]
    assert first["duplicates"] == [["a", "b"]]
    assert held["shared"][0][0] == {"address": "made", "name": "a"}
    labels = json.loads(json.dumps(check(labelled[0], depth="labels").to_dict(), allow_nan=False))
    assert labels["cooccurrence"][4] == [None] * 5
    assert labels["label_counts"]["a"] == int((labelled[1][:, 0] == 1).sum())
    assert labels["never"] == ["e"]


def test_data_set_without_records_is_refused(tmp_path: Path) -> None:
    records = write_files(tmp_path, {"a": jpeg(0)}).select(np.arange(0))
    with pytest.raises(InputError, match="made: holds no records; give a data set with at least one picture"):
        check_data([records])
