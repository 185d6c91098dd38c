import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from written_tables import TEXT, labels_of, write_table

from pivotpatch.data.table import read_table
from pivotpatch.errors import InputError


@pytest.mark.parametrize("kind", [pa.null(), pa.string(), pa.int64(), pa.float64(), pa.bool_()])
def test_a_label_that_nobody_looked_for(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(pa.table({"image": ["a", "b"], "cat": [1, 0], "dog": pa.nulls(2, kind)}), tmp_path / "t.parquet")
    records = read_table(str(tmp_path / "t.parquet"), None)
    assert labels_of(records) == {"a": ({"cat"}, {"dog"}), "b": (set(), {"dog"})}


@pytest.mark.parametrize(("cells", "delimiter", "expected"), [
    (["a;b", "c,d"], None, [{"a", "b"}, {"c,d"}]),
    (['so "called"|two  blanks', "NULL|nan|007"], None, [{'so "called"', "two  blanks"}, {"NULL", "nan", "007"}]),
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
    lists = [
        ["dog", "a|b", 'so "called"', "two  blanks", "Ünïcödé 猫", "zero\u200bwidth", "👨\u200d👩"],
        [],
        ["?cat", "a|b", "a|b"],
    ]
    columns: dict[str, Any] = {"Image": TEXT["image"], "labels": lists}
    records = read_table(write_table(tmp_path / f"t{suffix}", columns), None)
    assert labels_of(records) == {"a.jpg": (set(lists[0]), set()), "b.jpg": (set(), set()), "c.jpg": ({"a|b"}, {"cat"})}


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
    assert labels_of(read_table(location, None)) == {"a": ({"0", "2"}, set()), "b": (set(), set())}
    (tmp_path / "labels.json").write_text('["z", "y"]')
    with pytest.raises(InputError, match=r"row 1: unknown label 'number 2'; .*known: y, z"):
        read_table(location, None)
    (tmp_path / "labels.json").write_text('["z", "y", "x"]')
    assert labels_of(read_table(location, None)) == {"a": ({"z", "x"}, set()), "b": (set(), set())}


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
