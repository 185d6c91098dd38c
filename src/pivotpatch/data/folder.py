"""Data sets in folders: a text file beside each image, one folder per label, or Hugging Face's layouts."""

import filecmp
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from pivotpatch.data.files import is_image, no_image, walk_files
from pivotpatch.data.records import FileStore, RecordSet
from pivotpatch.data.table import TableOptions, read_tables
from pivotpatch.data.table_files import TableFile, TableFiles, find_tables
from pivotpatch.data.table_labels import TableLabels, encode_label_column, find_label_names
from pivotpatch.errors import InputError, choose_one_of

SPLIT_FOLDERS = ("train", "trainval", "val", "valid", "validation", "dev", "test")
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")

Layout = Literal["auto", "sidecar", "label_folders", "parquet", "metadata"]


def read_folder(
    location: str,
    split: str | None,
    *,
    layout: Layout = "auto",
    merge: bool = False,
    missing: Literal["error", "empty"] = "error",
    names: str | None = None,
    image: str | None = None,
    labels: str | None = None,
    split_column: str | None = None,
    allow_escape: bool = False,
) -> RecordSet:
    """Read a folder of images.

    Hidden files and folders are left out, links to folders are not followed. Where all sub-folders are named as splits
    are (train, val, test, ...), each of them is one; all have the label space of the whole folder.

    Args:
        location: the folder.
        split: name of a sub-folder, or of a split of the table in the last two layouts; None takes all.
        layout: `sidecar` (photo.jpg and photo.txt), `label_folders` (cats/1.jpg), `parquet` (Parquet files here or in
            `data`), `metadata` (metadata.csv, .jsonl or .parquet beside the images), or `auto` to look.
        merge: in label folders, take the same file name under several labels as one image with all of them.
        missing: with sidecars, an image without one is an `error`, or has no label (`empty`).
        names: file of all labels in order; this and what follows as in `read_table`.
        image: column of the images, in the last two layouts.
        labels: column of labels, likewise.
        split_column: column of the split, likewise.
        allow_escape: accept images outside the folder, likewise.
    """
    folder, address = Path(location), f"folder:{location}"
    if not folder.is_dir():
        todo = f"read a table with table:{location}" if folder.is_file() else "check the location"
        raise InputError(location, "there is no such folder", todo)
    splits = _find_splits(folder)
    tables = _find_tables(folder, splits, layout)
    if tables is not None:
        options = TableOptions(image, labels, None, names, split_column, None, allow_escape)
        return read_tables(tables, split, name=address, options=options)
    if split is not None and split not in splits:
        todo = choose_one_of(split, splits) if splits else f"put its images into {folder / split}"
        raise InputError(location, f"there is no split {split!r}", todo)
    found = _list_files(folder, depth=1 if splits else 0)
    known = find_label_names(folder, names)
    if layout == "sidecar" or (layout == "auto" and any(_sidecar(path) in found.texts for path in found.images)):
        required = None if missing == "empty" else f"{split}/" if split else ""
        paths, encoded = found.images, _read_sidecars(folder, found, known, required=required)
    else:
        groups = _group_by_label(folder, found, merge=merge)
        paths, lists = list(groups), pa.chunked_array([list(groups.values())])
        encoded = encode_label_column(lists, known, delimiter="", name_row=lambda row: str(folder / paths[row]))
    images = FileStore(folder, pa.array(paths, pa.large_string()))
    records = RecordSet(address, encoded.space, images=images, positive=encoded.positive, unknown=encoded.unknown)
    if split is None:
        return records
    records.name = f"{address}@{split}"
    return records.select(np.flatnonzero([path.startswith(f"{split}/") for path in paths]))


class _Found(NamedTuple):
    """What a folder holds, as paths from it."""

    images: list[str]
    texts: set[str]  # any of which may be an image's sidecar
    depth: int  # leading parts of a path that name its split


def _find_splits(folder: Path) -> list[str]:
    """Sub-folders that are splits; one with another name means that none is, for `train` is also a label."""
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    loose = any(is_image(entry.name) for entry in entries)
    return folders if not loose and all(name.lower() in SPLIT_FOLDERS for name in folders) else []


def _find_tables(folder: Path, splits: Sequence[str], layout: Layout) -> TableFiles | None:
    """The tables of Hugging Face's layouts; None where there are none or another layout is asked for."""
    if layout in ("auto", "metadata"):
        places = [(folder, None), *((folder / split, split) for split in splits)]
        files = [
            TableFile(at / name, split) for at, split in places for name in METADATA_FILES if (at / name).is_file()
        ]
        if files:
            return TableFiles(folder, files)
        if layout == "metadata":
            todo = f"write {METADATA_FILES[0]}, or change the layout"
            raise InputError(str(folder), "there is no metadata file", todo)
    if layout == "parquet" or (layout == "auto" and any(any(folder.glob(p)) for p in ("*.parquet", "data/*.parquet"))):
        return find_tables(str(folder))
    return None


def _list_files(folder: Path, *, depth: int) -> _Found:
    base = os.path.normpath(folder)
    prefix = "" if base == "." else os.path.join(base, "")  # noqa: PTH118 (text, for there may be millions)
    paths = [path.removeprefix(prefix).replace(os.sep, "/") for path in walk_files(base)]
    found = _Found([path for path in paths if is_image(path)], {path for path in paths if path.endswith(".txt")}, depth)
    if not found.images:
        raise no_image(str(folder))
    odd = [path for path in found.images if not path.isascii() and path.encode(errors="replace").decode() != path]
    if odd:
        raise InputError(str(folder), f"the file name {odd[0]!r} is not UTF-8", "rename it")
    return found


def _sidecar(path: str) -> str:
    return str(PurePosixPath(path).with_suffix(".txt"))


def _read_sidecars(folder: Path, found: _Found, names: Sequence[str] | None, *, required: str | None) -> TableLabels:
    """Labels from the text file beside each image; all paths that begin with `required` must have one."""
    sidecars = [_sidecar(path) for path in found.images]
    lost = [path for path, text in zip(found.images, sidecars, strict=True) if text not in found.texts]
    lost = [path for path in lost if required is not None and path.startswith(required)]
    if lost:
        wrong = f"{len(lost)} images have no text file beside them, e.g. {lost[0]}"
        todo = f"write {_sidecar(lost[0])}, or take them without labels with ?missing=empty"
        raise InputError(str(folder), wrong, todo)
    contents = [_read_sidecar(folder / text) if text in found.texts else "" for text in sidecars]
    values = pa.chunked_array([pa.array(contents, pa.large_string())])
    return encode_label_column(values, names, delimiter=",", name_row=lambda row: str(folder / sidecars[row]))


def _read_sidecar(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig").replace("\n", ",")
    except UnicodeDecodeError:
        raise InputError(str(path), "not UTF-8", "save the file as UTF-8") from None


def _group_by_label(folder: Path, found: _Found, *, merge: bool) -> dict[str, list[str]]:
    """Labels of each image by the folder it lies in; an image that several share is kept at its first place."""
    groups: dict[str, list[str]] = {}
    places: dict[tuple[str, ...], str] = {}
    for path in found.images:
        parts = path.split("/", found.depth + 1)
        if len(parts) < found.depth + 2:
            todo = "write a text file beside each image, sort all into label folders, or use a table"
            raise InputError(str(folder), f"image {path} has no label", todo)
        *split, label, name = parts
        place = places.setdefault((*split, name), path) if merge else path
        if place != path and not filecmp.cmp(folder / place, folder / path, shallow=False):
            wrong = f"{place} and {path} are different images and cannot be merged"
            raise InputError(str(folder), wrong, "rename one of them, or leave out ?merge=true")
        groups.setdefault(place, []).append(label)
    return groups
