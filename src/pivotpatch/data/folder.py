"""Data sets in folders: a text file beside each image, one folder per label, or Hugging Face's layouts."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
import pyarrow as pa

from pivotpatch.data.address import choose_split
from pivotpatch.data.records import FileStore, RecordSet
from pivotpatch.data.table import encode_label_column, find_label_names, read_table
from pivotpatch.data.table_files import TableFiles, find_tables
from pivotpatch.errors import InputError, explaining
from pivotpatch.runtime.files import describe_unread, is_image, no_image, unread_suffixes, walk_files

SPLIT_FOLDERS = ("train", "trainval", "val", "valid", "validation", "dev", "test")
_BOX = re.compile(r"\s*\d+(\s+[-+.\deE]+){4,}\s*")
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def read_folder(
    location: str,
    split: str | None,
    *,
    missing: Literal["error", "empty"] = "error",
    names: str | None = None,
) -> RecordSet:
    """Read a folder of images.

    The first of these that is there tells the labels: metadata.csv, .jsonl or .parquet beside the images; Parquet files
    here or in `data`; text files (photo.jpg and photo.txt); the folders that images lie in (cats/1.jpg). Hidden files
    are left out, links to folders are not followed. Where all sub-folders are named as splits are (train, val, test,
    ...), each of them is one; all have the label space of the whole folder.

    Args:
        location: the folder.
        split: name of a sub-folder, or of a split of the table; None takes all.
        missing: an image without a text file, where others have one, is an `error`, or has no label (`empty`).
        names: file of all labels in order, as in `read_table`.
    """
    folder = Path(location)
    if not folder.is_dir():
        raise InputError(location, "there is no such folder", "check the location, or read a table with table:FILE")
    splits = _find_splits(folder)
    tables = _find_tables(folder, splits)
    if tables is not None:
        return read_table(tables, split, names=names)
    if split is not None:
        choose_split(split, splits, where=location, todo=f"put its images into {folder / split}")
    files = _list_files(folder)
    paths = [path for path in files if is_image(path)]
    suffixes = (PurePosixPath(path).suffix.lower() for path in files)
    unread = Counter(suffix for suffix in suffixes if suffix in unread_suffixes())
    if not paths:
        raise no_image(location, unread)
    sidecars, there = [str(PurePosixPath(path).with_suffix(".txt")) for path in paths], set(files)
    kept = np.flatnonzero([split is None or path.startswith(f"{split}/") for path in paths])
    if there.intersection(sidecars):
        lists = [_read_labels(folder / text) if text in there else [] for text in sidecars]
        if all(_BOX.fullmatch(line) for lines in lists for line in lines if line.strip()) and any(map(any, lists)):
            wrong = "the text files beside the images hold boxes as YOLO writes them, no labels"
            raise InputError(location, wrong, "write the labels' names there, a line each, or make a table")
        lost = [place for place in kept if sidecars[place] not in there]
        if lost and missing == "error":
            wrong = f"{len(lost)} images have no text file beside them, e.g. {paths[lost[0]]}"
            todo = f"write {sidecars[lost[0]]}, or take them without labels with ?missing=empty"
            raise InputError(location, wrong, todo)
    else:
        lists = [path.split("/")[bool(splits) : -1][:1] for path in paths]
        if [] in lists:
            todo = "write a text file beside each image, sort all into label folders, or use a table"
            raise InputError(location, f"image {paths[lists.index([])]} has no label", todo)
    values, known = pa.chunked_array([lists], pa.list_(pa.string())), find_label_names(folder, names)
    space, states = encode_label_column(values, known, delimiter="", name_row=lambda row: str(folder / paths[row]))
    images = FileStore(folder, pa.array(paths, pa.large_string()))
    notes = list(describe_unread(unread))
    if not there.intersection(sidecars) and any(path.count("/") > 1 + bool(splits) for path in paths):
        notes.append(f"{location}: some folders of labels hold folders, whose names are not looked at")
    if split is None and len(splits) > 1:
        notes.append(f"{location}: its splits are taken together ({', '.join(splits)}); @{splits[0]} takes one")
    return RecordSet(location, space, images=images, states=states, notes=tuple(notes)).select(kept)


def _find_splits(folder: Path) -> list[str]:
    """Sub-folders that are splits; one with another name means that none is, for `train` is also a label."""
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    loose = any(is_image(entry.name) for entry in entries)
    return folders if not loose and all(name.lower() in SPLIT_FOLDERS for name in folders) else []


def _find_tables(folder: Path, splits: Sequence[str]) -> TableFiles | None:
    """The tables of Hugging Face's layouts; None where there are none."""
    places = [(folder, None), *((folder / split, split) for split in splits)]
    files = {at / name: split for at, split in places for name in METADATA_FILES if (at / name).is_file()}
    if files:
        return TableFiles(folder, files)
    held = any(any(folder.glob(pattern)) for pattern in ("*.parquet", "data/*.parquet"))
    return find_tables(str(folder)) if held else None


def _list_files(folder: Path) -> list[str]:
    """Paths of all files, from the folder."""
    base = os.path.normpath(folder)
    prefix = "" if base == "." else os.path.join(base, "")  # noqa: PTH118 (text, for there may be millions)
    paths = [path.removeprefix(prefix).replace(os.sep, "/") for path in walk_files(base)]
    odd = [path for path in paths if is_image(path) and path.encode(errors="replace").decode() != path]
    if odd:
        raise InputError(str(folder), f"the file name {odd[0]!r} is not UTF-8", "rename it")
    return paths


def _read_labels(path: Path) -> list[str]:
    with explaining(str(path), "not UTF-8", "save the file as UTF-8", of=UnicodeDecodeError):
        return path.read_text(encoding="utf-8-sig").replace("\n", ",").split(",")
