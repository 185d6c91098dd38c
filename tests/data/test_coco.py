import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from pivotpatch.data.address import open_records
from pivotpatch.data.coco import read_coco
from pivotpatch.errors import InputError

Json = dict[str, Any]

# Ids have gaps and are not in order, as in the published files; one annotation is a crowd, with its run lengths.
INSTANCES: Json = {
    "images": [
        {"file_name": "000000397133.jpg", "id": 397133},
        {"file_name": "000000037777.jpg", "id": 37777},
        {"file_name": "000000252219.jpg", "id": 252219},
    ],
    "annotations": [
        {"segmentation": [[1.5, 2.0, 3.0, 4.0]], "iscrowd": 0, "image_id": 252219, "category_id": 90, "id": 1768},
        {"segmentation": [[1.5, 2.0, 3.0, 4.0]], "iscrowd": 0, "image_id": 397133, "category_id": 44, "id": 82445},
        {"segmentation": {"counts": [2], "size": [4, 6]}, "iscrowd": 1, "image_id": 397133, "category_id": 1, "id": 9},
        {"segmentation": [[1.5, 2.0, 3.0, 4.0]], "iscrowd": 0, "image_id": 397133, "category_id": 44, "id": 82446},
    ],
    "categories": [
        {"id": 1, "name": "person"},
        {"id": 90, "name": "toothbrush"},
        {"id": 44, "name": "bottle"},
    ],
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "annotations").mkdir()
    (tmp_path / "val2017").mkdir()
    for split in ("val2017", "train2017"):
        (tmp_path / f"annotations/instances_{split}.json").write_text(json.dumps(INSTANCES))
    (tmp_path / "annotations/captions_val2017.json").write_text("{}")
    return tmp_path


def write(root: Path, change: Callable[[Json], object]) -> Path:
    content = deepcopy(INSTANCES)
    change(content)
    path = root / "annotations/instances_val2017.json"
    path.write_text(json.dumps(content))
    return path


def test_annotated_images_in_the_order_of_the_file(root: Path) -> None:
    records = open_records(f"coco:{root}@val2017")
    assert records.labels.names == ("person", "toothbrush", "bottle")
    assert [record.name for record in records] == ["000000397133.jpg", "000000252219.jpg"]
    assert [record.positive for record in records] == [(0, 2), (1,)]
    assert records[0].image == root / "val2017/000000397133.jpg"
    assert records.target().tolist() == [[1, 0, 1], [0, 1, 0]]
    assert records.name == f"coco:{root}@val2017"
    every = open_records(f"coco:{root}@val2017?keep_unannotated=true")
    assert [record.positive for record in every] == [(0, 2), (), (1,)]
    write(root, lambda content: content["annotations"].reverse())
    assert [record.positive for record in read_coco(str(root), "val2017")] == [(0, 2), (1,)]


def test_images_lie_below_images_or_where_the_option_says(root: Path) -> None:
    (root / "images/train2017").mkdir(parents=True)
    assert read_coco(str(root), "train2017")[0].image == root / "images/train2017/000000397133.jpg"
    assert read_coco(str(root), "train2017", images="val2017")[0].image == root / "val2017/000000397133.jpg"
    path = root / "annotations/instances_train2017.json"
    assert read_coco(str(path), None)[0].image == root / "annotations/000000397133.jpg"
    image = read_coco(str(path), None, images="../val2017")[0].image
    assert isinstance(image, Path)
    assert image.resolve() == root / "val2017/000000397133.jpg"


@pytest.mark.parametrize(("location", "split", "message"), [
    ("", "val2014", r"there is no split 'val2014'; did you mean 'val2017'\? known: train2017, val2017$"),
    ("", "train2017", r"the images of 'train2017' are not in .*train2017 or .*images/train2017; unpack"),
    ("gone.json", None, r"gone\.json: there is no such file"),
    ("annotations/instances_val2017.json", "val2017", "a file has no split 'val2017'"),
])  # fmt: skip
def test_what_is_not_there_is_told(root: Path, location: str, split: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_coco(str(root / location), split)


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: c["annotations"][1].update(category_id=12), "is not as in COCO .KeyError: 12"),
    (lambda c: c["images"].append(c["images"][0]), "two of its images have the same id"),
    (lambda c: c["images"][1].update(file_name=c["images"][0]["file_name"]), "1 names are those of several images"),
    (lambda c: c["categories"][1].update(name=c["categories"][0]["name"]), "several categories are called"),
    (lambda c: c["categories"][1].update(name=None), "is not as in COCO .a category has no name"),
    (lambda c: c["images"][1].update(file_name="../secret.jpg"), r"'\.\./secret\.jpg' lies outside"),
    (lambda c: c.update(annotations=[]), "none of the 3 images has an annotation; check the file or set keep_una"),
])  # fmt: skip
def test_damaged_content_is_refused(root: Path, change: Callable[[Json], object], message: str) -> None:
    write(root, change)
    with pytest.raises(InputError, match=rf"instances_val2017\.json.*{message}"):
        read_coco(str(root), "val2017")
