import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from written_tables import TEXT, labels_of

from pivotpatch.data import table_files
from pivotpatch.data.table import read_table
from pivotpatch.data.table_files import find_tables, read_schema
from pivotpatch.errors import InputError


@pytest.mark.parametrize(("name", "content", "message"), [
    ("t.csv", b"", r"t\.csv: the file is empty; check that it is the right file"),
    ("t.csv", b"image,labels\n", r"t\.csv: the table has no rows; give at least one image"),
    ("t.csv", b"image,labels\na,cat\nb,caf\xe9\n", r"Row #3: CSV conversion error to string: invalid UTF8 data"),
    ("t.csv", b"image,labels\xe9\na,cat\n", r"t\.csv: is no UTF-8 text \(.*surrogates.*; save it as UTF-8, which"),
    ("t.csv", b"image;labels\na;caf\xe9\n", r"invalid UTF8 data.*; save it as UTF-8, which Excel calls CSV UTF-8"),
    ("t.csv", "image;labels\na;b\n".encode("utf-16"), r"t\.csv: .*; save it as UTF-8, which Excel calls CSV UTF-8"),
    ("t.csv", b"image,labels\na,cat\nb,cat,dog\n", r"Row #3: Expected 2 columns, got 3"),
    ("t.csv", b'image,labels\na,cat\nb,"cat\nc,dog\n', r"t\.csv, line 3: badly quoted; close the quotes"),
    ("t.tsv", b'image\tlabels\na\tcat\nb\t"cat\nc\t"dog"\n', r"t\.tsv, line 3: badly quoted; close the quotes"),
    ("t.csv", b"image,labels,image\na,cat,b\n", r"two columns are named 'image'; check"),
    ("t.jsonl", b'{"image": "a", "labels": []}\n{"image": "b", "lab', r"jsonl: damaged .* \(line 2: Unterminated"),
    ("t.jsonl", b'{"image": "a"}\n\n[1]\n', r"t\.jsonl: damaged .* \(line 3: 'list' object is not a mapping\)"),
    ("t.jsonl", b"[" * 100_000, r"t\.jsonl: damaged or cut short \(line 1: maximum recursion"),
    ("t.jsonl", b'{"image": "a", "labels": "x"}\n{"image": "b", "labels": ["x"]}', r"Expected bytes, got a 'list'"),
    ("t.jsonl", b'{"image": "\\ud800", "labels": ["x"]}', r"t\.jsonl: damaged or cut short \(.*surrogates"),
    ("t.parquet", b"PAR1 and no more", r"t\.parquet: damaged or cut short \(.*; correct it, or copy"),
    ("t.xlsx", b"PK", r"t\.xlsx: unknown kind of table '\.xlsx'; give one of \.csv, \.tsv"),
], ids=lambda value: str(value)[:24])  # fmt: skip
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_table(str(tmp_path / name), None)


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


@pytest.mark.parametrize("location", ["none.csv", "*.parquet", ""])
def test_nothing_there(tmp_path: Path, location: str) -> None:
    (tmp_path / "folder.parquet" / "data").mkdir(parents=True)
    with pytest.raises(InputError, match="there is no such table, nor Parquet files in such a folder; check the loca"):
        find_tables(str(tmp_path / "folder.parquet" / location))


def test_long_rows_of_csv(tmp_path: Path) -> None:
    label = "x" * (3 << 20)
    path = tmp_path / "t[1].csv"  # named like a pattern, with a byte order mark and an odd number of quotes
    path.write_text(f'image,labels\n5" disk.jpg,cat\n"b.jpg","{label}"\nc.jpg,cat\n', encoding="utf-8-sig")
    assert read_table(str(path), None).labels.names == ("cat", label)
    (tmp_path / "t.csv").write_text(f"image,labels\na.jpg,cat\nb.jpg,{label * 12}\nc.jpg,cat\n")
    with pytest.raises(InputError, match=r"t\.csv: damaged or cut short"):
        read_table(str(tmp_path / "t.csv"), None)


LISTS = pa.array([["dog", "cat"], [], ["dog"]])


@pytest.mark.parametrize(
    ("image", "labels"),
    [
        (pa.array(TEXT["image"]).dictionary_encode(), pa.array(["dog|cat", "", "dog"]).dictionary_encode()),
        (pa.array(TEXT["image"], pa.large_string()), LISTS.cast(pa.large_list(pa.large_string()))),
        (pa.array(TEXT["image"], pa.string_view()), LISTS.cast(pa.list_(pa.string_view()))),
        (pa.array([b"a", b"b", b"c"], pa.binary_view()), LISTS.cast(pa.list_(pa.dictionary(pa.int32(), pa.string())))),
    ],
    ids=["dictionary", "large", "string_view", "binary_view"],
)
def test_columns_as_pandas_and_polars_write_them(image: pa.Array, labels: pa.Array, tmp_path: Path) -> None:
    try:
        pq.write_table(pa.table({"image": image, "labels": labels}), tmp_path / "t.parquet")
    except pa.ArrowNotImplementedError:
        pytest.skip("this version of pyarrow cannot write views")
    records = read_table(str(tmp_path / "t.parquet"), None)
    assert [present for present, _ in labels_of(records).values()] == [{"cat", "dog"}, set(), {"dog"}]
    assert records[2].image == (b"c" if image.type == pa.binary_view() else tmp_path / "c.jpg")


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
