import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_records import encoded
from written_tables import TEXT, labels_of

from pivotpatch.data import table_files
from pivotpatch.data.table import read_table
from pivotpatch.data.table_files import read_schema
from pivotpatch.errors import InputError


@pytest.mark.parametrize(("name", "content", "message"), [
    ("t.csv", b"", r"t\.csv: the file is empty; check that it is the right file"),
    ("t.csv", b"image,labels\n", r"t\.csv: the table has no rows; give at least one image"),
    ("t.csv", b"image,labels\na,cat\nb,caf\xe9\n", r"Row #3: CSV conversion error to string: invalid UTF8 data"),
    ("t.csv", "image;labels\na;b\n".encode("utf-16"), r"t\.csv: .*; save it as UTF-8, which Excel calls CSV UTF-8"),
    ("t.csv", b"image,labels\na,cat\nb,cat,dog\n", r"Row #3: Expected 2 columns, got 3"),
    ("t.csv", b'image,labels\na,cat\nb,"cat\nc,dog\n', r"t\.csv, line 3: badly quoted; close the quotes"),
    ("t.csv", b"image,labels,image\na,cat,b\n", r"two columns are named 'image'; check"),
    ("t.jsonl", b'{"image": "a", "labels": []}\n{"image": "b", "lab', r"jsonl: damaged .* \(line 2: Unterminated"),
    ("t.jsonl", b"[" * 100_000, r"t\.jsonl: damaged or cut short \(line 1: maximum recursion"),
    ("t.jsonl", b'{"image": "\\ud800", "labels": ["x"]}', r"t\.jsonl: damaged or cut short \(.*surrogates"),
    ("t.parquet", b"PAR1 and no more", r"t\.parquet: damaged or cut short \(.*; correct it, or copy"),
    ("t.xlsx", b"PK", r"t\.xlsx: unknown kind of table '\.xlsx'; give one of \.csv, \.tsv"),
], ids=lambda value: str(value)[:24])  # fmt: skip
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_table(str(tmp_path / name), None)


@pytest.mark.parametrize(
    "odd", [b"x" * 200_000, b'"' + b"x" * 200_000 + b'"', b"caf\xe9"], ids=["long", "quoted", "latin"]
)
def test_a_lone_quote_within_a_value_is_one(odd: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b'image,labels,note\na,cat,5" disk\nb,dog,' + odd + b"\n")
    assert len(read_table(f"{tmp_path / 't.csv'}", None, labels="labels")) == 2


def test_json_columns_that_begin_or_change_far_down(tmp_path: Path) -> None:
    rows = [{"image": f"2020-01-{i:05d}", "cat": 1} for i in range(1000)]  # dates to a reader that guesses
    lines = [json.dumps(row) for row in [*rows, {"image": "x.jpg", "cat": 0, "dog": 1}]]
    (tmp_path / "t.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    records = read_table(str(tmp_path / "t.jsonl"), None)
    assert records.labels.names == ("cat", "dog")
    assert [record.name for record in records] == [*(row["image"] for row in rows), "x.jpg"]
    assert (records[0].positive, records[0].unknown) == ((0,), (1,))
    assert (records[1000].positive, records[1000].unknown) == ((1,), ())
    (tmp_path / "t.jsonl").write_text("\n".join([*lines, '{"image": "y.jpg", "cat": [1], "dog": 1}']))
    with pytest.raises(InputError, match=r"t\.jsonl: damaged or cut short \(.*; correct it"):
        read_table(str(tmp_path / "t.jsonl"), None)


LISTS = pa.array([["dog", "cat"], [], ["dog"]])


@pytest.mark.parametrize(
    ("image", "labels"),
    [
        (pa.array(TEXT["image"]).dictionary_encode(), pa.array(["dog|cat", "", "dog"]).dictionary_encode()),
        (pa.array(TEXT["image"], pa.large_string()), LISTS.cast(pa.large_list(pa.large_string()))),
        (pa.array(TEXT["image"], pa.string_view()), LISTS.cast(pa.list_(pa.string_view()))),
        (pa.array([b"a", b"b", b"c"], pa.binary_view()), LISTS.cast(pa.list_(pa.dictionary(pa.int32(), pa.string())))),
        (pa.array([b"a", b"b", b"c"]).dictionary_encode(), LISTS),
    ],
    ids=["dictionary", "large", "string_view", "binary_view", "binary_dictionary"],
)
def test_columns_as_pandas_and_polars_write_them(image: pa.Array, labels: pa.Array, tmp_path: Path) -> None:
    try:
        pq.write_table(pa.table({"image": image, "labels": labels}), tmp_path / "t.parquet")
    except pa.ArrowNotImplementedError:
        pytest.skip("this version of pyarrow cannot write views")
    records = read_table(str(tmp_path / "t.parquet"), None)
    assert [present for present, _ in labels_of(records).values()] == [{"cat", "dog"}, set(), {"dog"}]
    assert records[2].image == (b"c" if "binary" in str(image.type) else tmp_path / "c.jpg")


def test_a_table_with_too_many_columns_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "MAX_COLUMNS", 7)
    names = ["image", *(f"c{place}" for place in range(7))]
    (tmp_path / "t.csv").write_text(",".join(names) + "\n" + ",".join(["a"] * 8))
    (tmp_path / "t.tsv").write_text("\t".join(names) + "\n" + "\t".join(["a"] * 8))
    (tmp_path / "t.jsonl").write_text(json.dumps({"image": "a"}) + "\n" + json.dumps(dict.fromkeys(names, 1)))
    pq.write_table(pa.table([pa.array([1])] * 8, names=names), tmp_path / "t.parquet")
    for path in tmp_path.iterdir():
        with pytest.raises(InputError, match=rf"{path.name}: 8 columns are more than the limit of 7; check"):
            read_schema(path)
    monkeypatch.setattr(table_files, "MAX_COLUMNS", 8)
    assert all(read_schema(path).names == names for path in tmp_path.iterdir())


HF_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


IMAGES = [encoded(level) for level in range(10)]


def write_shards(folder: Path, *, kind: str = "struct", **options: Any) -> None:
    """Ten images in two files of two row groups each, labelled by their level."""
    for shard in (0, 1):
        levels = range(5 * shard, 5 * shard + 5)
        if kind == "struct":
            values = [{"bytes": IMAGES[i], "path": f"{i}.png"} for i in levels]
            image = pa.array(values, HF_IMAGE)
        else:
            image = pa.array([IMAGES[i] for i in levels], pa.large_binary() if kind == "large" else pa.binary())
        table = pa.table({"image": image, "labels": [[str(i)] for i in levels]})
        pq.write_table(table, folder / f"train-{shard:05d}-of-00002.parquet", row_group_size=3, **options)


@pytest.mark.parametrize("kind", ["struct", "binary", "large"])
@pytest.mark.parametrize("options", [{}, {"compression": "none", "use_dictionary": False}, {"write_statistics": False}])
def test_images_come_back_in_any_order(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    write_shards(tmp_path, kind=kind, **options)
    records = read_table(str(tmp_path), "train")
    for index in (7, 0, 9, 2, 3, 7, 5, 1, 8, 4, 6):
        record = records[index]
        assert record.image == IMAGES[index]
        assert record.name == (
            f"{index}.png" if kind == "struct" else f"train-0000{index // 5}-of-00002.parquet#{index % 5 + 1}"
        )
        assert records.labels.names[record.positive[0]] == str(index)


def test_files_are_unpacked_when_they_are_used(tmp_path: Path, cache: Path) -> None:
    write_shards(tmp_path)
    records = pickle.loads(pickle.dumps(read_table(str(tmp_path), None)))
    assert not cache.exists()
    assert [records[i].image for i in (8, 9)] == IMAGES[8:]
    (unpacked,) = cache.iterdir()
    assert unpacked.name.startswith("train-00001-of-00002-")
    shutil.rmtree(cache)  # which may go at any time
    assert read_table(str(tmp_path), None)[4].image == IMAGES[4]
    assert records[7].image == IMAGES[7]
    shutil.rmtree(cache)
    table_files._map_images.cache_clear()
    (tmp_path / "train-00000-of-00002.parquet").unlink()
    with pytest.raises(InputError, match=r"train-00000-of-00002\.parquet: the file has changed since it was opened"):
        records[0]


def test_a_file_may_have_the_longest_name(tmp_path: Path) -> None:
    path = tmp_path / f"{'あ' * 80}.parquet"  # 248 bytes of 255
    pq.write_table(pa.table({"image": [b"image"], "labels": ["x"]}), path)
    assert read_table(str(path), None)[0].image == b"image"


def test_a_new_file_is_not_read_from_the_old_cache(tmp_path: Path) -> None:
    path, sizes = tmp_path / "t.parquet", set()
    for time, image in enumerate((b"first", b"other")):
        pq.write_table(pa.table({"image": [image], "labels": ["x"]}), path, write_statistics=False)
        os.utime(path, ns=(0, time))
        sizes.add(path.stat().st_size)
        assert read_table(str(path), None)[0].image == image
    assert len(sizes) == 1


def test_what_cannot_be_unpacked(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table({"image": [os.urandom(5000)], "labels": ["x"]})
    pq.write_table(table, path, compression="gzip", use_dictionary=False)  # gzip has a checksum
    content = path.read_bytes()
    path.write_bytes(content[:2000] + bytes(40) + content[2040:])
    message = r"unpacked: images of .*t\.parquet cannot be unpacked here .*; copy the file again .*PIVOTPATCH_CACHE"
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            read_table(str(path), None)[0]
        assert not [path for path in cache.glob("*") if path.is_file()]
        path.write_bytes(content)
        if cache.is_dir():
            cache.rmdir()
            cache.write_text("a file where the folder should be")
