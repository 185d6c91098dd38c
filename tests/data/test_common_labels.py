import pytest
import torch

from pivotpatch.data.common_labels import keep_common_labels
from pivotpatch.data.records import LabelLists, LabelSpace, RecordSet
from pivotpatch.data.scenes import read_scenes
from pivotpatch.errors import InputError


@pytest.fixture
def records() -> RecordSet:
    """Three scenes, of which somebody says other things than they show."""
    return RecordSet(
        "table:mine.csv",
        LabelSpace(("hamster", "dog", "cat")),
        images=read_scenes("", "val", count=3).images,
        positive=LabelLists.from_lists([(0, 2), (1,), (1, 2)]),
        unknown=LabelLists.from_lists([(1,), (0, 2), ()]),
    )


def test_the_labels_that_both_know_are_kept_in_the_order_of_those_that_are_asked(records: RecordSet) -> None:
    told: list[str] = []
    kept = keep_common_labels(
        records, ("person", "cat", "bus", "car", "dog", "cup"), whose="the network", tell=told.append
    )
    assert kept.labels.names == ("cat", "dog")
    torch.testing.assert_close(kept.target(), records.target()[:, [2, 1]], equal_nan=True)
    assert told == [
        "judging 2 of 6 labels: cat, dog; not in table:mine.csv: person, bus, car and 1 more; "
        "not known to the network: hamster"
    ]


def test_what_is_judged_is_named_as_far_as_it_fits_a_line(records: RecordSet) -> None:
    told: list[str] = []
    keep_common_labels(records, ("cat", "hamster", "dog", "cup"), whose="s.csv", tell=told.append)
    assert told == ["judging 3 of 4 labels: cat, hamster, dog; not in table:mine.csv: cup"]
    scenes = read_scenes("", "val", count=3)
    names = tuple(f"label {number}" for number in range(12))
    many = RecordSet("many", LabelSpace(names), images=scenes.images, positive=LabelLists.from_lists([()] * 3))
    keep_common_labels(many, (*names, "cup"), whose="s.csv", tell=told.append)
    assert told[1].startswith("judging 12 of 13 labels: label 0, ")
    assert told[1].endswith("label 9 and 2 more; not in many: cup")


def test_there_is_nothing_to_tell_where_all_that_is_asked_is_there(records: RecordSet) -> None:
    assert keep_common_labels(records, records.labels.names, whose="x", tell=pytest.fail) is records
    kept = keep_common_labels(records, ("cat", "hamster"), whose="x", tell=pytest.fail)
    torch.testing.assert_close(kept.target(), records.target()[:, [2, 0]], equal_nan=True)


def test_nothing_in_common_is_refused(records: RecordSet) -> None:
    message = r"^table:mine\.csv: the network knows none of its labels \(hamster, dog, cat\); did you mean 'hammer'\?"
    with pytest.raises(InputError, match=message):
        keep_common_labels(records, ("saw", "hammer"), whose="the network", tell=pytest.fail)
