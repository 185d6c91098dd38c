from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from score_files import make_scores, write_csv
from sklearn.metrics import average_precision_score

from pivotpatch.core.metrics import average_precision
from pivotpatch.core.policies import Fixed
from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError
from pivotpatch.inference.score_content import Scale
from pivotpatch.inference.score_file import read_scores, write_scores


def test_a_table_of_probabilities_ranks_and_decides_as_they_do(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    target = generator.random((500, 3)) < 0.3
    # Two digits make ties and values that are the threshold itself; others crowd near 0 and near 1.
    crowded = (generator.random(500) ** 40).astype(np.float32)
    columns: list[Any] = [generator.random(500).round(2), crowded, 1 - generator.random(500) ** 20]
    columns[0][:2] = 0.0, 1.0
    table: dict[str, Any] = {"file_name": [f"{row}.jpg" for row in range(500)]}
    for place, name in enumerate(("cat", "dog", "fish")):
        table |= {name: columns[place], f"target:{name}": target[:, place]}
    pq.write_table(pa.table(table), tmp_path / "s.parquet")
    texts = [table["file_name"], *(map(str, map(float, table[name])) for name in list(table)[1:])]
    rows = [",".join(table), *map(",".join, zip(*texts, strict=True))]
    write_csv(tmp_path / "s.csv", "\n".join(rows))
    for suffix in (".parquet", ".csv"):
        scores = read_scores(tmp_path / f"s{suffix}")
        assert list(scores.logits) == ["image"]
        assert scores.logits["image"].isfinite().all()
        found = average_precision(scores.logits["image"], scores.target).per_label
        for place, column in enumerate(columns):
            assert found[place] == pytest.approx(average_precision_score(target[:, place], column), abs=1e-12)
        probs = scores.probs("image").float()
        given = torch.tensor(np.stack(columns, 1), dtype=torch.float32)
        assert torch.equal(probs, given)
        for threshold in (0.3, 0.5, 0.07, 0.99):
            assert torch.equal(Fixed(threshold).decide(probs), Fixed(threshold).decide(given))


@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=30))
def test_logits_of_probabilities_keep_their_order(values: list[float]) -> None:
    from pivotpatch.inference.score_content import ScoreContent, complete

    probs = np.array(values, dtype=np.float32)[:, None]
    logits = complete(ScoreContent("here", {"scores": probs}, target=np.ones_like(probs)), None, scale="probs")
    found = logits.logits["image"].flatten()
    assert found.isfinite().all()
    order = torch.from_numpy(probs.flatten())
    assert torch.equal(order[:, None] < order[None], found[:, None] < found[None])


def test_scores_outside_0_and_1_are_logits_unless_it_is_said(tmp_path: Path) -> None:
    rows = "picture,cat,target:cat\na,-0.5,1\nb,0.25,0\n"
    path = write_csv(tmp_path / "s.csv", rows)
    assert read_scores(path).logits["image"].flatten().tolist() == [-0.5, 0.25]
    with pytest.raises(InputError, match=r"scores from -0\.5 to 0\.25 are no probabilities; read them as logits"):
        read_scores(path, scale="probs")
    small = write_csv(tmp_path / "t.csv", rows.replace("-0.5", "0.5"))
    assert read_scores(small).logits["image"].flatten().tolist() == pytest.approx([0.0, -np.log(3)])
    assert read_scores(small, scale="logits").logits["image"].flatten().tolist() == [0.5, 0.25]
    with pytest.raises(InputError, match="scale: unknown scale 'prob'; did you mean 'probs'"):
        read_scores(small, scale="prob")  # type: ignore[arg-type]


def test_targets_come_from_a_data_set_by_the_pictures_names(photos: RecordSet, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "s.csv", "picture,dog,cat\na.jpg,1,2\nb.jpg,3,4\nc.jpg,5,6\nd.jpg,7,8\n")
    scores = read_scores(path, records=photos)
    assert scores.pictures == ("d.jpg", "a.jpg", "c.jpg", "b.jpg")
    assert scores.labels == ("dog", "cat")
    assert scores.logits["image"].tolist() == [[7, 8], [1, 2], [5, 6], [3, 4]]
    expected = torch.tensor([[1, 1], [1, 0], [0, 0], [0, torch.nan]])
    torch.testing.assert_close(scores.target, expected, equal_nan=True)
    assert scores.indices is not None
    assert scores.indices.tolist() == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"s\.csv: it does not say what is true of the pictures; add columns named ta"):
        read_scores(path)


def test_a_data_set_has_the_last_word_about_the_truth(photos: RecordSet, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "s.csv", "picture,dog,target:dog\na.jpg,1,0\nb.jpg,3,1\nc.jpg,5,0\nd.jpg,7,1\n")
    assert read_scores(path).target.flatten().tolist() == [0, 1, 0, 1]
    told: list[str] = []
    assert read_scores(path, records=photos, tell=told.append).target.flatten().tolist() == [1, 1, 0, 0]
    assert told[-1] == f"{path}: 2 of 4 known targets are not those of {photos.name}, which are taken"
    path = write_csv(tmp_path / "s.csv", "picture,dog,target:dog\na.jpg,1,0\nb.jpg,3,1\nc.jpg,5,1\nd.jpg,7,\n")
    with pytest.raises(InputError, match=r"s\.csv: 3 of 3 known targets are not those of table:.*; check that both"):
        read_scores(path, records=photos)


def test_scores_with_another_truth_than_others_are_told(tmp_path: Path) -> None:
    scores, path = make_scores(), tmp_path / "s.npz"
    write_scores(replace(scores, target=1 - scores.target), path)
    with pytest.raises(InputError, match=r"s\.npz: 19 of 19 known targets are not those of the other scores"):
        read_scores(path, like=scores)
    told: list[str] = []
    write_scores(scores, path)
    read_scores(path, like=scores, tell=told.append)
    assert told == []


def test_a_few_pictures_without_scores_are_left_out_and_told(photos: RecordSet, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "s.csv", "picture,dog\nc.jpg,0.5\na.jpg,0.25\nb.jpg,1\n")
    told: list[str] = []
    scores = read_scores(path, records=photos, tell=told.append)
    assert told[0] == f"{path}: 1 of 4 pictures of {photos.name} have no scores and are left out (d.jpg)"
    expected = [row for row in range(4) if photos[row].name != "d.jpg"]
    assert scores.indices is not None
    assert scores.indices.tolist() == expected
    assert scores.pictures == tuple(photos[row].name for row in expected)
    probs = {"a.jpg": 0.25, "b.jpg": 1.0, "c.jpg": 0.5}
    assert scores.probs("image").flatten().tolist() == pytest.approx([probs[name] for name in scores.pictures])
    torch.testing.assert_close(scores.target, photos.keep_labels(["dog"]).target()[expected])
    path = write_csv(tmp_path / "s.csv", "picture,dog\na.jpg,0.25\n")
    with pytest.raises(InputError, match=r"3 pictures of table:.* have no scores .*; score them too, or name a"):
        read_scores(path, records=photos, tell=told.append)


@pytest.mark.parametrize(
    ("values", "scale", "told"),
    [
        ((0, 1), "auto", ["scores from 0 to 1 are taken for probabilities"]),
        ((-3, 0.5), "auto", ["scores from -3 to 0.5 are taken for logits"]),
        ((0.2, 97), "auto", ["scores from 0.2 to 97 are taken for logits; divide by 100 if they are per cent"]),
        ((0.2, 970), "auto", ["scores from 0.2 to 970 are taken for logits"]),
        ((0.2, 97), "logits", []),
        ((0.2, 0.9), "probs", []),
    ],
)  # fmt: skip
def test_what_scores_are_taken_for_is_told(
    values: tuple[float, float], scale: Scale, told: list[str], tmp_path: Path
) -> None:
    path = write_csv(tmp_path / "s.csv", f"picture,dog,target:dog\na,{values[0]},1\nb,{values[1]},0\n")
    lines: list[str] = []
    read_scores(path, scale=scale, tell=lines.append)
    assert lines == [f"{path}: {line}" for line in told]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a.jpg,1\nb.jpg,1\nc.jpg,1\n", r"1 pictures of table:.*photos\.csv have no scores \(d\.jpg\); score them too"),
        ("a,1\nb,1\nc,1\nd,1\n", r"4 pictures are not in table:.*\(a, b, c and 1 more\); there they are named"),
        ("a.jpg,1\na.jpg,1\nc.jpg,1\nd.jpg,1\n", r"s\.csv: 1 pictures stand twice \(a\.jpg\); give each picture"),
    ],
)  # fmt: skip
def test_pictures_that_do_not_match_are_told(rows: str, message: str, photos: RecordSet, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_scores(write_csv(tmp_path / "s.csv", f"picture,dog\n{rows}"), records=photos)


def test_a_label_that_the_data_set_does_not_know_is_told(photos: RecordSet, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "s.csv", "picture,dogg\na.jpg,1\nb.jpg,1\nc.jpg,1\nd.jpg,1\n")
    with pytest.raises(InputError, match="unknown label 'dogg'; did you mean 'dog'"):
        read_scores(path, records=photos)


GOOD: dict[str, Any] = {"scores": np.zeros((2, 3)) - 1, "target": np.ones((2, 3))}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"scores": np.zeros(3)}, r"scores have shape \(3,\); give one row a picture and one column a label"),
        ({"scores": np.zeros((0, 3)), "target": np.zeros((0, 3))}, r"scores have shape \(0, 3\)"),
        ({"target": np.zeros((2, 4))}, r"'target' has shape \(2, 4\), the scores \(2, 3\); give both alike"),
        ({"target": np.full((2, 3), 0.5)}, "the target holds 0.5; write 1, 0, or -1 for unknown"),
        ({"labels": np.array(["a", "b"])}, "2 labels for 3 columns of scores; give one a column"),
        ({"labels": np.array(["a", "b", "a"])}, "labels: a stand twice; give each label one name"),
        ({"labels": np.zeros(3)}, "'labels' holds float64; give text"),
        ({"pictures": np.array(["a"])}, "1 pictures for 2 rows of scores; give one a row"),
        ({"pictures": np.array(["a", "a"])}, r"1 pictures stand twice \(a\); give each picture one row"),
        ({"pictures": np.array(["a", "b"], dtype=object)}, "'pictures' holds Python objects, which are never loaded"),
        ({"scores": np.array([["x"] * 3] * 2)}, "'scores' holds <U1; give numbers"),
        ({"scores": np.array([[1, 2, 3], [4, np.nan, 6]])}, "the image score of 'label 1' for 'row 1' is nan; find"),
        ({"scores": np.array([[1, 2, 3], [4, np.inf, 6]])}, "the image score of 'label 1' for 'row 1' is inf; find"),
        ({"image": np.zeros((2, 3))}, "'scores' stand beside image, patch, tde; say of each which kind it is"),
        ({"patch_logits": np.zeros((2, 4, 3))}, "'patch_logits' or 'weights' is missing; give both or neither"),
        ({"weights": np.zeros((2, 3))}, r"'weights' has shape \(2, 3\); give \(2, P, 3\), one row a patch"),
        ({"lam": np.ones(2)}, r"'lam' has shape \(2,\); give a number, or one a label"),
        ({"lam": np.array(-1.0)}, r"s\.npz: lam is -1\.0; give a finite number, 0 or more"),
        ({"lam": np.array([1, np.nan, 1])}, r"s\.npz: lam is nan; give a finite number"),
        ({"temperature": np.array([1.0, 0, 2])}, r"s\.npz: temperature is 0\.0; give"),
        (
            {"patch_logits": np.zeros((2, 4, 3)), "weights": np.full((2, 4, 3), 0.75)},
            "weights sum to 3 up to 3, the least is 0.75; give each patch a share of 0 or more, of 1 in all",
        ),
        (
            {"patch_logits": np.zeros((2, 2, 3)), "weights": np.array([[[1.5] * 3, [-0.5] * 3]] * 2)},
            "weights sum to 1 up to 1, the least is -0.5; give",
        ),
        ({"patch_logits": np.zeros((2, 0, 3)), "weights": np.zeros((2, 0, 3))}, r"'patch_logits' has shape \(2, 0, 3"),
    ],
)  # fmt: skip
def test_wrong_arrays_are_told(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", **{**GOOD, **arrays})
    with pytest.raises(InputError, match=message) as caught:
        read_scores(tmp_path / "s.npz")
    assert "\n" not in str(caught.value)
