import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pivotpatch.core.errors import InputError
from pivotpatch.data.table import read_table
from pivotpatch.data.table_labels import (
    TableLabels,
    class_label_names,
    encode_label_column,
    encode_label_columns,
    read_label_names,
)


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
