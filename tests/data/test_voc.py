import math
from pathlib import Path

import pytest

from pivotpatch.data.address import open_records
from pivotpatch.data.voc import LABELS, read_voc
from pivotpatch.errors import InputError

# Objects of each image: label and whether it is difficult.
IMAGES: dict[str, list[tuple[str, bool]]] = {
    "000005": [("chair", False), ("chair", True), ("person", True)],
    "000012": [("car", False)],
    "000007": [("dog", True), ("dog", True), ("tvmonitor", False)],
    "000009": [],
}


def state(name: str, label: str) -> int:
    """-1, 0 or 1, as the development kit defines it for ImageSets/Main."""
    flags = [difficult for shown, difficult in IMAGES[name] if shown == label]
    return -1 if not flags else 0 if all(flags) else 1


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for year, part in (("2007", "trainval"), ("2007", "test"), ("2012", "val")):
        main = tmp_path / f"VOCdevkit/VOC{year}/ImageSets/Main"
        main.mkdir(parents=True, exist_ok=True)
        (main / f"{part}.txt").write_text("".join(f"{name}\n" for name in IMAGES))
        for label in LABELS:
            lines = [f"{name} {state(name, label):2d}\n" for name in IMAGES]
            (main / f"{label}_{part}.txt").write_text("".join(lines))
    return tmp_path


@pytest.mark.parametrize(("difficult", "value"), [("negative", 0.0), ("positive", 1.0), ("unknown", math.nan)])
def test_every_policy(root: Path, difficult: str, value: float) -> None:
    records = open_records(f"voc:{root}/VOCdevkit@2007-test?difficult={difficult}")
    of_state = {-1: 0.0, 0: value, 1: 1.0}
    expected = [[of_state[state(name, label)] for label in LABELS] for name in IMAGES]
    # NaN differs from itself, so both sides are written out.
    assert str(records.target().tolist()) == str(expected)
    assert [record.name for record in records] == [f"{name}.jpg" for name in IMAGES]
    assert records[1].image == root / "VOCdevkit/VOC2007/JPEGImages/000012.jpg"


def test_the_kit_the_folder_above_and_a_year_are_accepted(root: Path) -> None:
    kit = root / "VOCdevkit"
    for location, split in [(root, "2007-test"), (kit, "2007-test"), (kit / "VOC2007", "2007-test"),
                            (kit / "VOC2007", "test"), (kit / "VOC2012", "val")]:  # fmt: skip
        records = read_voc(str(location), split)
        year = "VOC2007" if "test" in split else "VOC2012"
        assert records[0].image == kit / year / "JPEGImages/000005.jpg"


@pytest.mark.parametrize(("name", "content", "message"), [
    ("test.txt", b"000005\n000012\n000005\n", r"test\.txt: a line is not like .*, or an image stands twice; copy"),
    ("test.txt", b"000005\n../../x\n", r"test\.txt: a line is not like '000005' or"),
    ("dog_test.txt", b"000005 -1\n000012 -1\n000007  0\n", r"dog_test\.txt: it does not say -1, 0 or 1"),
])  # fmt: skip
def test_damaged_image_sets_are_refused(root: Path, name: str, content: bytes, message: str) -> None:
    (root / "VOCdevkit/VOC2007/ImageSets/Main" / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_voc(str(root), "2007-test")


def test_images_without_a_positive_label_are_left_out_if_asked(root: Path) -> None:
    kept = open_records(f"voc:{root}/VOCdevkit@2007-trainval?drop_empty=true")
    assert [Path(record.name).stem for record in kept] == ["000005", "000012", "000007"]
    assert len(open_records(f"voc:{root}/VOCdevkit@2007-trainval")) == len(IMAGES)
