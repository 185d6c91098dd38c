"""Data sets in tables: CSV, TSV, JSON lines and Parquet, with paths to images or the images themselves."""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy.sparse import csr_array

from pivotpatch.data.address import choose_split
from pivotpatch.data.records import FileStore, ImageStore, LabelSpace, RecordSet, pack_states
from pivotpatch.data.table_files import (
    EmbeddedStore,
    TableFiles,
    check_columns,
    find_tables,
    join_tables,
    read_columns,
    read_schema,
)
from pivotpatch.errors import InputError, choose_one_of, cut, quote, shorten
from pivotpatch.runtime.files import MAY_ESCAPE, read_names, resolve_inside
from pivotpatch.runtime.packed import find_fields

# Columns that are taken unasked, the first that is there; case, blanks and underscores do not matter.
IMAGE_COLUMNS = (
    "image", "img", "imagepath", "imgpath", "filepath", "filename", "path", "file", "imagefile", "imagename", "picture",
)  # fmt: skip
LABEL_COLUMNS = ("labels", "label", "tags", "tag", "categories", "category", "classes", "class")
SPLIT_COLUMN = "split"
# Delimiters that are looked for where none is given, the least likely in a label's own name first.
DELIMITERS = "|;,"
UNKNOWN_MARK = "?"
NAMES_FILE = "labels.json"
# What a column of one label may say.
_STATES = {"1": 1, "1.0": 1, "true": 1, "0": 0, "0.0": 0, "false": 0}
_STATES |= dict.fromkeys(("-1", "-1.0", "", "nan"), -1)
_WRITTEN_LIST = r"(?s)^\s*(\[.*\]\s*)?$"
_TEXT = (pa.large_string(), pa.string(), pa.null())
NameRow = Callable[[int], str]
"""Names a row for a message, by its index in the table."""


def read_table(
    location: str | TableFiles,
    split: str | None,
    *,
    image: str | None = None,
    labels: str | None = None,
    delimiter: str | None = None,
    names: str | None = None,
    split_column: str | None = None,
    root: str | None = None,
    allow_escape: bool = False,
) -> RecordSet:
    """Read a table of images and labels.

    Labels are one column, of delimited text or of lists, where `?cat` is unknown; or one column each: 1 present, 0
    absent, -1 or nothing unknown. The label space is that of the whole table, so that splits agree. A row that
    repeats an earlier one is dropped, which the records' `notes` say.

    Args:
        location: a CSV, TSV, JSON lines or Parquet file, a folder of Parquet files, or a glob pattern.
        split: rows to take, by the split column or by the files' names (`train-00000-of-00004.parquet`); None: all.
        image: column of paths or of encoded images; found by its name if not given.
        labels: column of labels; found by its name. Where there is none, all other columns are labels, or `names`.
        delimiter: stands between labels in a text; `|`, `;` or `,` is found if not given. Empty: one label per text.
        names: file of all labels in order, a JSON list or one per line; `labels.json` beside the table if there.
        split_column: column of the split, `split` if not given.
        root: folder that paths of images start from, that of the table if not given.
        allow_escape: accept images outside the root.
    """
    tables = find_tables(location) if isinstance(location, str) else location
    paths = list(tables.splits)
    schema = read_schema(paths[0])
    check_columns(str(paths[0]), (name for name in (image, labels, split_column) if name is not None), schema.names)
    image = image or find_column(IMAGE_COLUMNS, schema.names)
    if image is None:
        wrong = f"no column of images among {shorten(schema.names, limit=5)}"
        raise InputError(str(paths[0]), wrong, f"name it with ?image=COLUMN, as in {paths[0]}?image={schema.names[0]}")
    split_column = split_column or find_column((SPLIT_COLUMN,), schema.names)
    known, found = find_label_names(tables.folder, names), find_column(LABEL_COLUMNS, schema.names)
    guessed = labels is None and found is not None and found not in (known or ())  # else it is one of the labels
    labels = found if guessed else labels
    if labels is not None:
        of_labels, known = [labels], _class_names(schema, labels) if known is None else known
    elif known is not None:
        of_labels = known
    else:  # a column that only some files have is an error where it is read
        every = dict.fromkeys((*schema.names, *(name for path in paths[1:] for name in read_schema(path).names)))
        of_labels = [name for name in every if name not in (image, split_column)]
    if not of_labels:
        wrong = f"no column of labels beside {image!r}"
        raise InputError(str(paths[0]), wrong, "name it with ?labels=COLUMN, or add it")
    pixels, named = find_fields(schema, image)
    wanted = [name for name in (named, *of_labels, split_column) if name is not None]  # one may be called ""
    pieces = [read_columns(path, wanted) for path in paths]
    rows = _Rows(join_tables(pieces, where=tables.where), tables, np.cumsum([0, *map(len, pieces)]))
    if labels is None:
        space, states = _encode_label_columns(rows.table.select(of_labels), name_row=rows.name)
    else:
        space, states = encode_label_column(rows.table[labels], known, delimiter=delimiter, name_row=rows.name)
    splits = _read_splits(rows, split_column)
    if split is not None:
        todo = f"leave out @{split}, or name a column of splits with ?split_column=COLUMN"
        choose_split(split, {*splits.tolist()} - {""}, where=tables.where, todo=todo)
    kept = chosen = np.arange(len(splits)) if split is None else np.flatnonzero(splits == split)
    images: ImageStore
    if pixels is None:
        images = _image_files(rows, image, root=root, allow_escape=allow_escape)
        kept = _drop_twins(images, states, splits, chosen=chosen, where=tables.where)
    else:
        images = EmbeddedStore(paths, pixels, names=None if named is None else _read_paths(rows, image))
    dropped, parts = len(chosen) - len(kept), Counter(splits[splits != ""].tolist())
    notes = list[str]()
    if dropped:
        notes.append(f"{tables.where}: {dropped:,} of {len(chosen):,} rows repeat an earlier one and were dropped")
    if split is None and len(parts) > 1:
        counts = ", ".join(f"{name} {count:,}" for name, count in parts.items())
        notes.append(f"{tables.where}: its splits are taken together ({counts}); @{next(iter(parts))} takes one")
    unread = [name for name in schema.names if name not in (image, labels, split_column)]
    if guessed and unread and space.names and {*space.names} <= _STATES.keys():
        taken = f"column {labels!r} is taken for the labels and holds {shorten(space.names)} alone"
        todo = "if each column is a label, rename it or list all of them in ?names=FILE"
        notes.append(f"{tables.where}: {taken}; not read: {shorten(unread)}; {todo}")
    if labels is not None and delimiter is None and rows.table[labels].type in _TEXT:
        notes += _doubt_delimiter(tables.where, space.names)
    records = RecordSet(tables.where, space, images=images, states=states, notes=tuple(notes))
    return records if len(kept) == len(records) else records.select(kept)


class _Rows(NamedTuple):
    """All rows of a table, and where each file's rows begin."""

    table: pa.Table
    tables: TableFiles
    starts: NDArray[np.int64]

    def name(self, row: int) -> str:
        """Names a row for a message, as a spreadsheet counts: a CSV file's header is its row 1."""
        at = int(np.searchsorted(self.starts, row, side="right")) - 1
        path = list(self.tables.splits)[at]
        return f"{path}, row {row - self.starts[at] + (2 if path.suffix.lower() in ('.csv', '.tsv') else 1)}"


def find_column(known: Sequence[str], columns: Sequence[str]) -> str | None:
    """The column that has the first of some names; case, blanks and underscores do not matter.

    >>> find_column(("image", "filename"), ["File Name", "cat"])
    'File Name'
    """
    plain = {re.sub(r"[\s_-]", "", column).lower(): column for column in reversed(columns)}
    return next((plain[name] for name in known if name in plain), None)


def _read_splits(rows: _Rows, column: str | None) -> NDArray[np.str_]:
    """The split of each row: by its column, else by the files' names."""
    if column is not None:
        return np.array(["" if value is None else str(value) for value in rows.table[column].to_pylist()])
    return np.repeat([name or "" for name in rows.tables.splits.values()], np.diff(rows.starts))


def _read_paths(rows: _Rows, image: str) -> pa.Array:
    """Paths or names of the images, as text with long offsets, so that any number fits in one array."""
    values = rows.table[image]
    values = pc.struct_field(values, "path") if pa.types.is_struct(values.type) else values
    if values.type not in _TEXT:
        wrong = f"column {image!r} holds {values.type}, neither paths nor encoded images"
        raise InputError(rows.tables.where, wrong, "name the right one with ?image=COLUMN")
    return values.cast(pa.large_string()).combine_chunks()


def _image_files(rows: _Rows, image: str, *, root: str | None, allow_escape: bool) -> FileStore:
    paths, folder = _read_paths(rows, image), rows.tables.folder
    for odd, plain in ((r"([^:/])/{2,}", r"\1/"), (r"(^|/)(\./)+", r"\1")):  # one image has one name
        paths = pc.replace_substring_regex(paths, odd, plain)
    useless = pc.fill_null(pc.match_substring_regex(paths, r"^\s*$|\x00"), True).to_numpy(zero_copy_only=False)
    if useless.any():
        wrong = f"the row has no path of an image in column {image!r}"
        raise InputError(rows.name(int(useless.argmax())), wrong, "add it or leave out the row")
    within = [path.parent.relative_to(folder).as_posix() for path in rows.tables.splits]
    if root is None and {*within} != {"."}:  # paths start from each table's own folder
        starts = ["" if name == "." else f"{name}/" for name in within]
        folders = pa.array(np.repeat(starts, np.diff(rows.starts)), pa.large_string())
        joined = pc.binary_join_element_wise(folders, paths, pa.scalar("", pa.large_string()))
        paths = pc.if_else(pc.starts_with(paths, "/"), paths, joined)
    folder = folder / (root or "")
    if not allow_escape:
        # One pass of Arrow finds the few names that could leave the root at all.
        for row in np.flatnonzero(pc.match_substring_regex(paths, MAY_ESCAPE.pattern).to_numpy(zero_copy_only=False)):
            resolve_inside(folder, paths[row].as_py(), where=rows.name(int(row)))
    return FileStore(folder, paths)


def _drop_twins(
    images: FileStore, states: csr_array, splits: NDArray[np.str_], *, chosen: NDArray[np.int64], where: str
) -> NDArray[np.int64]:
    """The chosen rows without those that repeat an earlier one; an image with two answers is an error."""
    coded = images.paths.take(pa.array(chosen)).dictionary_encode()
    if len(coded.dictionary) == len(chosen):
        return chosen
    codes = coded.indices.to_numpy()
    _, first, back = np.unique(codes, return_index=True, return_inverse=True)
    again = np.flatnonzero(first[back] != np.arange(len(chosen)))
    rows, earlier = chosen[again], chosen[first[back[again]]]
    differ = (states[rows] != states[earlier]).sum(axis=1).astype(bool) | (splits[rows] != splits[earlier])
    if differ.any():
        odd = codes[again[differ]]
        count, name = int((codes == odd[0]).sum()), coded.dictionary[odd[0]].as_py()
        wrong = f"image {name!r} stands on {count} rows ({len({*odd.tolist()})} images do so)"
        raise InputError(where, wrong, "give each image one row with all its labels")
    return np.delete(chosen, again)


def find_label_names(folder: Path, names: str | None) -> list[str] | None:
    """Label names in order from a file, as in `read_names`; None looks for `labels.json`."""
    path = folder / (names or NAMES_FILE)
    return None if names is None and not path.is_file() else read_names(path)


def _class_names(schema: pa.Schema, column: str) -> list[str] | None:
    """Names of numbered labels as Hugging Face writes them into a Parquet file."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]
        feature = feature[0] if isinstance(feature, list) else feature
        return [str(name) for name in feature.get("feature", feature)["names"]]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # another kind of column
        return None


def encode_label_column(
    values: pa.ChunkedArray, names: Sequence[str] | None, *, delimiter: str | None, name_row: NameRow
) -> tuple[LabelSpace, csr_array]:
    """Labels from one column of text, lists of text, or (lists of) numbers of `names`; None takes those that occur."""
    rows, flat = _flatten(values, delimiter, name_row)
    coded = flat.dictionary_encode()
    codes, pieces = coded.indices.to_numpy(), coded.dictionary.to_pylist()
    if pa.types.is_integer(flat.type):
        named = dict(enumerate(names)) if names is not None else {number: str(number) for number in pieces}
        written, unknown = [named.get(number, f"number {number}") for number in pieces], [False] * len(pieces)
    else:
        unknown = [piece.strip().startswith(UNKNOWN_MARK) for piece in pieces]
        written = [piece.strip().removeprefix(UNKNOWN_MARK).strip() for piece in pieces]
    names = sorted({*written} - {""}) if names is None else names
    index = {label: place for place, label in enumerate(names)} | {"": -1}
    for code, label in enumerate(written):
        if label not in index:
            row = int(rows[np.argmax(codes == code)])
            raise InputError(name_row(row), f"unknown label {label!r}", choose_one_of(label, names))
    ids, unsure = np.array([index[label] for label in written], np.int64)[codes], np.array(unknown, bool)[codes]
    there = ids >= 0
    states = pack_states(rows[there], ids[there], shape=(len(values), len(names)), unknown=unsure[there])
    return LabelSpace(tuple(names)), states


def _encode_label_columns(columns: pa.Table, *, name_row: NameRow) -> tuple[LabelSpace, csr_array]:
    """Labels from one column each: 1 present, 0 absent; -1, nothing and not-a-number are unknown."""
    states = np.empty(columns.shape, dtype=np.int8)
    for place, (name, values) in enumerate(zip(columns.column_names, columns.columns, strict=True)):
        if pa.types.is_nested(values.type) or "binary" in str(values.type):  # neither number nor text
            values = pa.chunked_array([[str(value) for value in values.to_pylist()]])
        texts = pc.utf8_lower(pc.utf8_trim_whitespace(pc.fill_null(values.cast(pa.large_string()), "")))
        coded = texts.combine_chunks().dictionary_encode()
        codes, held = coded.indices.to_numpy(), coded.dictionary.to_pylist()
        strange = next((text for text in held if text not in _STATES), None)
        if strange is not None:
            wrong = f"no column of labels was found, and column {name!r} is not one of 0, 1 and -1: it holds "
            todo = "give ?labels=COLUMN, or a file that lists the 0/1 columns with ?names=FILE"
            raise InputError(name_row(int(np.argmax(codes == held.index(strange)))), wrong + quote(strange), todo)
        states[:, place] = np.array([_STATES[text] for text in held], dtype=np.int8)[codes]
    return LabelSpace(tuple(columns.column_names)), csr_array(states)


def _flatten(values: pa.ChunkedArray, delimiter: str | None, name_row: NameRow) -> tuple[NDArray[np.int64], pa.Array]:
    """The single labels of all rows, and the row of each."""
    if values.type in _TEXT:
        values = pc.fill_null(values.cast(pa.large_string()), "")
        if delimiter is None and pc.all(pc.match_substring_regex(values, _WRITTEN_LIST)).as_py():
            return _flatten(pa.chunked_array([_read_lists(values, name_row)]), "", name_row)
        if delimiter is None:
            delimiter = next((d for d in DELIMITERS if pc.any(pc.match_substring(values, d)).as_py()), "")
        if delimiter:
            values = pc.split_pattern(values, pattern=delimiter)
    rows, flat = np.arange(len(values)), values
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or pa.types.is_fixed_size_list(values.type):
        rows, flat = pc.list_parent_indices(values).to_numpy(), pc.list_flatten(values)
    if pa.types.is_null(flat.type):  # every list is empty
        flat = flat.cast(pa.large_string())
    marks = pa.types.is_integer(flat.type) and flat is not values and _are_marks(values, flat)
    if (flat.type not in _TEXT and not pa.types.is_integer(flat.type)) or marks:
        wrong = "lists of 0 and 1 for each label" if marks else f"of type {values.type}"
        raise InputError(name_row(0), f"labels are {wrong}", "write text, lists of text, or 0/1 columns")
    return rows[flat.is_valid().to_numpy()], flat.drop_null().combine_chunks()


def _doubt_delimiter(where: str, names: Sequence[str]) -> list[str]:
    """A line about labels that are perhaps several, which were not parted."""
    lists = [name for name in names if any(sign in name for sign in DELIMITERS)]
    words = {word for name in names for word in name.split()}
    if 2 * len(words) < len(names):  # each label would be a choice of few words
        lists += [name for name in names if " " in name]
    are = "1 label is perhaps a list" if len(lists) == 1 else f"{len(lists)} labels are perhaps lists"
    todo = "?delimiter=%2C parts them at commas, ?delimiter=%20 at blanks"
    return [f"{where}: {are} ({todo}): {shorten(lists, limit=10)}"] if lists else []


def _are_marks(lists: pa.ChunkedArray, numbers: pa.ChunkedArray) -> bool:
    """Whether lists of numbers say 0 or 1 of each label in turn, and are not the numbers of labels.

    Two of them may be either, unless one stands twice in a list.
    """
    lengths = pc.unique(pc.list_value_length(lists).drop_null()).to_pylist()
    if len(lengths) != 1 or lengths[0] < 2 or not pc.all(pc.is_in(numbers, pa.array([0, 1], numbers.type))).as_py():
        return False
    return lengths[0] > 2 or any(len({*each}) < 2 for each in lists.drop_null().to_pylist())


def _read_lists(values: pa.ChunkedArray, name_row: NameRow) -> pa.Array:
    """Lists of text that were written as text, as pandas writes them into a CSV file: `['cat', 'sofa']`."""
    read: list[list[str]] = []
    for row, text in enumerate(values.to_pylist()):
        try:
            found = ast.literal_eval(text.strip() or "[]")
            if re.search(r"""['"]\s+['"]""", text) or not all(isinstance(each, str) for each in found):
                raise ValueError(text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            todo = "write cat|sofa, or take each text as one label with ?delimiter="
            raise InputError(name_row(row), f"{cut(text)!r} is no list of labels", todo) from None
        read.append(list(found))
    return pa.array(read, pa.large_list(pa.large_string()))
