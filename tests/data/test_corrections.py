"""Corrections against a plain dictionary of answers; what is held out does not move with them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pivotpatch.data.address import open_records
from pivotpatch.data.corrections import apply_corrections
from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError
from pivotpatch.training.config import load_config
from pivotpatch.training.images import open_training_records

LABELS = ("cat", "dog", "eel", "fox")
State = dict[str, dict[str, float]]


def write(path: Path, labels: tuple[str, ...], states: np.ndarray, names: list[str]) -> str:
    """A column per label: 1, 0 or nothing."""
    rows = (",".join([name, *("" if s < 0 else str(s) for s in row)]) for name, row in zip(names, states, strict=True))
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([",".join(["image", *labels]), *rows]) + "\n")
    return str(path)


def read(records: RecordSet) -> State:
    """What is said of each label of each file, by its real path; -1 unknown."""
    answers = records.states.toarray()
    found = {}
    for index, record in enumerate(records):
        assert isinstance(record.image, Path)
        found[str(record.image.resolve())] = dict(zip(records.labels.names, answers[index].tolist(), strict=True))
    return found


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for place in range(40):
        Image.new("RGB", (8, 8), (6 * place, 0, 0)).save(tmp_path / "photos" / f"{place}.png")
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    return tmp_path


def test_known_answers_win_and_all_else_stays(photos: Path) -> None:
    """Corrections know other labels in another order, come by a link, and name images that training lacks."""
    generator = np.random.default_rng(0)
    before = generator.integers(-1, 2, (30, 4))
    train = open_records(write(photos / "train.csv", LABELS, before, [f"photos/{n}.png" for n in range(30)]))
    said = generator.integers(-1, 2, (20, 3))
    corrections = ("fox", "gnu", "cat")
    names = [f"link/{n}.png" for n in range(20, 40)]
    review = open_records(write(photos / "review.csv", corrections, said, names))
    fixed, val = apply_corrections([train.select(np.arange(25)), train.select(np.arange(25, 30))], review)
    expected = {
        str(photos / "photos" / f"{n}.png"): dict(zip(LABELS, before[n].tolist(), strict=True)) for n in range(30)
    }
    changed = 0
    for row, n in enumerate(range(20, 40)):
        answers = {name: s for name, s in zip(corrections, said[row].tolist(), strict=True) if s >= 0 and name != "gnu"}
        if n >= 30 and not answers:
            continue
        old = expected.setdefault(str(photos / "photos" / f"{n}.png"), dict.fromkeys(LABELS, -1))
        changed += n < 30 and sum(old[name] != s for name, s in answers.items())
        old |= answers
    held = {str(photos / "photos" / f"{n}.png") for n in range(25, 30)}
    assert read(val) == {path: states for path, states in expected.items() if path in held}
    assert read(fixed) == {path: states for path, states in expected.items() if path not in held}
    assert fixed.notes[-1].startswith(f"{review.name}: {changed} labels of ")
    assert f"{len(fixed) - 25} images added; labels that are not in {train.name} left out: gnu" in fixed.notes[-1]
    assert np.isnan(fixed.target().numpy()).sum() == (fixed.states.data == -1).sum() > 0  # unknown, not absent


def test_what_is_held_out_stays_and_test_images_are_never_added(photos: Path) -> None:
    states = np.random.default_rng(1).integers(0, 2, (30, 4))
    write(photos / "train.csv", LABELS, states, [f"photos/{n}.png" for n in range(30)])
    write(photos / "test.csv", LABELS, states[:5], [f"photos/{n}.png" for n in range(30, 35)])
    write(photos / "review.csv", LABELS, 1 - np.resize(states, (36, 4)), [f"photos/{n}.png" for n in range(36)])
    words = [f"data.train={photos / 'train.csv'}", f"data.test={photos / 'test.csv'}", "data.val_fraction=0.3"]
    plain: Any = open_training_records(load_config(None, words))
    fixed: Any = open_training_records(load_config(None, [*words, f"data.corrections={photos / 'review.csv'}"]))
    assert read(fixed.val).keys() == read(plain.val).keys()
    assert read(fixed.train).keys() - read(plain.train).keys() == {str(photos / "photos" / "35.png")}
    for path, labels in (read(plain.train) | read(plain.val)).items():
        assert (read(fixed.train) | read(fixed.val))[path] == {name: 1 - state for name, state in labels.items()}


def test_corrections_that_cannot_be_matched_are_refused(photos: Path) -> None:
    one = np.ones((1, 1), int)
    train = open_records(write(photos / "train.csv", ("cat",), one, ["photos/0.png"]))
    other = open_records(write(photos / "other" / "review.csv", ("gnu",), one, ["0.png"]))
    with pytest.raises(InputError, match="knows none of the labels"):
        apply_corrections([train], other)
    with pytest.raises(InputError, match="its images are no files"):
        apply_corrections([open_records("scenes:@train?count=4&size=32")], train)
