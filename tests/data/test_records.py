from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_records import records_of

from pivotpatch.data.records import FileStore, keep_common_labels, pack_states
from pivotpatch.errors import InputError

pairs_of_labels = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5), st.booleans()))
targets = st.lists(st.lists(st.sampled_from([0, 1, np.nan]), min_size=6, max_size=6), min_size=1, max_size=6)
make_records = partial(records_of, labels="abcdef", name="some")


@given(pairs=pairs_of_labels)
def test_pairs_are_packed_and_unknown_wins(pairs: list[tuple[int, int, bool]]) -> None:
    expected = np.zeros((8, 6), dtype=np.int8)
    for row, label, unknown in sorted(pairs, key=lambda pair: pair[2]):
        expected[row, label] = -1 if unknown else 1
    rows, labels, marks = np.array(pairs, dtype=np.int64).reshape(-1, 3).T
    packed = pack_states(rows, labels, shape=(8, 6), unknown=marks.astype(bool))
    assert np.array_equal(packed.toarray(), expected)
    assert packed.has_canonical_format


@given(target=targets, names=st.lists(st.sampled_from("abcdef"), min_size=1, unique=True))
def test_targets_say_what_is_present_absent_and_unknown(target: list[list[float]], names: list[str]) -> None:
    records, expected = make_records(target), torch.tensor(target, dtype=torch.float32)
    torch.testing.assert_close(records.target(), expected, equal_nan=True)
    torch.testing.assert_close(records.target(np.array([len(target) - 1])), expected[-1:], equal_nan=True)
    kept = records[::-1].keep_labels(names)
    assert kept.labels.names == tuple(names)
    columns = ["abcdef".index(name) for name in names]
    torch.testing.assert_close(kept.target(), expected.flip(0)[:, columns], equal_nan=True)
    assert kept.names == [record.name for record in records][::-1]
    assert records.keep_labels(None) is records.keep_labels("abcdef") is records
    for record, row in zip([*records, *kept], [*target, *expected.flip(0)[:, columns].tolist()], strict=True):
        assert record.positive == tuple(np.flatnonzero(np.equal(row, 1)).tolist())
        assert record.unknown == tuple(np.flatnonzero(np.isnan(row)).tolist())
    assert records.count_labels().tolist() == np.equal(target, 1).sum(0).tolist()


def test_selections_of_selections_keep_images_and_labels_together() -> None:
    records = make_records(np.eye(6)[np.arange(10) % 6])
    chosen = records[2:9].select(np.array([6, 0, 3]))
    assert [(r.name, r.image, r.positive) for r in chosen] == [
        (f"{i:05}.jpg", Path("images") / f"{i:05}.jpg", (i % 6,)) for i in (8, 2, 5)
    ]
    assert chosen[-1] == chosen[2]
    with pytest.raises(IndexError):
        chosen[3]


def test_names_are_told_without_fetching_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    records = make_records(np.eye(6))[::-1]
    monkeypatch.delattr(FileStore, "source")
    assert records.names == [f"{i:05}.jpg" for i in reversed(range(6))]
    with pytest.raises(InputError, match="some: unknown label 'A'; known: a, b"):
        records.keep_labels(["A"])


def test_common_labels_are_kept_in_the_order_asked_and_the_rest_is_told() -> None:
    records, told = make_records([[1, np.nan, 1, 0, 0, 0], [0, 1, np.nan, 0, 0, 0]]), list[str]()
    kept = keep_common_labels(records, ("x", "c", "y", "b", "z", "w"), whose="the model", tell=told.append)
    assert kept.labels.names == ("c", "b")
    torch.testing.assert_close(kept.target(), records.target()[:, [2, 1]], equal_nan=True)
    assert told == [
        "judging 2 of 6 labels: c, b; not in some: x, y, z and 1 more; not known to the model: a, d, e and 1 more"
    ]
    assert keep_common_labels(records, records.labels.names, whose="x", tell=pytest.fail) is records
    with pytest.raises(InputError, match=r"^some: the model knows none of its labels \(a, b, c and 3 more\); did"):
        keep_common_labels(records, ("saw", "hammer"), whose="the model", tell=pytest.fail)
