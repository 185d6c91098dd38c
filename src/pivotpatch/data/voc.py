"""Read PASCAL VOC 2007 and 2012 from its image sets."""

import re
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_array

from pivotpatch.data.address import choose_split
from pivotpatch.data.records import FileStore, LabelSpace, RecordSet
from pivotpatch.errors import InputError
from pivotpatch.runtime.files import read_text

LABELS = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip

# A line of the image sets; a name has word characters only, so that none leads out of its folder.
_LINE = re.compile(r"([\w-]+)(?:\s+(-1|0|1))?")


def read_voc(
    location: str,
    split: str | None,
    *,
    difficult: Literal["negative", "positive", "unknown"] = "negative",
    drop_empty: bool = False,
) -> RecordSet:
    """Read PASCAL VOC: the 20 labels in alphabetical order, records in the order of the split's file.

    Labels come from `ImageSets/Main/<label>_<set>.txt`. That an image file exists is not checked here.

    Args:
        location: the folder VOCdevkit, the one above it, or one year's folder such as VOC2007.
        split: year and set, such as 2007-trainval or 2012-val; the year may be left out for one year's folder.
        difficult: what a label becomes that only objects marked difficult show.
        drop_empty: leave images without a positive label out, as the paper's code does.
    """
    listed = _find_list(Path(location), split)
    names = list(_read_set(listed))
    # The image sets say 0 of a label that only difficult objects show.
    states_of = {"-1": 0, "0": {"negative": 0, "positive": 1, "unknown": -1}[difficult], "1": 1}
    states = np.empty((len(names), len(LABELS)), dtype=np.int8)
    for place, label in enumerate(LABELS):
        path = listed.with_name(f"{label}_{listed.name}")
        if not path.is_file():
            wrong = f"of PASCAL's 20 labels {label} is not there, and others cannot be read"
            raise InputError(str(path), wrong, "copy the whole release, or make a table of your own labels")
        held = _read_set(path)
        if held.keys() != set(names) or "" in held.values():
            wrong = f"it does not say -1, 0 or 1 of each image of {listed.name} and of no other"
            raise InputError(str(path), wrong, "copy both files from the same release")
        states[:, place] = [states_of[held[name]] for name in names]
    folder = listed.parents[2] / "JPEGImages"
    images = FileStore(folder, pa.array([f"{name}.jpg" for name in names], pa.string()))
    records = RecordSet(location, LabelSpace(LABELS), images=images, states=csr_array(states))
    return records.select(np.flatnonzero((states == 1).any(1))) if drop_empty else records


def _find_list(location: Path, split: str | None) -> Path:
    """The file that lists the images of a split."""
    known: dict[str, Path] = {}
    folders = [folder for above in (location, location / "VOCdevkit") for folder in sorted(above.glob("VOC[0-9]*"))]
    for folder in (location, *folders):
        for path in (folder / "ImageSets" / "Main").glob("*.txt"):
            if path.stem.rpartition("_")[0] not in LABELS:  # those are about one label
                known[f"{folder.absolute().name.removeprefix('VOC')}-{path.stem}"] = path
                if folder == location:
                    known[path.stem] = path
    todo = "give the folder VOCdevkit, with VOC2007/ImageSets/Main/trainval.txt and so on"
    return known[choose_split(split, known, where=str(location), todo=todo)]


def _read_set(path: Path) -> dict[str, str]:
    """What an image set says of each image; nothing where it lists images alone."""
    lines = read_text(path).rstrip().splitlines()
    rows = {row[1]: row[2] or "" for line in lines if (row := _LINE.fullmatch(line.strip()))}
    if len(rows) < len(lines):
        wrong = "a line is not like '000005' or '000005 -1', or an image stands twice"
        raise InputError(str(path), wrong, "copy the file again")
    return rows
