import errno
import json
from collections.abc import Callable
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
from sklearn.metrics import average_precision_score

from pivotpatch.core.errors import InputError
from pivotpatch.core.metrics import average_precision
from pivotpatch.core.policies import Fixed
from pivotpatch.data.address import open_records
from pivotpatch.data.records import RecordSet
from pivotpatch.inference.score_content import Scale
from pivotpatch.inference.score_file import SUFFIXES, read_scores, write_scores
from pivotpatch.inference.scores import Scores

LABELS = ("cat", 'a "dog", said: he', "tde:fish", "α")
PICTURES = ("b.jpg", "007", "folder/a, b.jpg", "ä.png", "1e5")


def make_scores(*, kinds: tuple[str, ...] = ("image", "patch", "tde"), patches: bool = False) -> Scores:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(len(PICTURES), *shape, len(LABELS), generator=generator)

    target = (draw() > 0).float()
    target[0, 1] = torch.nan
    return Scores(
        LABELS,
        PICTURES,
        target,
        {kind: draw() * 1e-3 for kind in kinds},
        patch_logits=draw(9) if patches else None,
        weights=draw(9).softmax(1) if patches else None,
        lam=0.7,
        temperature=2.5,
    )


def assert_same(found: Scores, expected: Scores) -> None:
    assert (found.labels, found.pictures) == (expected.labels, expected.pictures)
    assert list(found.logits) == list(expected.logits)
    pairs = [(found.target, expected.target), *((found.logits[k], expected.logits[k]) for k in expected.logits)]
    for name in ("patch_logits", "weights"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None)
        pairs += [] if one is None else [(one, other)]
    for name in ("lam", "temperature"):
        pairs.append((torch.as_tensor(getattr(found, name)), torch.as_tensor(getattr(expected, name))))
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kinds", [("image",), ("image", "patch", "tde"), ("patch",)])
def test_what_is_written_is_read(suffix: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    scores, path = make_scores(kinds=kinds), tmp_path / f"scores{suffix}"
    write_scores(scores, path)
    assert_same(read_scores(path), scores)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_patches_and_a_lam_for_each_label_are_kept(suffix: str, tmp_path: Path) -> None:
    scores = replace(make_scores(patches=True), lam=torch.rand(4), overlap=0.3)
    path = tmp_path / f"scores{suffix}"
    write_scores(scores, path)
    found = read_scores(path)
    assert_same(found, scores)
    assert found.overlap == 0.3
    torch.testing.assert_close(found.mix(temperature=0.3), scores.mix(temperature=0.3), rtol=0, atol=0)


def rewrite_note(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a Parquet file says of itself."""
    table = pq.read_table(path)
    note = json.loads(table.schema.metadata[b"pivotpatch"])
    change(note)
    pq.write_table(table.replace_schema_metadata({b"pivotpatch": json.dumps(note)}), path)


def test_files_from_before_overlap_are_read(tmp_path: Path) -> None:
    scores = replace(make_scores(patches=True), overlap=0.3)
    write_scores(scores, tmp_path / "s.parquet")
    rewrite_note(tmp_path / "s.parquet", lambda note: note.pop("overlap"))
    write_scores(scores, tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz") as file:
        np.savez(tmp_path / "s.npz", **{name: file[name] for name in file.files if name != "overlap"})
    for name in ("s.parquet", "s.npz"):
        found = read_scores(tmp_path / name)
        assert_same(found, scores)
        assert found.overlap == 0.0


def test_an_overlap_that_no_patches_have_is_refused(tmp_path: Path) -> None:
    scores = make_scores(patches=True)
    write_scores(scores, tmp_path / "s.parquet")
    rewrite_note(tmp_path / "s.parquet", lambda note: note.update(overlap=1.5))
    np.savez(tmp_path / "s.npz", scores=np.ones((2, 1)), target=np.ones((2, 1)), overlap=np.array([0.1, 0.2]))
    with pytest.raises(InputError, match=r"s\.parquet: overlap is 1\.5; give a share of a patch's side"):
        read_scores(tmp_path / "s.parquet")
    with pytest.raises(InputError, match=r"s\.npz: overlap is tensor.*; give a share of a patch's side"):
        read_scores(tmp_path / "s.npz")


def test_a_file_of_many_row_groups_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pivotpatch.inference import score_file

    scores, path = make_scores(patches=True), tmp_path / "scores.parquet"
    monkeypatch.setattr(score_file, "_GROUP", 2 * 9 * 4)
    write_scores(scores, path)
    assert pq.ParquetFile(path).num_row_groups == 3
    assert_same(read_scores(path), scores)


def test_what_a_csv_cannot_hold_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"s\.csv: a CSV file cannot hold patches; write \.parquet or \.npz"):
        write_scores(make_scores(patches=True), tmp_path / "s.csv")
    with pytest.raises(InputError, match=r"s\.csv: a CSV file cannot hold a lam for each label; write \.parquet"):
        write_scores(replace(make_scores(), lam=torch.ones(4)), tmp_path / "s.csv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_leaves_what_was_there(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"scores{suffix}"
    write_scores(make_scores(), path)
    before = path.read_bytes()

    def fail(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for place in ("pyarrow.parquet.write_table", "pyarrow.csv.write_csv", "numpy.savez"):
        monkeypatch.setattr(place, fail)
    with pytest.raises(InputError, match="No space left on device; free some space"):
        write_scores(make_scores(kinds=("image",)), path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def write_csv(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


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


@pytest.fixture
def photos(tmp_path: Path) -> RecordSet:
    """Four pictures, of which none needs to be there."""
    (tmp_path / "photos.csv").write_text("image,labels\nd.jpg,cat|dog\na.jpg,dog\nc.jpg,\nb.jpg,fish|?cat\n")
    return open_records(f"table:{tmp_path / 'photos.csv'}")


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


def test_scores_are_put_in_the_order_of_others(tmp_path: Path) -> None:
    scores = make_scores()
    order, columns = torch.tensor([3, 1, 4, 0, 2]), torch.tensor([2, 0, 3, 1])
    moved = scores.select(order)
    moved = replace(
        moved,
        labels=tuple(LABELS[place] for place in columns.tolist()),
        target=torch.full((5, 4), torch.nan),
        logits={kind: values[:, columns] for kind, values in moved.logits.items()},
        lam=torch.arange(4.0)[columns],
    )
    write_scores(moved, tmp_path / "moved.npz")
    assert_same(read_scores(tmp_path / "moved.npz", like=scores), replace(scores, lam=torch.arange(4.0)))
    write_scores(moved.select(torch.arange(4)), tmp_path / "fewer.npz")
    with pytest.raises(
        InputError, match=r"fewer\.npz: 1 pictures of the other scores have .*leave them out of the other"
    ):
        read_scores(tmp_path / "fewer.npz", like=scores)
    other = replace(scores, labels=("cat", "dog", "fish", "horse"))
    with pytest.raises(
        InputError, match=r"3 labels are not in the other scores \(.*\); .*known: cat, dog, fish, horse"
    ):
        read_scores(tmp_path / "moved.npz", like=other)


def test_the_smallest_npz(photos: RecordSet, tmp_path: Path) -> None:
    np.savez(
        tmp_path / "s.npz",
        scores=np.array([[0.5, -1], [2, 3]], dtype=np.float16),
        target=np.eye(2, dtype=bool),
    )
    scores = read_scores(tmp_path / "s.npz")
    assert (scores.labels, scores.pictures) == (("label 0", "label 1"), ("row 0", "row 1"))
    assert scores.logits["image"].dtype == torch.float32
    assert scores.target.tolist() == [[1, 0], [0, 1]]
    np.savez(tmp_path / "t.npz", scores=np.ones((4, 3)))
    scores = read_scores(tmp_path / "t.npz", records=photos)
    assert (scores.labels, scores.pictures[0]) == (("cat", "dog", "fish"), "d.jpg")
    np.savez(tmp_path / "ids.npz", scores=np.ones((2, 1)), target=np.ones((2, 1)), pictures=np.array([139, 285]))
    assert read_scores(tmp_path / "ids.npz").pictures == ("139", "285")


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
        ("picture,cat,target:cat\na,1,1\nb,many,1\n", r"row 3 \(the header is row 1\) holds 'many' where numbers"),
        ("picture,cat,target:cat\na,,1\n", "the image score of 'cat' for 'a' is nan; find where the model made it"),
        ("picture,cat,target:cat\na,0.1,1\nb,nan,1\n", "the image score of 'cat' for 'b' is nan"),
        ("picture,cat,target:cat\na,1,2\n", "the target holds 2; write 1, 0, or -1 for unknown"),
        ("picture,image:cat,lam,target:cat\na,1,1,1\nb,1,2,1\n", "column 'lam' changes from row to row; give"),
        ("picture,cat\na\n", r"row 2 \(the header is row 1\) has 1 columns, not 2"),
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


def damage_note(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    table = pq.read_table(path)
    note = change(json.loads(table.schema.metadata[b"pivotpatch"]))
    pq.write_table(table.replace_schema_metadata({b"pivotpatch": json.dumps(note)}), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda note: {**note, "schema": 9}, "schema 9 is newer than 1, the newest known; upgrade pivotpatch"),
        (lambda note: {}, "its note about labels cannot be read; it is damaged"),
        (lambda note: {**note, "labels": 3}, "its note about labels cannot be read; it is damaged"),
        (lambda note: {**note, "labels": note["labels"][:3]}, r"column 'target' is fixed_size_list.* for 3 labels"),
        (lambda note: {**note, "labels": note["labels"][:2]}, r"'target' has shape|is fixed_size_list.* for 2 labels"),
    ],
)
def test_a_damaged_note_is_told(
    change: Callable[[dict[str, Any]], dict[str, Any]], message: str, tmp_path: Path
) -> None:
    write_scores(make_scores(), tmp_path / "s.parquet")
    damage_note(tmp_path / "s.parquet", change)
    with pytest.raises(InputError, match=message):
        read_scores(tmp_path / "s.parquet")


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_files_that_are_cut_short_are_told(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"s{suffix}"
    write_scores(make_scores(), path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"(cut short|is no npz file) \(.*\); .*(copy|write) it again"):
        read_scores(path)


def test_other_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"s\.xlsx: is of no known kind of file; give one that ends in \.parquet"):
        read_scores(tmp_path / "s.xlsx")
    with pytest.raises(InputError, match=r"s\.csv: there is no such file; check the path"):
        read_scores(tmp_path / "s.csv")
    with pytest.raises(InputError, match=r"s\.txt: is of no known kind of file; end it in \.parquet"):
        write_scores(make_scores(), tmp_path / "s.txt")
    with pytest.raises(InputError, match=r"there is no folder .*nowhere; make it first"):
        write_scores(make_scores(), tmp_path / "nowhere" / "s.npz")
    twice = replace(make_scores(), pictures=("a", "a", "b", "c", "d"))
    with pytest.raises(InputError, match=r"1 pictures stand twice \(a\)"):
        write_scores(twice, tmp_path / "s.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    with pytest.raises(InputError, match=r"array\.npz: holds one array without a name; write it with np\.savez"):
        read_scores(tmp_path / "array.npz")
    (tmp_path / "garbage.npz").write_bytes(b"no archive" * 9)
    with pytest.raises(InputError, match=r"garbage\.npz: is no npz file; it is damaged, copy or write it again"):
        read_scores(tmp_path / "garbage.npz")
    np.savez(tmp_path / "other.npz", logits=np.zeros((2, 2)))
    with pytest.raises(
        InputError, match=r"there are no scores among its arrays \(logits\); name them 'scores', or image"
    ):
        read_scores(tmp_path / "other.npz")
