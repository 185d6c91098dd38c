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
    "info": {"description": "COCO 2017 Dataset", "version": "1.0", "year": 2017},
    "licenses": [{"url": "http://example.org/by/2.0/", "id": 4, "name": "Attribution License"}],
    "images": [
        {"license": 4, "file_name": "000000397133.jpg", "height": 427, "width": 640, "id": 397133},
        {"license": 4, "file_name": "000000037777.jpg", "height": 230, "width": 352, "id": 37777},
        {"license": 4, "file_name": "000000252219.jpg", "height": 428, "width": 640, "id": 252219},
    ],
    "annotations": [
        {"segmentation": [[1.5, 2.0, 3.0, 4.0, 5.0, 6.0]], "area": 702.1, "iscrowd": 0, "image_id": 252219,
         "bbox": [1.0, 2.0, 3.0, 4.0], "category_id": 90, "id": 1768},
        {"segmentation": [[1.5, 2.0, 3.0, 4.0, 5.0, 6.0]], "area": 27.7, "iscrowd": 0, "image_id": 397133,
         "bbox": [1.0, 2.0, 3.0, 4.0], "category_id": 44, "id": 82445},
        {"segmentation": {"counts": [272, 2, 4], "size": [427, 640]}, "area": 9.0, "iscrowd": 1, "image_id": 397133,
         "bbox": [1.0, 2.0, 3.0, 4.0], "category_id": 1, "id": 900100397133},
        {"segmentation": [[1.5, 2.0, 3.0, 4.0, 5.0, 6.0]], "area": 30.0, "iscrowd": 0, "image_id": 397133,
         "bbox": [1.0, 2.0, 3.0, 4.0], "category_id": 44, "id": 82446},
    ],
    "categories": [
        {"supercategory": "person", "id": 1, "name": "person"},
        {"supercategory": "indoor", "id": 90, "name": "toothbrush"},
        {"supercategory": "kitchen", "id": 44, "name": "bottle"},
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


def test_images_without_annotation_stay_where_asked(root: Path) -> None:
    records = open_records(f"coco:{root}@val2017?keep_unannotated=true")
    assert [record.positive for record in records] == [(0, 2), (), (1,)]
    assert records[1].name == "000000037777.jpg"


def test_a_crowd_alone_is_presence(root: Path) -> None:
    write(root, lambda content: content.update(annotations=[content["annotations"][2]]))
    assert [record.positive for record in read_coco(str(root), "val2017")] == [(0,)]


def test_pictures_are_found_under_images_too(root: Path) -> None:
    (root / "images/train2017").mkdir(parents=True)
    assert read_coco(str(root), "train2017")[0].image == root / "images/train2017/000000397133.jpg"


def test_pictures_lie_where_the_option_says(root: Path) -> None:
    assert read_coco(str(root), "train2017", images="all")[0].image == root / "all/000000397133.jpg"
    path = root / "annotations/instances_train2017.json"
    assert read_coco(str(path), None)[0].image == root / "annotations/000000397133.jpg"
    image = read_coco(str(path), None, images="../val2017")[0].image
    assert isinstance(image, Path)
    assert image.resolve() == root / "val2017/000000397133.jpg"


def test_the_record_does_not_depend_on_the_order_of_annotations(root: Path) -> None:
    before = [record.positive for record in read_coco(str(root), "val2017")]
    write(root, lambda content: content["annotations"].reverse())
    assert [record.positive for record in read_coco(str(root), "val2017")] == before


def test_odd_label_names_are_kept_as_they_are(root: Path) -> None:
    names = ["piñata, 大きい №1", 'l\'été & "co"', " a=b;c|d "]
    write(root, lambda content: [c.update(name=name) for c, name in zip(content["categories"], names, strict=True)])
    assert read_coco(str(root), "val2017").labels.names == tuple(names)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("val2014", r"there is no split 'val2014'; did you mean 'val2017'\? known: train2017, val2017$"),
        (None, "no split is given; known: train2017, val2017$"),
        ("train2017", r"the pictures of 'train2017' are neither in .*train2017 nor in .*images/train2017; unpack"),
    ],
)
def test_a_missing_split_says_what_is_there(root: Path, split: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_coco(str(root), split)


def test_a_location_without_annotations_is_refused(root: Path) -> None:
    with pytest.raises(InputError, match=r"annotations: there is no instances_<split>\.json; give the folder above"):
        read_coco(str(root / "val2017"), "val2017")
    with pytest.raises(InputError, match=r"gone\.json: there is no such file"):
        read_coco(str(root / "gone.json"), None)
    with pytest.raises(InputError, match="a file has no split 'val2017'"):
        read_coco(str(root / "annotations/instances_val2017.json"), "val2017")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["annotations"][1].update(category_id=12),
         r"annotation 82445: category_id 12 is not among the 3 categories; correct or remove"),
        (lambda c: c["annotations"][0].update(image_id=5), "annotation 1768: image_id 5 is not among the 3 images"),
        (lambda c: c["annotations"][3].pop("category_id"), "annotations, entry 3: 'category_id' is missing"),
        (lambda c: c["annotations"][3].update(image_id="397133"), "entry 3: 'image_id' is '397133'; give it as int"),
        (lambda c: c["annotations"].insert(1, None), "annotations, entry 1: 'image_id' is missing"),
        (lambda c: c["images"].append(c["images"][0]), r"images: id 397133 stands twice \(entries 0 and 3\)"),
        (lambda c: c["images"][2].update(file_name="000000037777.jpg"),
         r"images: file_name '000000037777.jpg' stands twice \(entries 1 and 2\); remove one"),
        (lambda c: c["images"][2].pop("file_name"), "images, entry 2: 'file_name' is missing; give it as str"),
        (lambda c: c["images"][1].update(file_name="../secret.jpg"), r"image 37777: '\.\./secret\.jpg' lies outside"),
        (lambda c: c["images"][1].update(file_name="/etc/passwd"), "image 37777: '/etc/passwd' lies outside"),
        (lambda c: c["categories"][1].update(id=1), r"categories: id 1 stands twice \(entries 0 and 1\)"),
        (lambda c: c["categories"][1].update(name="person"), "categories: name 'person' stands twice"),
        (lambda c: c["categories"][1].update(name="tooth\nbrush"), r"entry 1: the name 'tooth\\nbrush' is blank"),
        (lambda c: c["categories"][1].update(name=""), "categories, entry 1: the name '' is blank"),
        (lambda c: c.update(categories=[]), "category_id 90 is not among the 0 categories"),
        (lambda c: c.pop("annotations"), "there is no list 'annotations'; give a COCO instances file"),
        (lambda c: c.update(annotations=[]), "none of the 3 images has an annotation; check the file or set keep_una"),
    ],
)  # fmt: skip
def test_damaged_content_is_refused(root: Path, change: Callable[[Json], object], message: str) -> None:
    write(root, change)
    with pytest.raises(InputError, match=rf"instances_val2017\.json.*{message}"):
        read_coco(str(root), "val2017")


def test_escapes_are_accepted_where_allowed(root: Path) -> None:
    write(root, lambda content: content["images"][0].update(file_name="../elsewhere/a.jpg"))
    records = open_records(f"coco:{root}@val2017?allow_escape=true")
    assert records[0].image == root / "val2017/../elsewhere/a.jpg"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[: len(content) // 2], r"the JSON is cut short \(line 1, column \d+"),
        (lambda content: b"", "the file is empty"),
        (lambda content: content.replace(b"bottle", "bouteille vidée".encode("latin-1")), "line 1 is not UTF-8"),
        (lambda content: b"[1, 2]", "there is no list 'images'"),
    ],
)
def test_damaged_files_are_refused(root: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = root / "annotations/instances_val2017.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=rf"instances_val2017\.json: {message}"):
        read_coco(str(root), "val2017")
