import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from written_tables import TEXT, labels_of, write_table

from pivotpatch.data.table import read_table
from pivotpatch.data.table_labels import (
    TableLabels,
    class_label_names,
    encode_label_column,
    encode_label_columns,
    read_label_names,
)
from pivotpatch.errors import InputError


def name_row(row: int) -> str:
    return f"row {row}"


def encode(values: pa.Array) -> TableLabels:
    return encode_label_column(pa.chunked_array([values]), None, delimiter=None, name_row=name_row)


@pytest.mark.parametrize("label", ["bell\a", "evil\x1b[2J", "\x9b2J", "two\nlines"])
def test_labels_that_cannot_be_printed(tmp_path: Path, label: str) -> None:
    message = r"is blank or holds control characters; give it a printable name"
    for values in (pa.array(["cat", label]), pa.array([["cat"], ["cat", f"?{label}"]])):
        with pytest.raises(InputError, match=f"row 1: .*{message}") as caught:
            encode(values)
        assert str(caught.value).isprintable()
    with pytest.raises(InputError, match=message):
        encode_label_columns({label: pa.chunked_array([[1]])}, name_row=name_row)
    (tmp_path / "labels.json").write_text(json.dumps([label, "cat"]))
    names = read_label_names(tmp_path / "labels.json")
    with pytest.raises(InputError, match=message):
        encode_label_column(pa.chunked_array([["cat"]]), names, delimiter=None, name_row=name_row)


def test_odd_but_printable_labels_are_kept() -> None:
    labels = ["zero\u200bwidth", "no\u00a0break", "家族 👨\u200d👩", "עברית"]
    assert encode(pa.array([labels])).space.names == tuple(sorted(labels))


def test_half_a_character_among_the_label_names(tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text('["cat", "\\ud800"]')
    (tmp_path / "t.csv").write_text("image,labels\na.jpg,cat\n")
    with pytest.raises(InputError, match=r"the name '\\ud800' is blank or holds control characters"):
        read_table(str(tmp_path / "t.csv"), None)


@pytest.mark.parametrize("kind", [pa.null(), pa.string(), pa.int64(), pa.float64(), pa.bool_()])
def test_a_label_that_nobody_looked_for(kind: pa.DataType) -> None:
    columns = {"cat": pa.chunked_array([[1, 0]]), "dog": pa.chunked_array([pa.nulls(2, kind)])}
    labels = encode_label_columns(columns, name_row=name_row)
    assert labels.unknown is not None
    assert [labels.positive[row] for row in (0, 1)] == [(0,), ()]
    assert [labels.unknown[row] for row in (0, 1)] == [(1,), (1,)]


@pytest.mark.parametrize("names", [5, "xy", {"x": 1}, None])
def test_names_of_numbered_labels_that_are_no_list(names: object) -> None:
    noted = json.dumps({"info": {"features": {"labels": {"names": names}}}})
    assert class_label_names(pa.schema([("labels", pa.int64())], {"huggingface": noted}), "labels") is None


@pytest.mark.parametrize("kind", [
    pa.list_(pa.string_view()),
    pa.large_list(pa.string_view()),
    pa.large_list(pa.dictionary(pa.int32(), pa.string())),
])  # fmt: skip
def test_kinds_of_lists(tmp_path: Path, kind: pa.DataType) -> None:
    labels = pa.array([["cat", "dog"], [], ["?cat"]], pa.list_(pa.string())).cast(kind)
    try:
        pq.write_table(pa.table({"image": ["a.jpg", "b.jpg", "c.jpg"], "labels": labels}), tmp_path / "t.parquet")
    except pa.ArrowNotImplementedError:
        pytest.skip("this version of pyarrow cannot write views")
    records = read_table(str(tmp_path / "t.parquet"), None)
    assert records.labels.names == ("cat", "dog")
    assert [(record.positive, record.unknown) for record in records] == [((0, 1), ()), ((), ()), ((), (0,))]


@pytest.mark.parametrize(("cells", "delimiter", "expected"), [
    (["a;b", "c,d"], None, [{"a", "b"}, {"c,d"}]),
    (["a, b", "c"], None, [{"a", "b"}, {"c"}]),
    (["a b", "c"], " ", [{"a", "b"}, {"c"}]),
    (["a, b", "c"], "", [{"a, b"}, {"c"}]),
])  # fmt: skip
def test_delimiters(tmp_path: Path, cells: list[str], delimiter: str | None, expected: list[set[str]]) -> None:
    location = write_table(tmp_path / "t.csv", {"file_name": ["1.jpg", "2.jpg"], "tags": cells})
    records = read_table(location, None, delimiter=delimiter)
    assert [present for present, _ in labels_of(records).values()] == expected


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_lists_load_exactly(tmp_path: Path, suffix: str) -> None:
    lists = [[" dog ", "a|b", 'so "called"', "two  blanks", "Ünïcödé 猫"], [], ["?cat", "a|b", "a|b"]]
    columns: dict[str, Any] = {"Image": TEXT["image"], "labels": lists}
    records = read_table(write_table(tmp_path / f"t{suffix}", columns), None)
    assert labels_of(records) == {"a.jpg": (set(lists[0]), set()), "b.jpg": (set(), set()), "c.jpg": ({"a|b"}, {"cat"})}


def test_odd_characters_in_csv_load_exactly(tmp_path: Path) -> None:
    cells = ['so "called"|two  blanks', "Ünïcödé 猫| 'x' ", "NULL|nan|007"]
    records = read_table(
        write_table(tmp_path / "t.csv", {"image": ["1", "é,.jpg", "new\nline"], "labels": cells}), None
    )
    assert labels_of(records) == {
        "1": ({'so "called"', "two  blanks"}, set()),
        "é,.jpg": ({"Ünïcödé 猫", "'x'"}, set()),
        "new\nline": ({"NULL", "nan", "007"}, set()),
    }


@pytest.mark.parametrize(("suffix", "zebra", "ant"), [
    (".csv", ["1", "0", "-1", ""], ["0.0", "1.0", "true", "nan"]),
    (".jsonl", [1, 0, -1, None], [False, True, True, None]),
    (".parquet", [1, 0, -1, None], [0.0, 1.0, 1.0, float("nan")]),
])  # fmt: skip
def test_one_column_a_label(tmp_path: Path, suffix: str, zebra: list[Any], ant: list[Any]) -> None:
    columns: dict[str, list[Any]] = {"path": list("abcd"), "zebra": zebra, "ant": ant, "split": ["x"] * 4}
    records = read_table(write_table(tmp_path / f"t{suffix}", columns), None)
    assert records.labels.names == ("zebra", "ant")  # the order of the columns
    nan = torch.nan
    expected = torch.tensor([[1.0, 0.0], [0.0, 1.0], [nan, 1.0], [nan, nan]])
    torch.testing.assert_close(records.target(), expected, equal_nan=True)


def test_names_order_the_labels_and_refuse_others(tmp_path: Path) -> None:
    location = write_table(tmp_path / "t.csv", TEXT)
    (tmp_path / "labels.json").write_text('["dog", "cow", "bird", "cat"]')
    assert read_table(location, None).labels.names == ("dog", "cow", "bird", "cat")
    (tmp_path / "labels.json").write_text('["dog", "birds", "cat"]')
    with pytest.raises(InputError, match=r"t\.csv, row 4: unknown label 'bird'; did you mean 'birds'\?"):
        read_table(location, None)
    (tmp_path / "labels.json").write_text('{"dog": 1}')
    with pytest.raises(InputError, match=r"labels\.json: it is not a JSON list of label names"):
        read_table(location, None)


def test_numbered_labels(tmp_path: Path) -> None:
    location = write_table(tmp_path / "t.parquet", {"image": ["a", "b"], "label": [[2, 0], []]})
    with pytest.raises(InputError, match=r"row 1: labels are numbers; give their names in order with \?names=FILE"):
        read_table(location, None)
    (tmp_path / "labels.json").write_text('["z", "y", "x"]')
    assert labels_of(read_table(location, None)) == {"a": ({"z", "x"}, set()), "b": (set(), set())}
    (tmp_path / "labels.json").write_text('["z", "y"]')
    with pytest.raises(InputError, match="row 1: label number 2 is outside 0 to 1"):
        read_table(location, None)


@pytest.mark.parametrize("shape", ["list", "scalar"])
def test_hugging_face_class_labels(tmp_path: Path, shape: str) -> None:
    feature: dict[str, Any] = {"names": ["no", "yes"], "_type": "ClassLabel"}
    feature = {"feature": feature, "length": -1, "_type": "Sequence"} if shape == "list" else feature
    values = [[1], [0]] if shape == "list" else [1, 0]
    table = pa.table({"image": ["a", "b"], "label": values})
    info = {"info": {"features": {"image": {"_type": "Value"}, "label": feature}}}
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(info)}), tmp_path / "t.parquet")
    records = read_table(str(tmp_path / "t.parquet"), None)
    assert records.labels.names == ("no", "yes")
    assert labels_of(records) == {"a": ({"yes"}, set()), "b": ({"no"}, set())}
