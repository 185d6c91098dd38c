"""Data sets in folders: a text file beside each picture, one folder per label, or Hugging Face's layouts."""

import filecmp
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from pivotpatch.data.records import FileStore, RecordSet
from pivotpatch.data.table import TableOptions, read_tables
from pivotpatch.data.table_files import TableFile, TableFiles, find_tables
from pivotpatch.data.table_labels import TableLabels, encode_label_column, find_label_names
from pivotpatch.errors import InputError, choose_one_of

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".jp2")
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
    """Read a folder of pictures.

    Hidden files and folders are left out, links to folders are not followed. Where all sub-folders are named as splits
    are (train, val, test, ...), each of them is one; all have the label space of the whole folder.

    Args:
        location: the folder.
        split: name of a sub-folder, or of a split of the table in Hugging Face's layouts; None takes all.
        layout: `sidecar` (photo.jpg and photo.txt, one label a line or separated by commas), `label_folders`
            (cats/1.jpg), `parquet` (Parquet files here or in `data`), `metadata` (metadata.csv, .jsonl or .parquet
            beside the pictures), or `auto` to look.
        merge: in label folders, take the same file name under several labels as one picture with all of them.
        missing: with sidecars, a picture without one is an `error`, or has no label (`empty`).
        names: file of all labels in order, a JSON list or one a line; `labels.json` in the folder if there.
        image: with `parquet` and `metadata`, column of the pictures; this and what follows as in `read_table`.
        labels: column of labels.
        split_column: column of the split.
        allow_escape: accept pictures outside the folder.
    """
    folder, address = Path(location), f"folder:{location}"
    if not folder.is_dir():
        todo = f"read a table with table:{location}" if folder.is_file() else "check the location"
        raise InputError(location, "there is no such folder", todo)
    splits = _find_splits(folder)
    tables = _find_tables(folder, splits, layout)
    if tables is not None:
        options = TableOptions(
            image=image, labels=labels, names=names, split_column=split_column, allow_escape=allow_escape
        )
        return read_tables(tables, split, name=address, options=options)
    if split is not None and split not in splits:
        todo = choose_one_of(split, splits) if splits else f"put its pictures into {folder / split}"
        raise InputError(location, f"there is no split {split!r}", todo)
    pictures = _list_pictures(folder, depth=1 if splits else 0)
    paths, known = pictures.paths, find_label_names(folder, names)
    if layout == "sidecar" or (layout == "auto" and _has_sidecars(pictures, location)):
        required = None if missing == "empty" else f"{split}/" if split else ""
        found = _read_sidecars(folder, pictures, known, required=required)
    else:
        groups = _group_by_label(folder, pictures, merge=merge)
        paths, lists = list(groups), pa.chunked_array([list(groups.values())])
        found = encode_label_column(lists, known, delimiter="", name_row=lambda row: str(folder / paths[row]))
    everything = RecordSet(
        f"{address}@{split}" if split else address,
        found.space,
        images=FileStore(folder, pa.array(paths, pa.large_string())),
        positive=found.positive,
        unknown=found.unknown,
    )
    if split is None:
        return everything
    return everything.select(np.flatnonzero([path.startswith(f"{split}/") for path in paths]))


class Pictures(NamedTuple):
    """What a walk through a folder finds.

    Attributes:
        paths: the pictures, from the folder.
        texts: text files, any of which may be a picture's sidecar.
        depth: leading parts of a path that name its split.
    """

    paths: list[str]
    texts: set[str]
    depth: int


def _find_splits(folder: Path) -> list[str]:
    """Sub-folders that are splits; one with another name means that none is, for `train` is also a label."""
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    loose = any(_is_picture(entry.name) for entry in entries)
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


def _is_picture(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def _list_pictures(folder: Path, *, depth: int) -> Pictures:
    def refuse(error: OSError) -> None:
        raise InputError(str(error.filename), f"cannot be read ({error.strerror})", "check its rights") from None

    found = Pictures([], set(), depth)
    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        within = Path(place).relative_to(folder).as_posix()
        prefix = "" if within == "." else f"{within}/"
        visible = sorted(name for name in files if not name.startswith("."))
        found.paths.extend(prefix + name for name in visible if _is_picture(name))
        found.texts.update(prefix + name for name in visible if name.endswith(".txt"))
    if not found.paths:
        raise InputError(str(folder), "there is no picture in it", f"known kinds: {', '.join(IMAGE_SUFFIXES)}")
    odd = [path for path in found.paths if not path.isascii() and path.encode(errors="replace").decode() != path]
    if odd:
        raise InputError(str(folder), f"the file name {odd[0]!r} is not UTF-8", "rename it")
    return found


def _sidecar(path: str) -> str:
    return str(PurePosixPath(path).with_suffix(".txt"))


def _has_sidecars(pictures: Pictures, where: str) -> bool:
    """Whether pictures have sidecars (any) or lie in label folders (all); neither is an error."""
    if any(_sidecar(path) in pictures.texts for path in pictures.paths):
        return True
    loose = [path for path in pictures.paths if path.count("/") <= pictures.depth]
    if loose:
        wrong = f"{len(loose)} pictures have no label, e.g. {loose[0]}"
        raise InputError(where, wrong, "write a text file beside each, sort them into label folders, or use a table")
    return False


def _read_sidecars(
    folder: Path, pictures: Pictures, names: Sequence[str] | None, *, required: str | None
) -> TableLabels:
    """Labels from the text file beside each picture.

    Args:
        folder: the data set.
        pictures: its pictures.
        names: all labels in order, if known.
        required: what the paths begin with that must have a sidecar; None where none must.
    """
    sidecars = [_sidecar(path) for path in pictures.paths]
    lost = [
        path
        for path, text in zip(pictures.paths, sidecars, strict=True)
        if required is not None and text not in pictures.texts and path.startswith(required)
    ]
    if lost:
        wrong = f"{len(lost)} pictures have no text file beside them, e.g. {lost[0]}"
        todo = f"write {_sidecar(lost[0])}, or take them without labels with ?missing=empty"
        raise InputError(str(folder), wrong, todo)
    contents = [_read_sidecar(folder / text) if text in pictures.texts else "" for text in sidecars]
    values = pa.chunked_array([pa.array(contents, pa.large_string())])
    return encode_label_column(values, names, delimiter=",", name_row=lambda row: str(folder / sidecars[row]))


def _read_sidecar(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig").replace("\n", ",")
    except UnicodeDecodeError:
        raise InputError(str(path), "not UTF-8", "save the file as UTF-8") from None
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "check the file and its rights") from None


def _group_by_label(folder: Path, pictures: Pictures, *, merge: bool) -> dict[str, list[str]]:
    """Labels of each picture by the folder it lies in; a picture that several share is kept at its first place."""
    groups: dict[str, list[str]] = {}
    places: dict[tuple[str, ...], str] = {}
    for path in pictures.paths:
        parts = path.split("/", pictures.depth + 1)
        if len(parts) < pictures.depth + 2:
            raise InputError(str(folder), f"picture {path} lies in no label folder", "move it into one")
        *split, label, name = parts
        place = places.setdefault((*split, name), path) if merge else path
        if place != path and not filecmp.cmp(folder / place, folder / path, shallow=False):
            wrong = f"{place} and {path} are different pictures and cannot be merged"
            raise InputError(str(folder), wrong, "rename one of them, or leave out ?merge=true")
        groups.setdefault(place, []).append(label)
    return groups
