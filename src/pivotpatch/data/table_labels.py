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
from pivotpatch.errors import InputError, choose_one_of, quote

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
        pieces = _name_numbers(pieces, names or (), name_piece)
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
    there = ids >= 0
    return _pack(tuple(names), rows[there], ids[there], unknown=unknown[there], count=len(values), name_row=name_row)


def encode_label_columns(columns: Mapping[str, pa.ChunkedArray], *, name_row: NameRow) -> TableLabels:
    """Labels from one column each: 1 present, 0 absent; -1, nothing and not-a-number are unknown."""
    count = len(next(iter(columns.values())))
    states = np.empty((count, len(columns)), dtype=np.int8)
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
            held = quote(coded.dictionary[code].as_py())
            wrong = f"no column of labels was found, and column {name!r} is not one of 0, 1 and -1: it holds {held}"
            todo = "give ?labels=COLUMN, or a file that lists the 0/1 columns with ?names=FILE"
            raise InputError(name_row(int(np.argmax(codes == code))), wrong, todo)
        states[:, place] = np.array([*known, -1], dtype=np.int8)[codes]
    rows, ids = np.nonzero(states)
    return _pack(tuple(columns), rows, ids, unknown=states[rows, ids] < 0, count=count, name_row=name_row)


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
    missing = flat.is_null().to_numpy()
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or pa.types.is_fixed_size_list(values.type):
        rows, flat = pc.list_parent_indices(values).to_numpy(), pc.list_flatten(values)
        missing[rows[flat.is_null().to_numpy()]] = True
    if missing.any():
        where, todo = name_row(int(missing.argmax())), "write an empty list where no label is present"
        raise InputError(where, "a label is missing (null)", todo)
    if pa.types.is_null(flat.type):  # every list is empty
        flat = flat.cast(pa.string())
    if not (_is_text(flat.type) or pa.types.is_integer(flat.type)):
        raise InputError(name_row(0), f"labels are of type {values.type}", "write text, lists of text, or 0/1 columns")
    return rows, flat.combine_chunks()


def _name_numbers(numbers: Sequence[int], names: Sequence[str], name_piece: NameRow) -> list[str]:
    for code, number in enumerate(numbers):
        if not 0 <= number < len(names):
            wrong = f"label number {number} has no name among {len(names)}"
            raise InputError(name_piece(code), wrong, "give the names of all labels in order with ?names=FILE")
    return [names[number] for number in numbers]


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
    names: tuple[str, ...],
    rows: NDArray[np.int64],
    ids: NDArray[np.int64],
    *,
    unknown: NDArray[np.bool_],
    count: int,
    name_row: NameRow,
) -> TableLabels:
    """Lists of the labels that are present and unknown, each label once per row and in order."""
    keys = rows * len(names) + ids
    both = np.intersect1d(keys[~unknown], keys[unknown]) if unknown.any() else keys[:0]
    if both.size:
        row, label = divmod(int(both[0]), len(names))
        wrong = f"label {names[label]!r} is both present and unknown"
        raise InputError(name_row(row), wrong, f"write it with or without {UNKNOWN_MARK}")
    present, unsure = (LabelLists.from_pairs(rows[kept], ids[kept], count=count) for kept in (~unknown, unknown))
    return TableLabels(LabelSpace(names), present, unsure if unknown.any() else None)
