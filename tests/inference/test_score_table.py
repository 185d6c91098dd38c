from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from score_files import make_scores, write_csv

from pivotpatch.errors import InputError
from pivotpatch.inference.score_file import read_scores, write_scores


def test_what_a_csv_cannot_hold_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"s\.csv: a CSV file cannot hold patches; write \.parquet or \.npz"):
        write_scores(make_scores(patches=True), tmp_path / "s.csv")
    with pytest.raises(InputError, match=r"s\.csv: a CSV file cannot hold a lam for each label; write \.parquet"):
        write_scores(replace(make_scores(), lam=torch.ones(4)), tmp_path / "s.csv")
    assert list(tmp_path.iterdir()) == []


def test_stated_kinds_are_logits_whatever_their_values(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "s.csv",
        "lam,tde:cat,target:cat,image,image:cat,patch:cat\n0.5,0.75,1,a,0.5,0.5\n0.5,0.3,,b,0.2,0.2\n",
    )
    scores = read_scores(path)
    assert scores.pictures == ("a", "b")
    assert {kind: values.flatten().tolist() for kind, values in scores.logits.items()} == {
        "image": pytest.approx([0.5, 0.2]),
        "patch": pytest.approx([0.5, 0.2]),
        "tde": pytest.approx([0.75, 0.3]),
    }
    assert (scores.lam, scores.temperature) == (0.5, 1.0)
    assert scores.target[0, 0] == 1
    assert scores.target[1, 0].isnan()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"s\.csv: the file is empty"),
        ("picture,cat,target:cat\n", r"s\.csv: the table has no rows"),
        ("name,cat\na,1\n", r"no column of pictures among name, cat; name it 'picture'"),
        ("picture,cat,cat\na,1,2\n", "two columns are named 'cat'; give each column its own name"),
        (",picture,cat\n0,a,1\n", r"a column is named ''; write the table without row numbers \(pandas: index=False\)"),
        ("picture,target:cat\na,1\n", "1 labels have a target column but no scores column .cat."),
        ("picture,cat,dog,target:cat\na,1,1,1\n", r"1 labels have a scores column but no target column \(dog\); known"),
        ("picture,image:cat,image:dog,tde:cat\na,1,1,1\n", r"have a image column but no tde column \(dog\)"),
        ("picture,image:cat,split\na,1,x\n", "column 'split' stands beside those of a stated kind; leave it out"),
        ("picture,cat,target:cat\na,1,1\nb,many,1\n", r"Row #3: CSV conversion error to \w+: invalid value 'many'"),
        ("picture,cat,target:cat\na,,1\n", "the image score of 'cat' for 'a' is nan; find where the model made it"),
        ("picture,cat,target:cat\na,0.1,1\nb,nan,1\n", "the image score of 'cat' for 'b' is nan"),
        ("picture,cat,target:cat\na,1,2\n", "the target holds 2; write 1, 0, or -1 for unknown"),
        ("picture,image:cat,lam,target:cat\na,1,1,1\nb,1,2,1\n", "column 'lam' changes from row to row; give"),
        ("picture,cat\na\n", r"Row #2: Expected 2 columns, got 1"),
        ("picture\na\n", "there are no scores|scores have shape"),
    ],
)  # fmt: skip
def test_wrong_tables_are_told(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_scores(write_csv(tmp_path / "s.csv", text))
    assert "\n" not in str(caught.value)


def test_parquet_columns_that_hold_no_numbers_are_told(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    pq.write_table(pa.table({"picture": ["a"], "cat": ["much"], "target:cat": [1]}), path)
    with pytest.raises(InputError, match="column 'cat' holds string, no numbers; leave it out, or correct it"):
        read_scores(path)
    pq.write_table(pa.table({"picture": ["a", None], "cat": [1, 2], "target:cat": [1, 0]}), path)
    with pytest.raises(InputError, match="1 rows have no picture in 'picture'; name each one"):
        read_scores(path)
    pq.write_table(pa.table({"picture": ["a"], "cat": [1], "__index_level_0__": [7]}), path)
    with pytest.raises(InputError, match="a column is named '__index_level_0__'; write the table without row numbers"):
        read_scores(path)


def test_a_label_may_be_named_like_a_part_of_another(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    columns = {"a": [1.5], "a.b": [2.5], "target:a.b": [1], "target:a": [0]}
    pq.write_table(pa.table({"picture": pa.array(["x"]).dictionary_encode(), **columns}), path)
    scores = read_scores(path)
    assert (scores.labels, scores.pictures) == (("a", "a.b"), ("x",))
    assert scores.logits["image"].tolist() == [[1.5, 2.5]]
    assert scores.target.tolist() == [[0, 1]]
