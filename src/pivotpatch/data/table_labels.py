"""Labels of a table, as text, lists, numbers or one column a label, turned into lists of indices."""

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
    """The labels of all rows of a table: what a `RecordSet` needs besides the pictures."""

    space: LabelSpace
    positive: LabelLists
    unknown: LabelLists | None


NameRow = Callable[[int], str]
"""Names a row for a message, by its index in the table."""


def read_label_names(path: Path) -> list[str]:
    """Label names in order, from a JSON list or a text file with one on each line."""
    if path.suffix.lower() != ".json":
        return [line.strip() for line in read_text(path).split("\n") if line.strip()]
    names = read_json(path)
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        raise InputError(str(path), "it is not a JSON list of label names", 'write ["cat", "dog"], or give ?names=FILE')
    return names


def find_label_names(folder: Path, names: str | None) -> list[str] | None:
    """Label names from a file that the user names, or from `labels.json` in the data set's folder if it is there."""
    if names is not None:
        return read_label_names(folder / names)
    return read_label_names(folder / NAMES_FILE) if (folder / NAMES_FILE).is_file() else None


def class_label_names(schema: pa.Schema, column: str) -> list[str] | None:
    """Names of numbered labels as Hugging Face writes them into a Parquet file."""
    noted = (schema.metadata or {}).get(b"huggingface")
    if noted is None:
        return None
    try:
        feature = json.loads(noted)["info"]["features"][column]
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
    count, is_text = len(values), _is_text(values.type) or pa.types.is_null(values.type)
    rows, flat = _flatten(pc.fill_null(values.cast(pa.large_string()), "") if is_text else values, delimiter, name_row)
    coded = flat.dictionary_encode()
    codes, pieces = coded.indices.to_numpy(), coded.dictionary.to_pylist()

    def name_piece(code: int) -> str:
        return name_row(int(rows[np.argmax(codes == code)]) if len(rows) else 0)

    if pa.types.is_integer(flat.type):
        written = [(label, False) for label in _name_numbers(pieces, names, name_piece)]
    else:
        written = [_label_of_text(piece, strip=is_text) for piece in pieces]
        for code, (label, _) in enumerate(written):
            if label and not label.isprintable():  # the label space would refuse it too, but cannot tell the row
                check_name(label, where=name_piece(code))
    space = LabelSpace(tuple(sorted({label for label, _ in written if label}) if names is None else names))
    index = {label: i for i, label in enumerate(space.names)}
    for code, (label, unknown) in enumerate(written):
        if not label and (unknown or not is_text):
            raise InputError(name_piece(code), f"label {pieces[code]!r} has no name", "give it one or leave it out")
        if label and label not in index:
            raise InputError(name_piece(code), f"unknown label {label!r}", choose_one_of(label, space.names))
    # A place between two delimiters holds no label: index -1.
    ids = np.array([index.get(label, -1) for label, _ in written], dtype=np.int64)[codes]
    unknown = np.array([unknown for _, unknown in written], dtype=bool)[codes]
    return _pack(space, rows, ids, present=~unknown & (ids >= 0), unknown=unknown, count=count, name_row=name_row)


def encode_label_columns(columns: Mapping[str, pa.ChunkedArray], *, name_row: NameRow) -> TableLabels:
    """Labels from one column each: 1 present, 0 absent; -1, nothing and not-a-number are unknown."""
    for name in columns:
        if not name.strip():
            raise InputError(name_row(0), f"a column of labels is named {name!r}", "name it or leave it out")
    space = LabelSpace(tuple(columns))
    count = len(columns[space.names[0]])
    states = np.empty((count, len(space)), dtype=np.int8)
    for i, (name, values) in enumerate(columns.items()):
        if pa.types.is_nested(values.type):
            raise _not_hot(name_row(0), name, f"{values.type}")
        if pa.types.is_null(values.type):  # nothing in any row
            values = values.cast(pa.string())
        coded = values.combine_chunks().dictionary_encode()
        # A null has no code; the last place of the table of states stands for it.
        codes = pc.fill_null(coded.indices, len(coded.dictionary)).to_numpy(zero_copy_only=False)
        known = [_state(value) for value in coded.dictionary.to_pylist()]
        if None in known:
            code = known.index(None)
            raise _not_hot(name_row(int(np.argmax(codes == code))), name, repr(coded.dictionary[code].as_py()))
        states[:, i] = np.array([*known, -1], dtype=np.int8)[codes]
    rows, ids = np.nonzero(states)
    present = states[rows, ids] == 1
    return _pack(space, rows, ids, present=present, unknown=~present, count=count, name_row=name_row)


def _not_hot(where: str, column: str, value: str) -> InputError:
    wrong = f"no column of labels was found, and column {column!r} is not one of 0, 1 and -1: it holds {value[:40]}"
    return InputError(where, wrong, "give ?labels=COLUMN, or a file that lists the 0/1 columns with ?names=FILE")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _flatten(values: pa.ChunkedArray, delimiter: str | None, name_row: NameRow) -> tuple[NDArray[np.int64], pa.Array]:
    """The single labels of all rows, and the row of each."""
    if _is_text(values.type):
        if delimiter is None:
            delimiter = next((d for d in DELIMITERS if pc.any(pc.match_substring(values, d)).as_py()), "")
        if delimiter:
            values = pc.split_pattern(values, pattern=delimiter)
    if _is_list(values.type):
        lengths = pc.list_value_length(values)
        _refuse_null(lengths, np.arange(len(values)), name_row, "write an empty list where no label is present")
        rows, flat = np.repeat(np.arange(len(values)), lengths.to_numpy()), pc.list_flatten(values)
    else:
        rows, flat = np.arange(len(values)), values
    if pa.types.is_null(flat.type):  # every list is empty
        flat = flat.cast(pa.string())
    if not (_is_text(flat.type) or pa.types.is_integer(flat.type)):
        raise InputError(name_row(0), f"labels are of type {values.type}", "write text, lists of text, or 0/1 columns")
    _refuse_null(flat, rows, name_row, "leave out what is no label")
    return rows, flat.combine_chunks()


def _refuse_null(values: pa.ChunkedArray, rows: NDArray[np.int64], name_row: NameRow, todo: str) -> None:
    if values.null_count:
        row = int(rows[np.flatnonzero(values.is_null().to_numpy())[0]])
        raise InputError(name_row(row), "a label is missing (null)", todo)


def _name_numbers(numbers: Sequence[int], names: Sequence[str] | None, name_piece: NameRow) -> list[str]:
    if names is None:
        raise InputError(name_piece(0), "labels are numbers", "give their names in order with ?names=FILE")
    for code, number in enumerate(numbers):
        if not 0 <= number < len(names):
            wrong = f"label number {number} is outside 0 to {len(names) - 1}"
            raise InputError(name_piece(code), wrong, "correct it, or the file of names")
    return [names[number] for number in numbers]


def _label_of_text(piece: str, *, strip: bool) -> tuple[str, bool]:
    """A label as written, and whether it is marked as unknown."""
    piece = piece.strip() if strip else piece
    label = piece.removeprefix(UNKNOWN_MARK)
    return (label.strip() if strip or not label.strip() else label), label != piece


def _state(value: object) -> int | None:
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
    """Lists of the labels that are present and unknown, each label once a row and in order."""
    keys = rows * len(space) + ids
    positive, unsure = _sort_once(keys[present]), _sort_once(keys[unknown])
    both = np.intersect1d(positive, unsure, assume_unique=True) if unsure.size else unsure
    if both.size:
        row, label = divmod(int(both[0]), len(space))
        wrong = f"label {space.names[label]!r} is both present and unknown"
        raise InputError(name_row(row), wrong, f"write it with or without {UNKNOWN_MARK}")
    lists = [_to_lists(keys, len(space), count) for keys in (positive, unsure)]
    return TableLabels(space, lists[0], lists[1] if unsure.size else None)


def _sort_once(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    # Not np.unique: keys are almost in order already, which a stable sort uses and hashing does not.
    keys = np.sort(keys, kind="stable")
    return keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if keys.size else keys


def _to_lists(keys: NDArray[np.int64], labels: int, count: int) -> LabelLists:
    return LabelLists(np.searchsorted(keys, np.arange(count + 1) * labels), (keys % labels).astype(np.int32))
