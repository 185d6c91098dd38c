"""Split a data set so that every part has its share of every label, and write the split as a table.

The idea is the iterative stratification of Sechidis, Tsoumakas and Vlahavas (2011): labels are served the rarest
first, and each of their images goes to the part that still wants most of that label. Here the parts keep their
exact sizes, and a part that has none of a label yet comes first, so that rare labels reach every part.
"""

import csv
import json
import os
import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from pivotpatch.data.address import Address
from pivotpatch.data.records import FileStore, ImageSource, LabelLists, RecordSet
from pivotpatch.data.table_labels import NAMES_FILE, UNKNOWN_MARK
from pivotpatch.errors import InputError, shorten
from pivotpatch.writing import explain_disk_faults, replacing

TableFormat = Literal["parquet", "jsonl", "csv"]

_DELIMITER = "|"
_SCHEMA = pa.schema({"image": pa.string(), "labels": pa.list_(pa.string()), "split": pa.string()})
_EMBEDDED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_BATCH = 512


def split_records(
    records: RecordSet, fractions: Mapping[str, float], *, generator: np.random.Generator
) -> dict[str, NDArray[np.int64]]:
    """Split records into parts that each have their share of every label.

    Every part has its fraction of the records to within one. A label with as many images as there are parts, or
    more, is in each part wherever that was found possible. Images without any label are shared out like a label of
    their own; unknown labels count as absent.

    Args:
        records: what to split.
        fractions: the share of each part, by its name; together 1.
        generator: of the random choices.

    Returns:
        The indices of each part's records, ascending; no record is in two parts or in none.
    """
    shares = np.array(list(fractions.values()))
    if not all(re.fullmatch(r"[\w.-]+", name) for name in fractions):
        raise InputError("split", f"parts are named {shorten(fractions)}", "use letters, digits, dots and dashes")
    if not (shares > 0).all() or abs(shares.sum() - 1) > 1e-6:
        wrong = f"the fractions are {', '.join(f'{share:g}' for share in shares)}, in all {shares.sum():g}"
        raise InputError("split", wrong, "give each part more than 0, and all together 1")
    if len(records) < len(fractions):
        raise InputError("split", f"{len(records)} records cannot fill {len(fractions)} parts", "give more records")
    sizes = _share_out(len(records), shares)
    parts = _stratify(records.positive, shares, sizes=sizes, generator=generator)
    _close_gaps(parts, records, count=len(sizes))
    return {name: np.flatnonzero(parts == part) for part, name in enumerate(fractions)}


def _share_out(total: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers nearest to the shares of a total, none of them 0."""
    exact = total * shares
    sizes = np.maximum(np.floor(exact), 1).astype(np.int64)
    while (excess := int(sizes.sum()) - total) > 0:
        sizes[np.argmax(np.where(sizes > 1, sizes - exact, -np.inf))] -= 1
    while excess < 0:
        sizes[np.argmax(exact - sizes)] += 1
        excess += 1
    return sizes


def _stratify(
    positive: LabelLists,
    shares: NDArray[np.float64],
    *,
    sizes: NDArray[np.int64],
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """The part (N,) of each record."""
    no_label = (-1,)
    lists = [positive[record] or no_label for record in range(len(positive))]
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


def _close_gaps(parts: NDArray[np.int64], records: RecordSet, *, count: int) -> None:
    """Swap records of two parts, in place, where that brings a label into a part that lacks it and loses nothing."""
    rows, indices, width = records.positive.rows(), records.positive.indices, len(records.labels)
    held = np.bincount(parts[rows] * width + indices, minlength=count * width).reshape(count, width)
    needed = held.sum(axis=0) >= count
    gaps = np.argwhere((held == 0) & needed)
    if not len(gaps):
        return
    shown = (records.target() == 1).numpy().astype(np.int64)
    for part, label in gaps:
        for record in np.flatnonzero(shown[:, label]):
            home, others = parts[record], np.flatnonzero(parts == part)
            if held[part, label]:
                break
            here = held[part] + shown[record] - shown[others]
            there = held[home] - shown[record] + shown[others]
            covered = ((here > 0) & needed).sum(axis=1) + ((there > 0) & needed).sum(axis=1)
            best = int(covered.argmax())
            if covered[best] > ((held[[part, home]] > 0) & needed).sum():
                parts[record], parts[others[best]] = part, home
                held[part], held[home] = here[best], there[best]


class SplitTable(NamedTuple):
    """A split on disk: the table's file, and the address of each part."""

    path: Path
    addresses: dict[str, str]


def write_split(
    records: RecordSet, parts: Mapping[str, NDArray[np.int64]], *, folder: Path, kind: TableFormat = "parquet"
) -> SplitTable:
    """Write records and their parts as a table that `table:` reads, with `labels.json` beside it.

    Images that are files are named by their paths: from `folder` where all lie below it, else from the folder that
    holds them all, which the addresses then name. Images inside a table, or drawn on the fly, go into the new table.

    Args:
        records: the data set.
        parts: indices of the records of each part.
        folder: where to write, made if it is missing.
        kind: of table; only Parquet holds images.
    """
    _check_labels(records, kind)
    chosen = np.concatenate(list(parts.values()))
    order = np.argsort(chosen, kind="stable")
    splits = np.repeat(list(parts), [len(indices) for indices in parts.values()])[order].tolist()
    records = records.select(chosen[order])
    embedded = not isinstance(records.images, FileStore)
    if embedded and kind != "parquet":
        raise InputError(records.name, f"its images are not files, and {kind} cannot hold them", "write Parquet")
    path = folder / f"split.{kind}"
    options: dict[str, str] = {"delimiter": _DELIMITER} if kind == "csv" else {}
    with explain_disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _write_names(folder / NAMES_FILE, records.labels.names)
        with replacing(path) as written:
            if embedded:
                _write_embedded(written, records, splits)
            else:
                images, root = _relative_paths(records, folder)
                options |= {"root": root} if root else {}
                _write_paths(written, kind, images, _write_labels(records), splits)
    return SplitTable(path, {name: str(Address("table", str(path), name, options)) for name in parts})


def _check_labels(records: RecordSet, kind: TableFormat) -> None:
    for label in records.labels.names:
        if label.startswith(UNKNOWN_MARK) or (kind == "csv" and (_DELIMITER in label or label != label.strip())):
            wrong = f"label {label!r} cannot be told from the marks of a table"
            raise InputError(records.name, wrong, "rename it, or write Parquet or JSON lines if it only holds |")


def _write_names(path: Path, names: Sequence[str]) -> None:
    content = (json.dumps(names, ensure_ascii=False, indent=0) + "\n").encode()
    if path.exists() and path.read_bytes() != content:
        raise InputError(str(path), "belongs to another data set", "write the split into a folder of its own")
    with replacing(path) as written:
        written.write_bytes(content)


def _relative_paths(records: RecordSet, folder: Path) -> tuple[list[str], str | None]:
    """Paths of all images from one folder, and that folder; None for `folder` itself."""
    paths = [os.path.abspath(record.image) for record in records if isinstance(record.image, Path)]  # noqa: PTH100 (links stay)
    root = os.path.abspath(folder)  # noqa: PTH100
    if os.path.commonpath([root, *paths]) == root:
        return [os.path.relpath(path, root) for path in paths], None
    root = os.path.commonpath([os.path.dirname(path) for path in paths])  # noqa: PTH120
    return [os.path.relpath(path, root) for path in paths], root


def _write_labels(records: RecordSet) -> list[list[str]]:
    """The labels of each record as a table writes them."""
    names, unknown = records.labels.names, records.unknown or LabelLists.from_lists([()] * len(records))
    marked = [UNKNOWN_MARK + name for name in names]
    return [
        [names[i] for i in records.positive[row]] + [marked[i] for i in unknown[row]] for row in range(len(records))
    ]


def _write_paths(
    path: Path, kind: TableFormat, images: Sequence[str], labels: Sequence[list[str]], splits: Sequence[str]
) -> None:
    if kind == "parquet":
        pq.write_table(pa.table([images, labels, splits], schema=_SCHEMA), path)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = zip(images, labels, splits, strict=True)
        if kind == "csv":
            writer = csv.writer(file)
            writer.writerow(_SCHEMA.names)
            writer.writerows((image, _DELIMITER.join(held), split) for image, held, split in rows)
        else:
            file.writelines(
                json.dumps(dict(zip(_SCHEMA.names, row, strict=True)), ensure_ascii=False) + "\n" for row in rows
            )


def _write_embedded(path: Path, records: RecordSet, splits: Sequence[str]) -> None:
    """Write a table with the images in it, a batch at a time."""
    schema = _SCHEMA.set(0, pa.field("image", _EMBEDDED))
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, len(records), _BATCH):
            chosen = records[start : start + _BATCH]
            images = [{"bytes": _encode(record.image), "path": record.name} for record in chosen]
            rows = {"image": images, "labels": _write_labels(chosen), "split": splits[start:][:_BATCH]}
            writer.write_table(pa.table(rows, schema=schema))


def _encode(image: ImageSource) -> bytes:
    if isinstance(image, bytes):
        return image
    assert isinstance(image, np.ndarray)  # files are written as paths
    file = BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()
