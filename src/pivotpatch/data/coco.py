"""Read COCO instance annotations (2014, 2017, or anyone's file in that form)."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pivotpatch.data.address import Address
from pivotpatch.data.files import check_name, read_json, resolve_inside
from pivotpatch.data.records import FileStore, LabelLists, LabelSpace, RecordSet
from pivotpatch.errors import InputError, choose_one_of

Value = TypeVar("Value", int, str)


def read_coco(
    location: str,
    split: str | None,
    *,
    images: str | None = None,
    keep_unannotated: bool = False,
    allow_escape: bool = False,
) -> RecordSet:
    """Read COCO instances: a label is present where an image has at least one annotation of its category.

    Crowd annotations (`iscrowd`) count as presence like any other. Labels keep the order of the file's
    categories, records the order of its images. That a picture exists is not checked here.

    Args:
        location: the folder that holds `annotations/instances_<split>.json`, or such a file itself.
        split: for a folder, the split, such as train2014 or val2017; for a file, None.
        images: folder of the pictures, relative to the folder at `location` or to the file's own folder. By default
            `<split>` or `images/<split>`, whichever is there; for a file, its own folder.
        keep_unannotated: keep the images that have no annotation, with all labels absent. The literature leaves
            them out.
        allow_escape: accept file names that lead out of the folder of the pictures.
    """
    path, folder = _find_source(Path(location), split, images)
    columns = _read_columns(path)
    for image, name in zip(columns.image_ids, columns.file_names, strict=True):
        resolve_inside(folder, name, where=f"{path}, image {image}", allow_escape=allow_escape)
    names = pa.array(columns.file_names, pa.string())
    positive = columns.positive
    if not keep_unannotated:
        kept = np.flatnonzero(np.diff(positive.offsets))
        names, positive = names.take(pa.array(kept)), positive.select(kept)
    if len(names) == 0:
        wrong = f"none of the {len(columns.file_names)} images has an annotation"
        raise InputError(str(path), wrong, "check the file or set keep_unannotated=true")
    name = str(Address("coco", location, split))
    return RecordSet(name, columns.labels, images=FileStore(folder, names), positive=positive)


class _Source(NamedTuple):
    path: Path
    folder: Path


def _find_source(location: Path, split: str | None, images: str | None) -> _Source:
    """The annotation file and the folder of its pictures."""
    if location.is_file() or location.suffix == ".json":
        if split is not None:
            raise InputError(str(location), f"a file has no split {split!r}", "leave it out or give the folder")
        return _Source(location, location.parent / (images or ""))
    annotations = location / "annotations"
    known = [path.stem.removeprefix("instances_") for path in annotations.glob("instances_*.json")]
    if not known:
        raise InputError(str(annotations), "there is no instances_<split>.json", "give the folder above annotations/")
    if split not in known:
        wrong = "no split is given" if split is None else f"there is no split {split!r}"
        raise InputError(str(annotations), wrong, choose_one_of(split or "", known))
    path = annotations / f"instances_{split}.json"
    if images is not None:
        return _Source(path, location / images)
    places = [location / split, location / "images" / split]
    for folder in places:
        if folder.is_dir():
            return _Source(path, folder)
    wrong = f"the pictures of {split!r} are neither in {places[0]} nor in {places[1]}"
    raise InputError(str(location), wrong, "unpack them there or name their folder with images=")


class _Columns(NamedTuple):
    labels: LabelSpace
    image_ids: list[int]
    file_names: list[str]
    positive: LabelLists


def _read_columns(path: Path) -> _Columns:
    """Take the columns that matter out of an instances file."""
    content = read_json(path, convert=_drop_shapes)
    images, annotations, categories = (_table(content, key, path) for key in ("images", "annotations", "categories"))
    image_ids = _column(images, "id", int, f"{path}, images")
    file_names = _column(images, "file_name", str, f"{path}, images")
    category_ids = _column(categories, "id", int, f"{path}, categories")
    category_names = _column(categories, "name", str, f"{path}, categories")
    image_at = _positions(image_ids, "id", f"{path}, images")
    _positions(file_names, "file_name", f"{path}, images")
    label_at = _positions(category_ids, "id", f"{path}, categories")
    _positions(category_names, "name", f"{path}, categories")
    rows = _look_up(annotations, "image_id", image_at, path)
    indices = _look_up(annotations, "category_id", label_at, path)
    positive = LabelLists.from_pairs(rows, indices, count=len(images))
    return _Columns(LabelSpace(tuple(category_names)), image_ids, file_names, positive)


def _drop_shapes(item: dict[str, object]) -> object:
    """Forget outlines and boxes as they are read: they are nearly all of the file, and labels need none."""
    item.pop("segmentation", None)
    item.pop("bbox", None)
    return item


def _table(content: object, key: str, path: Path) -> list[object]:
    table = content.get(key) if isinstance(content, dict) else None
    if not isinstance(table, list):
        raise InputError(str(path), f"there is no list {key!r}", "give a COCO instances file")
    return table


def _column(entries: list[object], key: str, kind: type[Value], where: str) -> list[Value]:
    """The values of one key of all entries."""
    values = []
    for place, entry in enumerate(entries):
        value = entry.get(key) if isinstance(entry, dict) else None
        if not isinstance(value, kind):
            wrong = f"{key!r} is {value!r}" if value is not None else f"{key!r} is missing"
            raise InputError(f"{where}, entry {place}", wrong, f"give it as {kind.__name__}")
        if isinstance(value, str):
            check_name(value, where=f"{where}, entry {place}")
        values.append(value)
    return values


def _positions(values: Sequence[Value], key: str, where: str) -> dict[Value, int]:
    """Where each value stands; one that stands twice is an error."""
    at: dict[Value, int] = {}
    for place, value in enumerate(values):
        first = at.setdefault(value, place)
        if first != place:
            raise InputError(where, f"{key} {value!r} stands twice (entries {first} and {place})", "remove one of them")
    return at


def _look_up(annotations: list[object], key: str, at: dict[int, int], path: Path) -> NDArray[np.int64]:
    """Position of what each annotation refers to by `key`."""
    values = _column(annotations, key, int, f"{path}, annotations")
    try:
        return np.fromiter((at[value] for value in values), dtype=np.int64, count=len(values))
    except KeyError:
        place = next(place for place, value in enumerate(values) if value not in at)
    annotation = annotations[place]
    number = annotation.get("id") if isinstance(annotation, dict) else None
    listed = "categories" if key == "category_id" else "images"
    wrong = f"{key} {values[place]} is not among the {len(at)} {listed}"
    raise InputError(f"{path}, annotation {number}", wrong, "correct or remove the annotation")
