"""Read COCO instance annotations (2014, 2017, or anyone's file in that form)."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pivotpatch.data.address import choose_split
from pivotpatch.data.records import FileStore, LabelSpace, RecordSet, pack_states
from pivotpatch.errors import InputError, explaining, shorten
from pivotpatch.runtime.files import check_name, read_json, resolve_inside

_NEEDED = {"images", "categories", "annotations", "id", "name", "file_name", "image_id", "category_id"}


def read_coco(
    location: str,
    split: str | None,
    *,
    images: str | None = None,
    keep_unannotated: bool = False,
) -> RecordSet:
    """Read COCO instances: a label is present where an image has at least one annotation of its category.

    Crowds count as presence. Labels keep the order of the file's categories, records that of its images.

    Args:
        location: the folder that holds `annotations/instances_<split>.json`, or such a file itself.
        split: for a folder, the split, such as train2014 or val2017; for a file, None.
        images: folder of the images, relative to the folder at `location` or to the file's own folder. By default
            `<split>` or `images/<split>`, whichever is there; for a file, its own folder.
        keep_unannotated: keep the images that have no annotation, with all labels absent. The literature leaves
            them out.
    """
    path, folder = _find_source(Path(location), split, images)
    # Outlines and boxes are nearly all of the file, and labels need none: they are forgotten as they are read.
    content: Any = read_json(path, convert=lambda item: {key: item[key] for key in item.keys() & _NEEDED} or item)
    wrong = "an image, a category or an annotation is not as in COCO"
    with explaining(str(path), wrong, "give a COCO instances file", of=(KeyError, TypeError)):
        names = [str(image["file_name"]) for image in content["images"]]
        labels = [str(category["name"]) for category in content["categories"]]
        if any(category["name"] is None for category in content["categories"]):
            raise TypeError("a category has no name")
        rows = _look_up(content, "image_id", "images", path)
        indices = _look_up(content, "category_id", "categories", path)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        wrong = f"{len(twice)} names are those of several images ({shorten(twice)})"
        raise InputError(str(path), wrong, "give each image one entry")
    if twice := [name for name, count in Counter(labels).items() if count > 1]:
        raise InputError(str(path), f"several categories are called {shorten(twice)}", "give each a name of its own")
    for name in names:
        check_name(name, where=str(path))
        resolve_inside(folder, name, where=str(path))
    states = pack_states(rows, indices, shape=(len(names), len(labels)))
    kept = np.arange(len(names)) if keep_unannotated else np.unique(rows)
    if not len(kept):
        wrong = f"none of the {len(names)} images has an annotation"
        raise InputError(str(path), wrong, "check the file or set keep_unannotated=true")
    store = FileStore(folder, pa.array(names, pa.string()))
    return RecordSet(location, LabelSpace(tuple(labels)), images=store, states=states).select(kept)


def _find_source(location: Path, split: str | None, images: str | None) -> tuple[Path, Path]:
    """The annotation file and the folder of its images."""
    if location.is_file() or location.suffix == ".json":
        if split is not None:
            raise InputError(str(location), f"a file has no split {split!r}", "leave it out or give the folder")
        return location, location.parent / (images or "")
    annotations = location / "annotations"
    known = [path.stem.removeprefix("instances_") for path in annotations.glob("instances_*.json")]
    split = choose_split(split, known, where=str(annotations), todo="give the folder with annotations/instances_*.json")
    places = [location / split, location / "images" / split] if images is None else [location / images]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        wrong = f"the images of {split!r} are not in {' or '.join(map(str, places))}"
        raise InputError(str(location), wrong, "unpack them there or name their folder with images=")
    return annotations / f"instances_{split}.json", folder


def _look_up(content: Any, key: str, table: str, path: Path) -> NDArray[np.int64]:
    """The position in a table of what each annotation refers to by `key`."""
    at = {entry["id"]: place for place, entry in enumerate(content[table])}
    if len(at) < len(content[table]):
        raise InputError(str(path), f"two of its {table} have the same id", "give each an id of its own")
    values = [annotation[key] for annotation in content["annotations"]]
    return np.fromiter((at[value] for value in values), dtype=np.int64, count=len(values))
