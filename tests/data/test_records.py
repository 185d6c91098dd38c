from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotpatch.data.records import FileStore, LabelLists, LabelSpace, RecordSet
from pivotpatch.errors import InputError

lists_of_labels = st.lists(st.lists(st.integers(0, 5), unique=True).map(sorted), max_size=8)


def make_records(positive: list[list[int]], unknown: list[list[int]] | None = None) -> RecordSet:
    return RecordSet(
        "some",
        LabelSpace(tuple("abcdef")),
        images=FileStore(Path("root"), pa.array([f"{i}.jpg" for i in range(len(positive))], pa.large_string())),
        positive=LabelLists.from_lists(positive),
        unknown=None if unknown is None else LabelLists.from_lists(unknown),
    )


@pytest.mark.parametrize(("names", "message"), [
    ((), r"labels: there is no label at all; give at least one"),
    (("cat", "dog", "cat"), r"labels: cat stand twice; give each label one name"),
    (("cat", " "), r"the name ' ' is blank"),
    (("cat\ndog",), r"labels: the name 'cat\\ndog' is blank or holds control characters; give it a printable name"),
    (("evil\x1b[2J",), r"holds control characters"),
    (("\ud800",), r"holds control characters"),
])  # fmt: skip
def test_labels_that_are_none(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        LabelSpace(names)
    assert str(caught.value).isprintable()


def test_a_label_is_found_by_its_name() -> None:
    space = LabelSpace(("cat", "café au lait", "犬"))
    assert [space.index(name) for name in space.names] == [0, 1, 2]
    with pytest.raises(InputError, match=r"unknown label 'cta'; did you mean 'cat'"):
        space.index("cta")


@settings(deadline=None)
@given(lists=lists_of_labels, data=st.data())
def test_lists_are_packed_and_selected(lists: list[list[int]], data: st.DataObject) -> None:
    packed = LabelLists.from_lists(lists)
    assert [list(packed[i]) for i in range(len(packed))] == lists
    pairs = data.draw(st.permutations([(row, i) for row, held in enumerate(lists) for i in held] * 2))
    rows, indices = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    again = LabelLists.from_pairs(rows, indices, count=len(lists))
    assert [list(again[i]) for i in range(len(again))] == lists
    order = data.draw(st.lists(st.integers(0, len(lists) - 1))) if lists else []
    chosen = packed.select(np.array(order, dtype=np.int64))
    assert [list(chosen[i]) for i in range(len(chosen))] == [lists[i] for i in order]


@settings(deadline=None)
@given(states=st.lists(st.lists(st.sampled_from([0, 1, -1]), min_size=6, max_size=6), min_size=1, max_size=6))
def test_targets_say_what_is_present_absent_and_unknown(states: list[list[int]]) -> None:
    present, unknown = ([[i for i, s in enumerate(row) if s == sign] for row in states] for sign in (1, -1))
    expected = torch.tensor(states, dtype=torch.float32)
    expected[expected == -1] = torch.nan
    records = make_records(present, unknown)
    torch.testing.assert_close(records.target(), expected, equal_nan=True)
    torch.testing.assert_close(records.target(np.array([len(states) - 1])), expected[-1:], equal_nan=True)


def test_selections_of_selections_keep_pictures_and_labels_together() -> None:
    records = make_records([[i % 6] for i in range(10)])
    chosen = records[2:9].select(np.array([6, 0, 3]))
    assert [(r.name, r.image, r.positive) for r in chosen] == [
        (f"{i}.jpg", Path("root") / f"{i}.jpg", (i % 6,)) for i in (8, 2, 5)
    ]
    assert chosen[-1] == chosen[2]
    with pytest.raises(IndexError):
        chosen[3]


@settings(deadline=None)
@given(
    states=st.lists(st.lists(st.sampled_from([0, 1, -1]), min_size=6, max_size=6), min_size=1, max_size=6),
    names=st.lists(st.sampled_from("abcdef"), min_size=1, unique=True),
)
def test_kept_labels_are_columns_of_the_target(states: list[list[int]], names: list[str]) -> None:
    present, unknown = ([[i for i, s in enumerate(row) if s == sign] for row in states] for sign in (1, -1))
    for records in (make_records(present), make_records(present, unknown)):
        for whole in (records, records[::-1]):
            kept = whole.keep_labels(names)
            assert kept.labels.names == tuple(names)
            columns = ["abcdef".index(name) for name in names]
            torch.testing.assert_close(kept.target(), whole.target()[:, columns], equal_nan=True)
            assert [record.name for record in kept] == [record.name for record in whole]


def test_labels_that_cannot_be_kept() -> None:
    records = make_records([[0], [1]])
    with pytest.raises(InputError, match="unknown label 'g'; known: a, b, c, d, e, f"):
        records.keep_labels(["a", "g"])
    with pytest.raises(InputError, match="labels: a stand twice"):
        records.keep_labels(["a", "a"])
    with pytest.raises(InputError, match="there is no label at all"):
        records.keep_labels([])


def test_pictures_and_labels_must_agree() -> None:
    with pytest.raises(InputError, match=r"some: 1 pictures but 2 label lists; give one list a picture"):
        RecordSet(
            "some",
            LabelSpace(("a",)),
            images=FileStore(Path(), pa.array(["x"])),
            positive=LabelLists.from_lists([[0], [0]]),
        )
