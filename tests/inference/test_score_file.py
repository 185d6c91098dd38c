import errno
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from score_files import LABELS, make_scores

from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError
from pivotpatch.inference.score_file import SUFFIXES, read_scores, write_scores
from pivotpatch.inference.scores import Scores


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


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_closer_look_is_known_again(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"scores{suffix}"
    for size in (352, None):
        write_scores(replace(make_scores(), closer_size=size), path)
        assert read_scores(path).closer_size == size


def test_a_closer_look_of_no_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    for wrong, told in ((np.array([1, 2]), r"\[1 2\]"), (np.array(0), "0"), (np.array(float("nan")), "nan")):
        np.savez(path, scores=np.ones((2, 1)), target=np.ones((2, 1)), closer_size=wrong)
        with pytest.raises(InputError, match=rf"s\.npz: 'closer_size' is {told}; give pixels a side, or leave it out"):
            read_scores(path)


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
        (lambda note: {**note, "lam": 10**400}, "its note about labels cannot be read; it is damaged"),
        (lambda note: {**note, "schema": float("inf")}, "its note about labels cannot be read; it is damaged"),
        (lambda note: {**note, "labels": []}, "it has no labels or no column 'picture'; it is damaged"),
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


def pack(path: Path, members: dict[str, bytes]) -> Path:
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def npy(descr: str, shape: str, content: bytes = b"") -> bytes:
    """An array's file, whatever its header says."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"garbage", "'scores' is no array; it is damaged"),
        (npy("<f4", "(10**12, 3)"), "is no npz file .*; it is damaged"),
        (npy("<f4", "(1000000000000, 3)"), "is no npz file .*Unable to allocate.*; it is damaged"),
        (npy("<f4", "(99999999999999999999, 3)"), "is no npz file .*; it is damaged"),
        (npy("<f4", "(4, 3"), "is no npz file .*; it is damaged"),
        (npy("<f4", "(4, 3)", bytes(7)), "is no npz file .*; it is damaged"),
    ],
)
def test_a_damaged_array_of_an_npz_file_is_told(content: bytes, wrong: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"scores\.npz: {wrong}"):
        read_scores(pack(tmp_path / "scores.npz", {"scores.npy": content}))


@pytest.mark.parametrize(("descr", "content"), [("<U1", b"\xff" * 12), ("|S0", b"")])
def test_names_that_are_no_text_are_told(descr: str, content: bytes, tmp_path: Path) -> None:
    members = {"scores.npy": npy("<f4", "(1, 3)", bytes(12)), "labels.npy": npy(descr, "(3,)", content)}
    with pytest.raises(InputError, match=r"scores\.npz: "):
        read_scores(pack(tmp_path / "scores.npz", members))


def test_a_small_npz_file_that_unpacks_to_a_huge_one_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"
    np.savez_compressed(path, scores=np.zeros((14_000, 8_000), np.int8), target=np.zeros((2, 2)))
    with pytest.raises(
        InputError, match=r"scores\.npz: its arrays claim 106 MB, more than 100 MB and 20 times the file"
    ):
        read_scores(path)
    np.savez_compressed(
        path, scores=np.zeros((2, 2)), target=np.zeros((2, 2)), other=np.zeros((14_000, 8_000), np.int8)
    )
    assert read_scores(path).target.shape == (2, 2)  # what is not read may be of any size


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
@pytest.mark.filterwarnings("ignore")
def test_damage_gives_scores_or_our_error(changes: list[tuple[int, int]]) -> None:
    scores = make_scores(patches=True)
    with TemporaryDirectory() as folder:
        for suffix in (".npz", ".parquet"):
            path = Path(folder) / f"scores{suffix}"
            write_scores(scores, path)
            content = bytearray(path.read_bytes())
            for place, value in changes:
                content[place % len(content)] = value
            path.write_bytes(content)
            with suppress(InputError):
                assert len(read_scores(path).labels) == len(LABELS)


@pytest.mark.parametrize("kind", [">f4", "longdouble"])
def test_numbers_of_other_machines_are_read(kind: str, tmp_path: Path) -> None:
    values = np.array([[0.25, -2.0], [3.0, 4.5]])
    np.savez(tmp_path / "scores.npz", scores=values.astype(kind), target=np.eye(2).astype(kind))
    assert read_scores(tmp_path / "scores.npz").logits["image"].tolist() == values.tolist()


@pytest.mark.parametrize(
    "column",
    [
        pa.array([None] * 5, pa.list_(pa.float32(), 4)),
        pa.array([[1, 2, 3, 4]] * 5, pa.list_(pa.timestamp("s"), 4)),
    ],
)
def test_columns_that_hold_no_scores_are_told(column: pa.Array, tmp_path: Path) -> None:
    path = tmp_path / "scores.parquet"
    write_scores(make_scores(), path)
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.names.index("image"), "image", column), path)
    with pytest.raises(InputError, match=r"column 'image' .*; it is damaged"):
        read_scores(path)
    pq.write_table(table.drop_columns(["picture"]), path)
    with pytest.raises(InputError, match="it has no labels or no column 'picture'; it is damaged"):
        read_scores(path)
