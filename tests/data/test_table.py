import json
import os
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written_tables import TEXT, labels_of, write_table

from pivotpatch.data.address import open_records
from pivotpatch.data.table import IMAGE_COLUMNS, LABEL_COLUMNS, read_table
from pivotpatch.errors import InputError


def test_names_choose_and_order_the_columns(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {"Path": ["a", "b"], "Age": [63, 41], "cat": [0, 1], "dog": [1, None]}
    location = write_table(tmp_path / "t.csv", columns)
    (tmp_path / "names.txt").write_text("dog\n\n cat \n")
    records = open_records(f"table:{location}?names=names.txt")
    assert records.labels.names == ("dog", "cat")
    assert labels_of(records) == {"a": ({"dog"}, set()), "b": ({"cat"}, {"dog"})}
    with pytest.raises(InputError, match=r"t\.csv, row 2: no column of labels was found, and column 'Age' .* '63'"):
        read_table(location, None)
    (tmp_path / "names.txt").write_text("dog\ncaat\n")
    with pytest.raises(InputError, match=r"t\.csv: there is no column 'caat'; did you mean 'cat'"):
        read_table(location, None, names="names.txt")


def test_split_column(tmp_path: Path) -> None:
    columns = {"image": list("abc"), "labels": ["cat", "dog", "cow"], "split": ["train", "test", "train"]}
    location = write_table(tmp_path / "t.csv", columns)
    train, test = open_records(f"table:{location}@train"), open_records(f"table:{location}@test")
    assert train.labels == test.labels  # of the whole table, so that splits agree
    assert labels_of(train) == {"a": ({"cat"}, set()), "c": ({"cow"}, set())}
    assert labels_of(test) == {"b": ({"dog"}, set())}
    assert test.name == f"table:{location}@test"
    whole = read_table(location, None)
    assert len(whole) == 3
    assert whole.notes == (f"{location}: its splits are taken together (train 2, test 1); @train takes one",)
    assert train.notes == ()
    assert labels_of(open_records(f"table:{location}?image=labels&labels=image"))["cat"] == ({"a"}, set())


def test_shards_state_their_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, image, label in [
        ("train-00000-of-00002", "a", "cat"),
        ("train-00001-of-00002", "b", "dog"),
        ("test-00000-of-00001", "a", "cow"),
    ]:
        write_table(tmp_path / "data" / f"{name}.parquet", {"image": [f"{name}-{image}"], "labels": [[label]]})
    train, test = open_records(f"table:{tmp_path}@train"), open_records(f"table:{tmp_path}@test")
    assert train.labels == test.labels
    assert train.labels.names == ("cat", "cow", "dog")
    assert [present for present, _ in labels_of(train).values()] == [{"cat"}, {"dog"}]
    assert [present for present, _ in labels_of(test).values()] == [{"cow"}]
    assert test[0].image == tmp_path / "data" / "test-00000-of-00001-a"
    assert [record.name[-1] for record in open_records(f"table:{tmp_path}/*/train-*.parquet")] == ["a", "b"]


def test_paths_stay_inside_the_root(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    images = ["a.jpg", str(tmp_path / "tables" / "b.jpg"), "../c.jpg", "x..y/d.jpg"]
    location = write_table(tmp_path / "tables" / "t.csv", {"image": images, "labels": ["cat"] * 4})
    with pytest.raises(InputError, match=r"t\.csv, row 4: '\.\./c\.jpg' lies outside .*allow_escape=true"):
        read_table(location, None)
    assert read_table(location, None, allow_escape=True)[2].image.resolve() == tmp_path / "c.jpg"  # type: ignore[union-attr]
    location = write_table(tmp_path / "tables" / "t.csv", {"image": ["images/../a.jpg"], "labels": ["cat"]})
    assert read_table(location, None, root="..")[0].image.resolve() == tmp_path / "a.jpg"  # type: ignore[union-attr]


def test_rows_that_repeat_another_are_dropped_and_counted(tmp_path: Path) -> None:
    columns = {"image": list("abacaa"), "labels": ["cat|?dog", "", "?dog | cat", "dog", "cat|?dog", "cat|?dog"]}
    columns["split"] = ["x", "x", "x", "x", "x", "y"]
    location = write_table(tmp_path / "t.csv", columns)
    records = read_table(location, "x")
    assert labels_of(records) == {"a": ({"cat"}, {"dog"}), "b": (set(), set()), "c": ({"dog"}, set())}
    assert [record.name for record in records] == ["a", "b", "c"]
    assert records.notes == (f"{location}: 2 of 5 rows repeat an earlier one and were dropped",)
    assert records.select(np.arange(2)).keep_labels(["cat"]).notes == records.notes
    assert read_table(location, "y").notes == ()
    columns["image"] = ["a", "b", "./a", "c", "x/./a", "x//a"]
    assert read_table(write_table(tmp_path / "t.csv", columns), "x").names == ["a", "b", "c", "x/a"]
    columns["image"] = list("abacaa")
    write_table(tmp_path / "t.csv", columns)
    with pytest.raises(InputError, match=r"image 'a' stands on 4 rows \(1 images do so\)"):
        read_table(location, None)  # one of them is of another split
    for other in ("cat", "cat|dog", "?cat|?dog"):
        columns["labels"][4] = other
        with pytest.raises(InputError, match=r"image 'a' stands on 3 rows \(1 images do so\); give each"):
            read_table(write_table(tmp_path / "t.csv", columns), "x")


def test_a_label_may_be_called_as_a_column_of_labels_is(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("image,cat,dog,class\na.jpg,1,0,1\nb.jpg,0,1,0\n")
    (note,) = read_table(str(tmp_path / "t.csv"), None).notes
    assert "column 'class' is taken for the labels and holds 0, 1 alone; not read: cat, dog; if each" in note
    (tmp_path / "names.txt").write_text("cat\ndog\nclass\n")
    listed = read_table(str(tmp_path / "t.csv"), None, names="names.txt")
    assert (listed.labels.names, listed.notes) == (("cat", "dog", "class"), ())
    assert listed.target().tolist() == [[1, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("rows", [
    "image;labels\r\na.jpg;cat, wild|dog\r\nb.jpg;\r\n",
    'image;labels\na.jpg;"cat, wild|dog"\nb.jpg;""\n',
    "image\tlabels\na.jpg\tcat, wild|dog\nb.jpg\t\n",
    'image,labels\na.jpg,"cat, wild|dog"\nb.jpg,\n',
    "image;cat, wild;dog\na.jpg;1;1\nb.jpg;0;0\n",
    'image,"cat, wild",dog\na.jpg,1,1\nb.jpg,0,0\n',
    "image;labels;note\na.jpg;cat, wild|dog;x, y\nb.jpg;;z\n",
])  # fmt: skip
def test_separators_and_marks_of_spreadsheets(tmp_path: Path, rows: str, suffix: str, encoding: str) -> None:
    path = tmp_path / f"t{suffix}"
    path.write_bytes(rows.encode(encoding))
    assert labels_of(read_table(str(path), None)) == {"a.jpg": ({"cat, wild", "dog"}, set()), "b.jpg": (set(), set())}


@pytest.mark.parametrize(("suffix", "columns", "message"), [
    (".csv", {"image": ["a", " "], "labels": ["x", "y"]}, r"row 3: the row has no path of an image in column 'image'"),
    (".csv", {"image": ["a", "b"]}, r"t\.csv: no column of labels beside 'image'; name it with \?labels=COLUMN"),
    (".csv", {"image": ["a", "b"], "": ["cat", "dog"]}, r"t\.csv, row 2: no column of labels was found, and column ''"),
    (".csv", {"jpeg": ["a"], "labels": ["x"]}, r"no column of images among jpeg, labels; name it with \?image=COLUMN"),
    (".jsonl", {"image": ["a", "b"], "labels": [["x"], ["?\x1b[2J"]]}, r"labels: the name .* is blank or holds"),
    (".jsonl", {"image": [1, 2], "labels": [["x"], []]}, r"column 'image' holds int64, neither paths nor encoded ima"),
    (".parquet", {"image": ["a", "b"], "labels": [0.5, 1.0]}, r"row 1: labels are of type double"),
    (".parquet", {"image": ["a", "b"], "labels": [[0, 1, 1], [1, 0, 0]]}, r"row 1: labels are lists of 0 and 1 for ea"),
    (".parquet", {"image": ["a", "b"], "labels": [[0, 1], [0, 0]]}, r"row 1: labels are lists of 0 and 1 for ea"),
    (".csv", {"image": ["a", "b"], "labels": ["['x']", "['x' 'y']"]}, r"row 3: .* is no list of labels; write cat\|"),
    (".csv", {"image": ["a", "b"], "labels": ["[1]", "[x]"]}, r"row 2: '\[1\]' is no list of labels"),
    (".csv", {"image": ["a", "b"], "labels": ["['x']", "[{[]: 1}]"]}, r"row 3: .* is no list of labels"),
    (".parquet", {"image": ["a", "b"], "cat": [[1], [0]]}, r"column 'cat' is not one of 0, 1 and -1: it holds '\[1\]'"),
])  # fmt: skip
def test_rows_that_cannot_be_meant(tmp_path: Path, suffix: str, columns: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_table(write_table(tmp_path / f"t{suffix}", columns), None)


@pytest.mark.parametrize(("cells", "delimiter", "expected"), [
    (["a;b", "c,d"], None, [{"a", "b"}, {"c,d"}]),
    (['so "called"|two  blanks', "NULL|nan|007"], None, [{'so "called"', "two  blanks"}, {"NULL", "nan", "007"}]),
    (["a b", "c"], " ", [{"a", "b"}, {"c"}]),
    (["a, b", "c"], "", [{"a, b"}, {"c"}]),
    (["['a', 'b|c']", '["d"]'], None, [{"a", "b|c"}, {"d"}]),
    (["[]", "['a',\n 'b']"], None, [set(), {"a", "b"}]),
    (["['a']", "[b"], None, [{"['a']"}, {"[b"}]),
])  # fmt: skip
def test_delimiters(tmp_path: Path, cells: list[str], delimiter: str | None, expected: list[set[str]]) -> None:
    location = write_table(tmp_path / "t.csv", {"file_name": ["1.jpg", "2.jpg"], "tags": cells})
    records = read_table(location, None, delimiter=delimiter)
    assert [present for present, _ in labels_of(records).values()] == expected


@pytest.mark.parametrize(("suffix", "zebra", "ant"), [
    (".csv", ["1", "0", "-1", ""], ["0.0", "1.0", "true", "nan"]),
    (".jsonl", [1, 0, -1, None], [False, True, True, None]),
    (".parquet", [1, 0, -1, None], [0.0, 1.0, 1.0, float("nan")]),
])  # fmt: skip
def test_one_column_a_label(tmp_path: Path, suffix: str, zebra: list[Any], ant: list[Any]) -> None:
    columns: dict[str, list[Any]] = {"path": list("abcd"), "zebra": zebra, "ant": ant, "emu": [None] * 4}
    records = read_table(write_table(tmp_path / f"t{suffix}", columns | {"split": ["x"] * 4}), None)
    assert records.labels.names == ("zebra", "ant", "emu")  # the order of the columns
    nan = torch.nan
    expected = torch.tensor([[1.0, 0.0, nan], [0.0, 1.0, nan], [nan, 1.0, nan], [nan, nan, nan]])
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


# Text that any of the formats can hold: all of Unicode but halves of UTF-16 pairs.
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
images = st.lists(texts.filter(str.strip), min_size=1, max_size=5, unique_by=lambda name: os.path.normpath("/" + name))
images = images.filter(lambda names: not any(sign in name for name in names for sign in ("//", "./")))
plain_labels = texts.filter(lambda t: t == t.strip() and "|" not in t and t[0] != "?")
RESERVED = {*IMAGE_COLUMNS, *LABEL_COLUMNS, "split"}


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_is_written_is_read(tmp_path: Path, data: st.DataObject) -> None:
    suffix = data.draw(st.sampled_from([".csv", ".tsv", ".jsonl", ".parquet"]))
    style = data.draw(st.sampled_from(["text", "hot", *(["list"] if suffix in (".jsonl", ".parquet") else [])]))
    names = data.draw(images)
    own = texts.filter(lambda t: t and t == t.strip() and t[0] != "?")  # blanks around a label are dropped
    free = own if style == "list" else plain_labels
    free = free.filter(lambda t: "".join(t.split()).replace("_", "").replace("-", "").lower() not in RESERVED)
    labels = data.draw(st.lists(free, min_size=1, max_size=4, unique=True))
    state = st.sampled_from([1, 0, -1])
    states = [[data.draw(state) for _ in labels] for _ in names]
    columns: dict[str, Any] = {"image": names}
    if style == "hot":
        columns |= {name: [row[i] for row in states] for i, name in enumerate(labels)}
    else:
        marked = [[{1: "", -1: "?"}[s] + name for name, s in zip(labels, row, strict=True) if s] for row in states]
        columns["labels"] = [" | ".join(names) for names in marked] if style == "text" else marked
    expected = {
        name: tuple({label for label, s in zip(labels, row, strict=True) if s == sign} for sign in (1, -1))
        for name, row in zip(names, states, strict=True)
    }
    location = write_table(tmp_path / f"t{suffix}", columns)
    if style != "hot" and not np.any(states):
        with pytest.raises(InputError, match="there is no label at all"):
            read_table(location, None, delimiter="|", allow_escape=True)
        return
    records = read_table(location, None, delimiter="|", allow_escape=True)
    assert [record.name for record in records] == names
    assert labels_of(records) == expected


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(suffix=st.sampled_from([".csv", ".jsonl", ".parquet"]), at=st.floats(0, 1), byte=st.none() | st.integers(0, 255))
def test_damage_is_an_input_error_or_harmless(tmp_path: Path, suffix: str, at: float, byte: int | None) -> None:
    path = Path(write_table(tmp_path / f"t{suffix}", TEXT))
    content, sound = path.read_bytes(), labels_of(read_table(str(path), None))
    place = int(at * (len(content) - 1))
    path.write_bytes(content[:place] if byte is None else content[:place] + bytes([byte]) + content[place + 1 :])
    with suppress(InputError):
        records = read_table(str(path), None)
        found = labels_of(records)
        assert len(found) == len(records) <= len(sound)
        assert not any(unicodedata.category(sign) == "Cc" for label in records.labels.names for sign in label)
        if suffix != ".parquet":  # one byte of Parquet may stand for many rows
            assert sum(sound.get(name) != labels for name, labels in found.items()) <= 1
