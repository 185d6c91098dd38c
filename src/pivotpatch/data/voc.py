"""Read PASCAL VOC 2007 and 2012, from its image sets or from the XML of each image."""

import re
from pathlib import Path
from typing import Literal, NamedTuple
from xml.etree import ElementTree as ET

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pivotpatch.data.address import Address
from pivotpatch.data.files import read_text
from pivotpatch.data.records import FileStore, LabelLists, LabelSpace, RecordSet
from pivotpatch.errors import InputError, choose_one_of, shorten

LABELS = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
_LABEL_AT = {label: place for place, label in enumerate(LABELS)}

# Every label of every image is in one of three states, numbered as the image sets number them.
_ABSENT, _DIFFICULT, _PRESENT = -1, 0, 1
# The lines of the image sets; a name has word characters only, so that none leads out of its folder.
_NAME = re.compile(r"([\w-]+)()")
_NAME_AND_STATE = re.compile(r"([\w-]+)\s+(-1|0|1)")


def read_voc(
    location: str,
    split: str | None,
    *,
    difficult: Literal["negative", "positive", "unknown"] = "negative",
    source: Literal["auto", "imagesets", "xml"] = "auto",
    drop_empty: bool = False,
) -> RecordSet:
    """Read PASCAL VOC: the 20 labels in alphabetical order, records in the order of the split's file.

    A label of which an image shows only objects marked difficult follows `difficult`; with one plain object among
    them it is present. That an image file exists is not checked here.

    Args:
        location: the folder VOCdevkit, the one above it, or one year's folder such as VOC2007.
        split: year and set, such as 2007-trainval or 2012-val; the year may be left out for one year's folder.
        difficult: what a label becomes that only difficult objects show.
        source: where the labels are read: "imagesets" from `ImageSets/Main/<label>_<set>.txt`, "xml" from
            `Annotations/`, and "auto" from the first where its files are there.
        drop_empty: leave images without a positive label out, as the paper's code does.
    """
    folder, part = _find_split(Path(location), split)
    names = list(_read_rows(folder / "ImageSets" / "Main" / f"{part}.txt", _NAME, "000005"))
    sets = [folder / "ImageSets" / "Main" / f"{label}_{part}.txt" for label in LABELS]
    use_sets = source == "imagesets" or (source == "auto" and any(path.is_file() for path in sets))
    states = _read_image_sets(sets, names) if use_sets else _read_annotations(folder, names)
    shown = states >= (_DIFFICULT if difficult == "positive" else _PRESENT)
    records = RecordSet(
        str(Address("voc", location, split)),
        LabelSpace(LABELS),
        images=FileStore(folder / "JPEGImages", pa.array([f"{name}.jpg" for name in names], pa.string())),
        positive=_pack(shown),
        unknown=_pack(states == _DIFFICULT) if difficult == "unknown" else None,
    )
    return records.select(np.flatnonzero(shown.any(1))) if drop_empty else records


def _pack(table: NDArray[np.bool_]) -> LabelLists:
    """Lists of the labels that hold in a table (N,L)."""
    rows, indices = np.nonzero(table)
    return LabelLists.from_pairs(rows, indices, count=len(table))


class _Split(NamedTuple):
    folder: Path
    part: str


def _find_split(location: Path, split: str | None) -> _Split:
    """The folder of a year and the name of the set within."""
    known: dict[str, _Split] = {}
    folders = [folder for above in (location, location / "VOCdevkit") for folder in sorted(above.glob("VOC[0-9]*"))]
    for folder in (location, *folders):
        for path in (folder / "ImageSets" / "Main").glob("*.txt"):
            if path.stem.rpartition("_")[0] not in _LABEL_AT:  # those are about one label
                known[f"{folder.absolute().name.removeprefix('VOC')}-{path.stem}"] = _Split(folder, path.stem)
                if folder == location:
                    known[path.stem] = _Split(folder, path.stem)
    if not known:
        todo = "give the folder VOCdevkit, with VOC2007/ImageSets/Main/trainval.txt and so on"
        raise InputError(str(location), "there are no image sets of VOC", todo)
    if split not in known:
        wrong = "no split is given" if split is None else f"there is no split {split!r}"
        raise InputError(str(location), wrong, choose_one_of(split or "", known))
    return known[split]


def _read_rows(path: Path, form: re.Pattern[str], example: str) -> dict[str, str]:
    """The second column of each line by the image's name in the first."""
    rows: dict[str, str] = {}
    for number, line in enumerate(read_text(path).rstrip().splitlines(), start=1):
        row = form.fullmatch(line.strip())
        if row is None or row[1] in rows:
            wrong = f"{line!r} is not like {example!r}" if row is None else f"image {row[1]!r} stands twice"
            raise InputError(f"{path}, line {number}", wrong, "correct the line")
        rows[row[1]] = row[2]
    return rows


def _read_image_sets(paths: list[Path], names: list[str]) -> NDArray[np.int8]:
    """States (N,L) from one file per label."""
    columns = []
    for path in paths:
        states = _read_rows(path, _NAME_AND_STATE, "000005 -1")
        strange = sorted(states.keys() ^ set(names))
        if strange:
            wrong = f"{shorten(strange)} in this file or in the split's list, but not in both"
            raise InputError(str(path), wrong, "copy both files from the same release, or set source=xml")
        columns.append([int(states[name]) for name in names])
    return np.array(columns, dtype=np.int8).T


def _read_annotations(folder: Path, names: list[str]) -> NDArray[np.int8]:
    """States (N,L) from one XML file per image."""
    states = np.full((len(names), len(LABELS)), _ABSENT, dtype=np.int8)
    for row, name in enumerate(names):
        path = folder / "Annotations" / f"{name}.xml"
        for thing in _parse_xml(path).iterfind("object"):
            label = (thing.findtext("name") or "").strip()
            if label not in _LABEL_AT:
                raise InputError(str(path), f"unknown label {label!r}", choose_one_of(label, LABELS))
            found = _DIFFICULT if thing.findtext("difficult", "0").strip() == "1" else _PRESENT
            column = _LABEL_AT[label]
            states[row, column] = max(states[row, column], found)
    return states


def _parse_xml(path: Path) -> ET.Element:
    text = read_text(path)
    if "<!DOCTYPE" in text:  # the one place that declares entities, which can grow to fill all memory
        raise InputError(str(path), "a DOCTYPE is not accepted", "remove it")
    try:
        return ET.fromstring(text)  # noqa: S314 (without a DOCTYPE there is nothing to expand or fetch)
    except ET.ParseError as error:
        raise InputError(str(path), f"not valid XML ({error})", "copy or download it again") from None
