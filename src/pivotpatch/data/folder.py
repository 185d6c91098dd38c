"""Data sets in folders: a text file beside each image, one folder per label, or Hugging Face's layouts."""

import filecmp
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
import pyarrow as pa

from pivotpatch.data.files import is_image, no_image, walk_files
from pivotpatch.data.records import FileStore, RecordSet
from pivotpatch.data.table import encode_label_column, find_label_names, read_table
from pivotpatch.data.table_files import TableFile, TableFiles, find_tables
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
    folder = Path(location)
    if not folder.is_dir():
        raise InputError(location, "there is no such folder", "check the location, or read a table with table:FILE")
    splits = _find_splits(folder)
    tables = _find_tables(folder, splits, layout)
    if tables is not None:
        return read_table(
            tables, split, image=image, labels=labels, names=names, split_column=split_column, allow_escape=allow_escape
        )
    if split is not None and split not in splits:
        todo = choose_one_of(split, splits) if splits else f"put its images into {folder / split}"
        raise InputError(location, f"there is no split {split!r}", todo)
    files = _list_files(folder)
    paths = [path for path in files if is_image(path)]
    if not paths:
        raise no_image(location)
    texts = set(files) - set(paths)
    if layout == "sidecar" or (layout == "auto" and any(_sidecar(path) in texts for path in paths)):
        lists = [_read_sidecar(folder, path, texts) for path in paths]
        chosen = paths if split is None else [path for path in paths if path.startswith(f"{split}/")]
        lost = [path for path in chosen if _sidecar(path) not in texts]
        if lost and missing == "error":
            wrong = f"{len(lost)} images have no text file beside them, e.g. {lost[0]}"
            todo = f"write {_sidecar(lost[0])}, or take them without labels with ?missing=empty"
            raise InputError(location, wrong, todo)
    else:
        groups = _group_by_label(folder, paths, depth=1 if splits else 0, merge=merge)
        paths, lists = list(groups), list(groups.values())
    values, known = pa.chunked_array([lists], pa.list_(pa.string())), find_label_names(folder, names)
    encoded = encode_label_column(values, known, delimiter="", name_row=lambda row: str(folder / paths[row]))
    records = RecordSet(
        f"folder:{location}",
        encoded.space,
        images=FileStore(folder, pa.array(paths, pa.large_string())),
        positive=encoded.positive,
        unknown=encoded.unknown,
    )
    return records if split is None else records.select(np.flatnonzero([p.startswith(f"{split}/") for p in paths]))


def _find_splits(folder: Path) -> list[str]:
    """Sub-folders that are splits; one with another name means that none is, for `train` is also a label."""
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    loose = any(is_image(entry.name) for entry in entries)
    return folders if not loose and all(name.lower() in SPLIT_FOLDERS for name in folders) else []


def _find_tables(folder: Path, splits: Sequence[str], layout: Layout) -> TableFiles | None:
    """The tables of Hugging Face's layouts; None where there are none or another layout is asked for."""
    places = [(folder, None), *((folder / split, split) for split in splits)]
    files = [TableFile(at / name, split) for at, split in places for name in METADATA_FILES if (at / name).is_file()]
    if layout == "metadata" and not files:
        raise InputError(str(folder), "there is no metadata file", f"write {METADATA_FILES[0]}, or change the layout")
    if files and layout in ("auto", "metadata"):
        return TableFiles(folder, files)
    if layout == "parquet" or (layout == "auto" and any(any(folder.glob(p)) for p in ("*.parquet", "data/*.parquet"))):
        return find_tables(str(folder))
    return None


def _list_files(folder: Path) -> list[str]:
    """Paths of all files, from the folder."""
    base = os.path.normpath(folder)
    prefix = "" if base == "." else os.path.join(base, "")  # noqa: PTH118 (text, for there may be millions)
    paths = [path.removeprefix(prefix).replace(os.sep, "/") for path in walk_files(base)]
    odd = [path for path in paths if is_image(path) and path.encode(errors="replace").decode() != path]
    if odd:
        raise InputError(str(folder), f"the file name {odd[0]!r} is not UTF-8", "rename it")
    return paths


def _sidecar(path: str) -> str:
    return str(PurePosixPath(path).with_suffix(".txt"))


def _read_sidecar(folder: Path, path: str, texts: set[str]) -> list[str]:
    """Labels from the text file beside an image, none where there is no such file."""
    if _sidecar(path) not in texts:
        return []
    try:
        return (folder / _sidecar(path)).read_text(encoding="utf-8-sig").replace("\n", ",").split(",")
    except UnicodeDecodeError:
        raise InputError(str(folder / _sidecar(path)), "not UTF-8", "save the file as UTF-8") from None


def _group_by_label(folder: Path, paths: Sequence[str], *, depth: int, merge: bool) -> dict[str, list[str]]:
    """Labels of each image by the folder it lies in, `depth` below; one that several share is kept at its first."""
    groups: dict[str, list[str]] = {}
    places: dict[tuple[str, ...], str] = {}
    for path in paths:
        parts = path.split("/", depth + 1)
        if len(parts) < depth + 2:
            todo = "write a text file beside each image, sort all into label folders, or use a table"
            raise InputError(str(folder), f"image {path} has no label", todo)
        *split, label, name = parts
        place = places.setdefault((*split, name), path) if merge else path
        if place != path and not filecmp.cmp(folder / place, folder / path, shallow=False):
            wrong = f"{place} and {path} are different images and cannot be merged"
            raise InputError(str(folder), wrong, "rename one of them, or leave out ?merge=true")
        groups.setdefault(place, []).append(label)
    return groups
