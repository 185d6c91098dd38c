"""Labels of a table, as text, lists, numbers or one column per label, turned into lists of indices."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pivotpatch.data.files import check_name, read_json, read_text
from pivotpatch.data.records import LabelLists, LabelSpace
from pivotpatch.errors import InputError, choose_one_of

# Delimiters that are looked for where none is given, the least likely in a label's own name first.
DELIMITERS = "|;,"
UNKNOWN_MARK = "?"
NAMES_FILE = "labels.json"


class TableLabels(NamedTuple):
    """The labels of all rows of a table: what a `RecordSet` needs besides the images."""

    space: LabelSpace
    positive: LabelLists
    unknown: LabelLists | None


NameRow = Callable[[int], str]
"""Names a row for a message, by its index in the table."""


def find_label_names(folder: Path, names: str | None) -> list[str] | None:
    """Label names in order, from a JSON list or a text file with one per line.

    Args:
        folder: of the data set.
        names: the file, from `folder`; None looks for `labels.json` there.
    """
    path = folder / (names or NAMES_FILE)
    if names is None and not path.is_file():
        return None
    if path.suffix.lower() != ".json":
        return [line.strip() for line in read_text(path).split("\n") if line.strip()]
    listed = read_json(path)
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise InputError(str(path), "it is not a JSON list of label names", 'write ["cat", "dog"], or give ?names=FILE')
    return listed


def class_label_names(schema: pa.Schema, column: str) -> list[str] | None:
    """Names of numbered labels as Hugging Face writes them into a Parquet file."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]
        feature = feature[0] if isinstance(feature, list) else feature
        names = feature.get("feature", feature)["names"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # another kind of column
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def encode_label_column(
    values: pa.ChunkedArray, names: Sequence[str] | None, *, delimiter: str | None, name_row: NameRow
) -> TableLabels:
    """Labels from one column.

    Args:
        values: text of delimited labels, lists of labels, or (lists of) numbers of labels.
        names: all labels in order; None takes those that occur, sorted.
        delimiter: stands between the labels of a text; None finds it out, "" takes the whole text as one label.
        name_row: names a row for messages.
    """
    is_text = _is_text(values.type) or pa.types.is_null(values.type)
    rows, flat = _flatten(pc.fill_null(values.cast(pa.large_string()), "") if is_text else values, delimiter, name_row)
    coded = flat.dictionary_encode()
    codes, pieces = coded.indices.to_numpy(), coded.dictionary.to_pylist()

    def name_piece(code: int) -> str:
        return name_row(int(rows[np.argmax(codes == code)]))

    if pa.types.is_integer(flat.type):
        pieces = _name_numbers(pieces, names, name_piece)
    written = [_read_label(piece, strip=is_text) for piece in pieces]
    gap = ("", False) if is_text else None  # a place between two delimiters that holds no label
    if names is None:
        names = sorted({entry[0] for entry in written if entry != gap})
    index = {label: place for place, label in enumerate(names)}
    for code, entry in enumerate(written):
        if entry == gap:
            continue
        label = entry[0]
        if not label.strip() or not label.isprintable():  # the label space would refuse it too, but cannot tell the row
            check_name(label, where=name_piece(code))
        if label not in index:
            raise InputError(name_piece(code), f"unknown label {label!r}", choose_one_of(label, names))
    ids = np.array([index.get(label, -1) for label, _ in written], dtype=np.int64)[codes]
    unknown = np.array([unknown for _, unknown in written], dtype=bool)[codes]
    space = LabelSpace(tuple(names))
    return _pack(space, rows, ids, present=~unknown & (ids >= 0), unknown=unknown, count=len(values), name_row=name_row)


def encode_label_columns(columns: Mapping[str, pa.ChunkedArray], *, name_row: NameRow) -> TableLabels:
    """Labels from one column each: 1 present, 0 absent; -1, nothing and not-a-number are unknown."""
    space = LabelSpace(tuple(columns))
    count = len(columns[space.names[0]])
    states = np.empty((count, len(space)), dtype=np.int8)
    for place, (name, values) in enumerate(columns.items()):
        if pa.types.is_null(values.type) or pa.types.is_nested(values.type):  # nothing in any row, or no number
            texts = [None if value is None else str(value) for value in values.to_pylist()]
            values = pa.chunked_array([pa.array(texts, pa.string())])
        coded = values.combine_chunks().dictionary_encode()
        # A null has no code; the last place of the table of states stands for it.
        codes = pc.fill_null(coded.indices, len(coded.dictionary)).to_numpy(zero_copy_only=False)
        known = [_read_state(value) for value in coded.dictionary.to_pylist()]
        if None in known:
            code = known.index(None)
            wrong = f"no column of labels was found, and column {name!r} is not one of 0, 1 and -1: it holds "
            todo = "give ?labels=COLUMN, or a file that lists the 0/1 columns with ?names=FILE"
            value = repr(coded.dictionary[code].as_py())[:40]
            raise InputError(name_row(int(np.argmax(codes == code))), wrong + value, todo)
        states[:, place] = np.array([*known, -1], dtype=np.int8)[codes]
    rows, ids = np.nonzero(states)
    present = states[rows, ids] == 1
    return _pack(space, rows, ids, present=present, unknown=~present, count=count, name_row=name_row)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _flatten(values: pa.ChunkedArray, delimiter: str | None, name_row: NameRow) -> tuple[NDArray[np.int64], pa.Array]:
    """The single labels of all rows, and the row of each."""
    if _is_text(values.type):
        if delimiter is None:
            delimiter = next((d for d in DELIMITERS if pc.any(pc.match_substring(values, d)).as_py()), "")
        if delimiter:
            values = pc.split_pattern(values, pattern=delimiter)
    rows, flat = np.arange(len(values)), values
    is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
    if is_list or pa.types.is_fixed_size_list(values.type):
        lengths = pc.list_value_length(values)
        _refuse_null(lengths, rows, name_row)
        rows, flat = np.repeat(rows, lengths.to_numpy()), pc.list_flatten(values)
    if pa.types.is_null(flat.type):  # every list is empty
        flat = flat.cast(pa.string())
    if not (_is_text(flat.type) or pa.types.is_integer(flat.type)):
        raise InputError(name_row(0), f"labels are of type {values.type}", "write text, lists of text, or 0/1 columns")
    _refuse_null(flat, rows, name_row)
    return rows, flat.combine_chunks()


def _refuse_null(values: pa.ChunkedArray, rows: NDArray[np.int64], name_row: NameRow) -> None:
    if values.null_count:
        row = int(rows[np.flatnonzero(values.is_null().to_numpy())[0]])
        raise InputError(name_row(row), "a label is missing (null)", "write an empty list where no label is present")


def _name_numbers(numbers: Sequence[int], names: Sequence[str] | None, name_piece: NameRow) -> list[str]:
    for code, number in enumerate(numbers):
        if names is None or not 0 <= number < len(names):
            wrong = f"label number {number} " + (
                "has no name" if names is None else f"is outside 0 to {len(names) - 1}"
            )
            raise InputError(name_piece(code), wrong, "give the names of all labels in order with ?names=FILE")
    return [(names or ())[number] for number in numbers]


def _read_label(piece: str, *, strip: bool) -> tuple[str, bool]:
    """A label as written, and whether it is marked as unknown."""
    piece = piece.strip() if strip else piece
    label = piece.removeprefix(UNKNOWN_MARK)
    return (label.strip() if strip else label), label != piece


def _read_state(value: object) -> int | None:
    """1 present, 0 absent, -1 unknown, None for what says none of them."""
    if isinstance(value, str):
        value = {"": "nan", "true": "1", "false": "0"}.get(value.strip().lower(), value)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    if math.isnan(number):
        return -1
    return int(number) if number in (-1, 0, 1) else None


def _pack(
    space: LabelSpace,
    rows: NDArray[np.int64],
    ids: NDArray[np.int64],
    *,
    present: NDArray[np.bool_],
    unknown: NDArray[np.bool_],
    count: int,
    name_row: NameRow,
) -> TableLabels:
    """Lists of the labels that are present and unknown, each label once per row and in order."""
    keys = rows * len(space) + ids
    both = np.intersect1d(keys[present], keys[unknown]) if unknown.any() else ids[:0]
    if both.size:
        row, label = divmod(int(both[0]), len(space))
        wrong = f"label {space.names[label]!r} is both present and unknown"
        raise InputError(name_row(row), wrong, f"write it with or without {UNKNOWN_MARK}")
    lists = [LabelLists.from_pairs(rows[kept], ids[kept], count=count) for kept in (present, unknown)]
    return TableLabels(space, lists[0], lists[1] if unknown.any() else None)
