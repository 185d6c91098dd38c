"""Score files: ours come back as they were, other people's mean what their numbers mean."""

import errno
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_scores import make_scores as make_plain_scores
from sklearn.metrics import average_precision_score

from pivotpatch.core.metrics import average_precision
from pivotpatch.core.policies import Fixed
from pivotpatch.data.address import open_records
from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError
from pivotpatch.inference.score_file import read_scores, write_scores
from pivotpatch.inference.scores import Scores
from pivotpatch.runtime.values import Calibration

RULE = Calibration("tde", "platt_per_label", (1.0, 2.0, 3.0, 4.0), (0.1, 0.2, 0.3, 0.4))
LABELS = ("cat", 'a "dog", said: he', "tde:fish", "α")
PICTURES = ("b.jpg", "007", "folder/a, b.jpg", "ä.png", "1e5")


def make_scores(*, patches: bool = False) -> Scores:
    return replace(make_plain_scores(LABELS, count=5, patches=patches), pictures=PICTURES, indices=None, lam=0.7)


def write_csv(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


@pytest.fixture
def photos(tmp_path: Path) -> RecordSet:
    """Four images, of which none needs to be there."""
    (tmp_path / "photos.csv").write_text("image,labels\nd.jpg,cat|dog\na.jpg,dog\nc.jpg,\nb.jpg,fish|?cat\n")
    return open_records(f"table:{tmp_path / 'photos.csv'}")


def assert_same(found: Scores, expected: Scores) -> None:
    kept = "labels pictures lam temperature overlap closer_size data network thresholds calibration"
    plain = kept.split()
    assert [getattr(found, name) for name in plain] == [getattr(expected, name) for name in plain]
    assert list(found.logits) == list(expected.logits)
    pairs = [(found.target, expected.target), *((found.logits[k], expected.logits[k]) for k in expected.logits)]
    pairs += [(getattr(found, name), getattr(expected, name)) for name in ("patch_logits", "weights")]
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kinds", [("image",), ("image", "patch", "tde"), ("patch",)])
def test_what_is_written_is_read_and_a_full_disk_leaves_it(
    kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, scores = tmp_path / "scores.parquet", replace(make_scores(patches=True), patch_logits=None, weights=None)
    scores = replace(scores, logits={kind: scores.logits[kind] for kind in kinds})
    for size in (352, None):
        write_scores(replace(scores, closer_size=size), path)
        assert_same(read_scores(path), replace(scores, closer_size=size))

    def fail(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", fail)
    with pytest.raises(InputError, match="No space left on device; free some space"):
        write_scores(scores, path)
    assert_same(read_scores(path), scores)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_patches_and_origins_are_kept_over_many_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pivotpatch.inference import score_file

    rule: dict[str, Any] = {"thresholds": (0.1, 0.2, 0.3, 0.4), "calibration": RULE}
    scores = replace(make_scores(patches=True), overlap=0.3, data="a:b", network="0f", **rule)
    path = tmp_path / "s.parquet"
    monkeypatch.setattr(score_file, "_GROUP", 2 * 4 * 4)
    write_scores(scores, path)
    assert pq.ParquetFile(path).num_row_groups == 3
    assert_same(read_scores(path), scores)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("s.csv", r"s\.csv: is no name for scores; name a file that ends in \.parquet"),
        ("nowhere/s.parquet", "there is no folder .*nowhere; make it first"),
        ("s.parquet", r"1 images stand twice \(a\)"),
    ],
)
def test_names_that_cannot_be_written_or_read_are_told(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        write_scores(replace(make_scores(), pictures=("a", "a", "b", "c", "d")), tmp_path / name)
    with pytest.raises(InputError, match="there is no such file"):
        read_scores(tmp_path / name)
    with pytest.raises(InputError, match="there are no images; give at least one"):
        write_scores(make_scores().select(torch.tensor([], dtype=torch.int64)), tmp_path / "s.parquet")
    assert list(tmp_path.iterdir()) == []


def test_scores_are_put_in_the_order_of_others(tmp_path: Path) -> None:
    scores = replace(make_scores(), thresholds=(0.1, 0.2, 0.3, 0.4), calibration=replace(RULE, kind="image"))
    path = tmp_path / "moved.parquet"
    moved = scores.select(torch.tensor([3, 1, 4, 0, 2])).keep_labels([2, 0, 3, 1])
    assert (moved.thresholds, moved.calibration and moved.calibration.slope) == (
        (0.3, 0.1, 0.4, 0.2),
        (3.0, 1.0, 4.0, 2.0),
    )
    moved = replace(moved, target=torch.full((5, 4), torch.nan))
    write_scores(moved, path)
    assert_same(read_scores(path, like=scores), scores)
    write_scores(replace(scores, target=1 - scores.target), path)
    with pytest.raises(InputError, match="known targets are not those of the other scores"):
        read_scores(path, like=scores)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 9}, "schema 9 is newer than 1, the newest known; upgrade pivotpatch"),
        ({"schema": None}, "its note or a column cannot be read .*; it is damaged"),
        ({"labels": list(LABELS[:3])}, r"damaged .*\(cannot reshape array of size 20 into shape \(5,3\)\)"),
        ({"labels": ["a", "b", "a", "c"]}, "a stand twice"),
        ({"lam": -1}, r"s\.parquet: lam is -1.0; give a number"),
        ({"overlap": 1.5}, r"s\.parquet: overlap is 1.5; give a share of a patch's side"),
        ({"thresholds": [0.5]}, "thresholds or calibration are not those of 4 labels"),
    ],
)
def test_a_wrong_note_is_told(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    write_scores(make_scores(), path)
    table = pq.read_table(path)
    note = {**json.loads(table.schema.metadata[b"pivotpatch"]), **changes}
    note = {name: value for name, value in note.items() if value is not None}
    pq.write_table(table.replace_schema_metadata({b"pivotpatch": json.dumps(note)}), path)
    with pytest.raises(InputError, match=message):
        read_scores(path)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
@pytest.mark.filterwarnings("ignore")
def test_damage_gives_scores_or_our_error(changes: list[tuple[int, int]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "scores.parquet"
        write_scores(make_scores(patches=True), path)
        content = bytearray(path.read_bytes())
        for place, value in changes:
            content[place % len(content)] = value
        path.write_bytes(content)
        with suppress(InputError):
            assert len(read_scores(path).labels) == len(LABELS)


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


def test_targets_come_from_a_data_set_by_the_images_names(photos: RecordSet, tmp_path: Path) -> None:
    text = "picture,dog,cat,target:dog,target:cat\na.jpg,1,2,1,0\nb.jpg,3,4,0,\nc.jpg,5,6,0,0\nd.jpg,7,8,0,1\n"
    path, told = write_csv(tmp_path / "s.csv", text), list[str]()
    scores: Any = read_scores(path, records=photos, tell=told.append)
    assert scores.pictures == ("d.jpg", "a.jpg", "c.jpg", "b.jpg")
    assert scores.labels == ("dog", "cat")
    assert scores.logits["image"].tolist() == [[7, 8], [1, 2], [5, 6], [3, 4]]
    expected = torch.tensor([[1, 1], [1, 0], [0, 0], [0, torch.nan]])
    torch.testing.assert_close(scores.target, expected, equal_nan=True)
    assert scores.indices.tolist() == [0, 1, 2, 3]
    assert told[0] == f"{path}: scores from 1 to 8 are taken for logits"
    assert told[-1] == f"{path}: 1 of 7 known targets are not those of {photos.name}, which are taken"
    write_csv(path, "picture,dog,target:dog\na.jpg,1,0\nb.jpg,3,1\nc.jpg,5,1\nd.jpg,7,\n")
    with pytest.raises(InputError, match=r"s\.csv: 3 of 3 known targets are not those of table:.*; check that both"):
        read_scores(path, records=photos)
    write_csv(path, "picture,dog\na.jpg,1\n")
    with pytest.raises(InputError, match=r"s\.csv: it does not say what is true of the images"):
        read_scores(path)


def test_what_numbers_are_is_seen_from_the_labels_that_are_judged(photos: RecordSet, tmp_path: Path) -> None:
    rows = "".join(f"{name}.jpg,{9 * row},0.{row + 1}\n" for row, name in enumerate("abcd"))
    told = list[str]()
    scores: Any = read_scores(
        write_csv(tmp_path / "s.csv", f"picture,id,dog\n{rows}"), records=photos, tell=told.append
    )
    assert told[0].endswith("scores from 0.1 to 0.4 are taken for probabilities")
    assert sorted(scores.probs("image").flatten().tolist()) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_few_images_without_scores_are_left_out_and_told(photos: RecordSet, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "s.csv", "picture,dog\nc.jpg,0.5\na.jpg,0.25\nb.jpg,1\n")
    told: list[str] = []
    scores: Any = read_scores(path, records=photos, tell=told.append)
    assert told[0] == f"{path}: scores from 0.25 to 1 are taken for probabilities"
    assert told[-1] == f"{path}: 1 of 4 images of {photos.name} have no scores and are left out (d.jpg)"
    assert scores.indices.tolist() == [1, 2, 3]
    assert scores.pictures == ("a.jpg", "c.jpg", "b.jpg")
    assert scores.probs("image").flatten().tolist() == pytest.approx([0.25, 0.5, 1.0])
    torch.testing.assert_close(scores.target, photos.keep_labels(["dog"]).target()[1:])
    write_csv(path, "picture,dog\na.jpg,0.25\n")
    with pytest.raises(InputError, match=r"3 images of table:.* have no scores .*; score them too, or leave"):
        read_scores(path, records=photos, tell=told.append)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("picture,dog\na.jpg,1\nb.jpg,1\nc.jpg,1\n", r"1 images of table:.*photos\.csv have no scores \(d\.jpg\)"),
        ("picture,dog\na,1\nb,1\nc,1\nd,1\n", r"4 images are not in table:.*\(a, b, c and 1 more\)"),
        ("picture,dogg\na.jpg,1\nb.jpg,1\nc.jpg,1\nd.jpg,1\n", r"s\.csv knows none of its labels"),
        ("", "the file is empty"),
        ("picture,cat,target:cat\n", "it has no rows, or one without an image"),
        ("name,cat\na,1\n", "no column of images among name, cat"),
        ("picture,cat,dog,target:cat\na,1,1,1\n", r"1 labels have no scores or no target column \(dog\)"),
        ("picture,cat,target:cat\na.jpg,1,1\nb.jpg,many,1\n", "Row #3: .* invalid value 'many'"),
        ("picture,dog\nd.jpg,0.1\na.jpg,nan\nc.jpg,1\nb.jpg,2\n", r"'image' is nan \(row 1\)"),
    ],
)
def test_wrong_tables_are_told(text: str, message: str, photos: RecordSet, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_scores(write_csv(tmp_path / "s.csv", text), records=photos)


def test_scores_that_no_file_could_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    scores, path = make_scores(), tmp_path / "s.parquet"
    bad = scores.logits["image"].clone()
    bad[2, 1] = torch.inf
    for wrong, told in (
        (replace(scores, logits={"image": bad}), r"a number of 'image' is inf \(row 2\); find where"),
        (replace(scores, labels=("a", "a", "b", "c")), "labels"),
    ):
        with pytest.raises(InputError, match=told):
            write_scores(wrong, path)
    assert not path.exists()
    half = replace(scores, logits={"image": scores.logits["image"].bfloat16()}, pictures=[Path(p) for p in PICTURES])  # type: ignore[arg-type]
    write_scores(half, path)
    assert read_scores(path).logits["image"].tolist() == half.logits["image"].tolist()
    assert read_scores(path).pictures == PICTURES


def test_decisions_that_came_with_scores_are_kept(tmp_path: Path) -> None:
    scores = replace(make_scores(), pictures=("./a.png", "b//c.png", "007", "ä", "/e.png"))
    given = scores.get("image") > 0.3
    write_scores(replace(scores, given=given), tmp_path / "s.parquet")
    for found in (read_scores(tmp_path / "s.parquet"), read_scores(tmp_path / "s.parquet", like=scores)):
        assert found.given is not None
        assert torch.equal(found.given, given)
