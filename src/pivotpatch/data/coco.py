"""Read COCO instance annotations (2014, 2017, or anyone's file in that form)."""

from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pivotpatch.data.address import Address
from pivotpatch.data.files import check_name, read_json, resolve_inside
from pivotpatch.data.records import FileStore, LabelLists, LabelSpace, RecordSet
from pivotpatch.errors import InputError, choose_one_of, quote

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
    categories, records the order of its images. That an image file exists is not checked here.

    Args:
        location: the folder that holds `annotations/instances_<split>.json`, or such a file itself.
        split: for a folder, the split, such as train2014 or val2017; for a file, None.
        images: folder of the images, relative to the folder at `location` or to the file's own folder. By default
            `<split>` or `images/<split>`, whichever is there; for a file, its own folder.
        keep_unannotated: keep the images that have no annotation, with all labels absent. The literature leaves
            them out.
        allow_escape: accept file names that lead out of the folder of the images.
    """
    path, folder = _find_source(Path(location), split, images)
    content = read_json(path, convert=_drop_shapes)
    image_ids = _read_column(content, "images", "id", int, path)
    names = _read_column(content, "images", "file_name", str, path)
    labels = LabelSpace(tuple(_read_column(content, "categories", "name", str, path)))
    for image, name in zip(image_ids, names, strict=True):
        check_name(name, where=f"{path}, image {image}")
        resolve_inside(folder, name, where=f"{path}, image {image}", allow_escape=allow_escape)
    rows = _look_up(content, "image_id", image_ids, path)
    indices = _look_up(content, "category_id", _read_column(content, "categories", "id", int, path), path)
    positive = LabelLists.from_pairs(rows, indices, count=len(names))
    kept = np.arange(len(names)) if keep_unannotated else np.flatnonzero(np.diff(positive.offsets))
    if len(kept) == 0:
        wrong = f"none of the {len(names)} images has an annotation"
        raise InputError(str(path), wrong, "check the file or set keep_unannotated=true")
    store = FileStore(folder, pa.array(names, pa.string()).take(pa.array(kept)))
    return RecordSet(str(Address("coco", location, split)), labels, images=store, positive=positive.select(kept))


class _Source(NamedTuple):
    path: Path
    folder: Path


def _find_source(location: Path, split: str | None, images: str | None) -> _Source:
    """The annotation file and the folder of its images."""
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
    places = [location / images] if images is not None else [location / split, location / "images" / split]
    folder = next((place for place in places if place.is_dir()), places[0])
    if images is None and not folder.is_dir():
        wrong = f"the images of {split!r} are neither in {places[0]} nor in {places[1]}"
        raise InputError(str(location), wrong, "unpack them there or name their folder with images=")
    return _Source(path, folder)


def _drop_shapes(item: dict[str, object]) -> object:
    """Forget outlines and boxes as they are read: they are nearly all of the file, and labels need none."""
    item.pop("segmentation", None)
    item.pop("bbox", None)
    return item


def _read_column(content: object, table: str, key: str, kind: type[Value], path: Path) -> list[Value]:
    """The values of one key of all entries of a table."""
    entries = content.get(table) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise InputError(str(path), f"there is no list {table!r}", "give a COCO instances file")
    values = []
    for place, entry in enumerate(entries):
        value = entry.get(key) if isinstance(entry, dict) else None
        if not isinstance(value, kind):
            where = f"{path}, {table}, entry {place}"
            raise InputError(where, f"{key!r} is {quote(value)}", f"give it as {kind.__name__}")
        values.append(value)
    return values


def _look_up(content: object, key: str, ids: list[int], path: Path) -> NDArray[np.int64]:
    """The position among `ids` of what each annotation refers to by `key`."""
    at = {value: place for place, value in enumerate(ids)}
    if len(at) < len(ids):
        twice = next(value for place, value in enumerate(ids) if at[value] != place)
        raise InputError(str(path), f"the id {twice} stands twice where {key} looks", "remove one of them")
    values = _read_column(content, "annotations", key, int, path)
    places = np.fromiter((at.get(value, -1) for value in values), dtype=np.int64, count=len(values))
    lost = np.flatnonzero(places < 0)
    if len(lost):
        where = f"{path}, annotations, entry {lost[0]}"
        raise InputError(where, f"there is no {key} {values[lost[0]]}", "correct or remove the annotation")
    return places
