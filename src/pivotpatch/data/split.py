"""Split a data set so that every part has its share of every label, and write the split as a table.

After the iterative stratification of Sechidis, Tsoumakas and Vlahavas (2011), with parts of exact sizes.
"""

import filecmp
import json
import os
import re
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from pivotpatch.data.address import Address
from pivotpatch.data.records import FileStore, ImageSource, RecordSet
from pivotpatch.data.table import NAMES_FILE, UNKNOWN_MARK
from pivotpatch.errors import InputError, shorten
from pivotpatch.runtime.files import MAY_ESCAPE
from pivotpatch.writing import explain_disk_faults, replacing

_EMBEDDED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_BATCH = 512


def split_records(
    records: RecordSet, fractions: Mapping[str, float], *, generator: np.random.Generator
) -> dict[str, NDArray[np.int64]]:
    """Split records into parts that each have their share of every label; returns each part's indices, ascending.

    Every part has its fraction of the records to within one, and at least one. Images without any label are shared out
    like a label of their own; unknown labels count as absent.

    Args:
        records: what to split.
        fractions: the share of each part, by its name; together 1.
        generator: of the random choices.
    """
    shares = np.array(list(fractions.values()))
    if not all(re.fullmatch(r"[\w.-]+", name) for name in fractions):
        raise InputError("split", f"parts are named {shorten(fractions)}", "use letters, digits, dots and dashes")
    if not (shares > 0).all() or abs(shares.sum() - 1) > 1e-6 or len(records) < len(fractions):
        told = ", ".join(f"{share:g}" for share in shares)
        wrong = f"{len(records)} records cannot be split into {told}, in all {shares.sum():g}"
        raise InputError("split", wrong, "give each part more than 0, all together 1, and a record for each")
    sizes = np.maximum(np.diff(np.rint(len(records) * np.cumsum(shares)), prepend=0).astype(np.int64), 1)
    while sizes.sum() > len(records):
        sizes[sizes.argmax()] -= 1
    parts = _stratify(records, shares, sizes=sizes, generator=generator)
    return {name: np.flatnonzero(parts == part) for part, name in enumerate(fractions)}


def _stratify(
    records: RecordSet,
    shares: NDArray[np.float64],
    *,
    sizes: NDArray[np.int64],
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """The part (N,) of each record: the rarest label first, to the part that has none or still wants most of it."""
    no_label = [-1]
    lists = [held or no_label for held in (records.states > 0).tolil().rows.tolist()]
    members: dict[int, list[int]] = {}
    for record in generator.permutation(len(lists)).tolist():
        for label in lists[record]:
            members.setdefault(label, []).append(record)
    everywhere, room, lots = range(len(sizes)), sizes.tolist(), generator.random((len(lists), len(sizes))).tolist()
    wanted = {label: (len(held) * shares).tolist() for label, held in members.items()}
    lacking = {label: [len(held) >= len(sizes)] * len(sizes) for label, held in members.items()}
    left = {label: len(held) for label, held in members.items()}
    parts = [-1] * len(lists)
    while left:
        label = min(left, key=lambda name: (left[name], name))
        lacks, wants = lacking[label], wanted[label]
        for record in members[label]:
            if parts[record] >= 0:
                continue
            lot = lots[record]
            *_, part = max((lacks[p], wants[p], room[p], lot[p], p) for p in everywhere if room[p])
            parts[record] = part
            room[part] -= 1
            for other in lists[record]:
                wanted[other][part] -= 1
                lacking[other][part] = False
                left[other] -= 1
        left = {other: count for other, count in left.items() if count}
    return np.array(parts, dtype=np.int64)


def write_split(records: RecordSet, parts: Mapping[str, NDArray[np.int64]], *, folder: Path) -> dict[str, str]:
    """Write records and the indices of their parts as a Parquet table, and `labels.json`; the address of each part.

    Images that are files are named as they are in `records`; the addresses name the folder that holds them. Images
    inside a table, or drawn on the fly, go into the new table.
    """
    images, names = records.images, records.labels.names
    for label in names:
        if label.startswith(UNKNOWN_MARK) or label != label.strip():
            raise InputError(records.name, f"label {label!r} cannot be told from the marks of a table", "rename it")
    listed = (json.dumps(names, ensure_ascii=False, indent=0) + "\n").encode()
    labels_file, path = folder / NAMES_FILE, folder / "split.parquet"
    if labels_file.exists() and labels_file.read_bytes() != listed:
        raise InputError(str(labels_file), "belongs to another data set", "write the split into a folder of its own")
    options = {}
    if isinstance(images, FileStore):
        options["root"] = os.path.abspath(images.root)  # noqa: PTH100 (links stay)
        if any(MAY_ESCAPE.search(images.name(index)) for index in range(len(images))):
            options["allow_escape"] = "true"
    chosen = np.concatenate(list(parts.values()))
    order = np.argsort(chosen, kind="stable")
    splits = np.repeat(list(parts), [len(indices) for indices in parts.values()])[order]
    with explain_disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(labels_file) as written:
            written.write_bytes(listed)
        with replacing(path) as written:
            _write_table(written, records.select(chosen[order]), splits)
            if path.exists() and not filecmp.cmp(path, written, shallow=False):  # runs may have been trained on it
                raise InputError(str(path), "holds another split", "remove it, or write into a folder of its own")
    return {name: str(Address("table", str(path), name, options)) for name in parts}


def _write_table(path: Path, records: RecordSet, splits: NDArray[np.str_]) -> None:
    """Write a table a batch at a time, for it may have the images in it."""
    names, files = records.labels.names, isinstance(records.images, FileStore)
    image = pa.string() if files else _EMBEDDED
    schema = pa.schema({"image": image, "labels": pa.list_(pa.string()), "split": pa.string()})
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, len(records), _BATCH):
            held = list(records[start : start + _BATCH])
            images = [r.name if files else {"bytes": _encode(r.image), "path": r.name} for r in held]
            labels = [[names[i] for i in r.positive] + [UNKNOWN_MARK + names[i] for i in r.unknown] for r in held]
            writer.write_table(pa.table([images, labels, splits[start : start + _BATCH].tolist()], schema=schema))


def _encode(image: ImageSource) -> bytes:
    if isinstance(image, bytes):
        return image
    assert isinstance(image, np.ndarray)  # files are written as paths
    file = BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()
