"""Data sets in tables: CSV, TSV, JSON lines and Parquet, with paths to pictures or the pictures themselves."""

import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pivotpatch.data.embedded import EmbeddedStore, cache_folder, list_row_groups
from pivotpatch.data.files import MAY_ESCAPE, resolve_inside
from pivotpatch.data.records import FileStore, ImageStore, RecordSet
from pivotpatch.data.table_files import TableFiles, find_tables, join_tables, read_columns, read_schema
from pivotpatch.data.table_labels import (
    class_label_names,
    encode_label_column,
    encode_label_columns,
    find_label_names,
)
from pivotpatch.errors import InputError, choose_one_of, shorten

# Columns that are taken unasked, the first that is there; case, blanks and underscores do not matter.
IMAGE_COLUMNS = (
    "image",
    "img",
    "imagepath",
    "imgpath",
    "filepath",
    "filename",
    "path",
    "file",
    "imagefile",
    "imagename",
)
LABEL_COLUMNS = ("labels", "label", "tags", "tag", "categories", "category", "classes", "class")
SPLIT_COLUMN = "split"


@dataclass(frozen=True)
class TableOptions:
    """How to read a table; see `read_table`."""

    image: str | None = None
    labels: str | None = None
    delimiter: str | None = None
    names: str | None = None
    split_column: str | None = None
    root: str | None = None
    allow_escape: bool = False


def read_table(
    location: str,
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
    """Read a table of pictures and labels.

    Labels are one column, of delimited text or of lists; a label written with a leading `?` is unknown. Or they are one
    column each: 1 present, 0 absent, -1 or nothing unknown. The label space is that of the whole table, whatever the
    split, so that splits agree.

    Args:
        location: a CSV, TSV, JSON lines or Parquet file, a folder of Parquet files, or a glob pattern.
        split: rows to take: by the split column or, where several files have none, by the files' names
            (`train-00000-of-00004.parquet` is `train`). None takes all.
        image: column of paths or of encoded pictures; found by its name if not given.
        labels: column of labels; found by its name if not given. Where there is none, all other columns are taken as
            one label each, or those that `names` lists.
        delimiter: stands between labels in a text; `|`, `;` or `,` is found if not given. Empty: one label a text.
        names: file of all labels in order, a JSON list or one a line; `labels.json` beside the table if there. Else
            labels come in alphabetical order, columns in their own.
        split_column: column of the split, `split` if not given.
        root: folder that paths of pictures start from, that of the table if not given.
        allow_escape: accept pictures outside the root.
    """
    options = TableOptions(image, labels, delimiter, names, split_column, root, allow_escape)
    return read_tables(find_tables(location), split, name=f"table:{location}", options=options)


@dataclass(frozen=True)
class TableColumns:
    """Which column of a table is what.

    Attributes:
        image: the pictures, or their paths.
        pixels: the column of encoded pictures as Parquet names it; None where pictures are files.
        path: the column of paths or names, None where pictures have none.
        labels: the one column of labels, or the columns that are a label each.
        hot: whether each column of `labels` is one label.
        split: the split, None where there is no such column.
    """

    image: str
    pixels: str | None
    path: str | None
    labels: Sequence[str]
    hot: bool
    split: str | None


class TableRows(NamedTuple):
    """All rows of a table, and where each file's rows begin."""

    table: pa.Table
    tables: TableFiles
    starts: Sequence[int]

    def name(self, row: int) -> str:
        """Names a row for a message, as a spreadsheet counts: a CSV file's header is its row 1."""
        at = bisect_right(self.starts, row, hi=len(self.tables.files)) - 1
        path = self.tables.files[at].path
        return f"{path}, row {row - self.starts[at] + (2 if path.suffix.lower() in ('.csv', '.tsv') else 1)}"


def read_tables(tables: TableFiles, split: str | None, *, name: str, options: TableOptions) -> RecordSet:
    """Read files that together are one table."""
    records = _read_records(tables, split, name=name, options=options)
    # Arrow keeps what reading took, which is several times what the records need.
    pa.default_memory_pool().release_unused()
    return records


def _read_records(tables: TableFiles, split: str | None, *, name: str, options: TableOptions) -> RecordSet:
    first = tables.files[0].path
    schema = read_schema(first)
    names = find_label_names(tables.folder, options.names)
    columns = _choose_columns(schema, names, where=str(first), options=options)
    wanted = [column for column in (columns.path, *columns.labels, columns.split) if column is not None]
    if columns.hot and names is None:
        _check_same_columns([file.path for file in tables.files], schema.names)
    pieces = [read_columns(file.path, wanted) for file in tables.files]
    starts = np.cumsum([0, *(piece.num_rows for piece in pieces)]).tolist()
    rows = TableRows(join_tables(first, pieces), tables, starts)
    if columns.hot:
        labels = encode_label_columns({name: rows.table[name] for name in columns.labels}, name_row=rows.name)
    else:
        names = class_label_names(schema, columns.labels[0]) if names is None else names
        values = rows.table[columns.labels[0]]
        labels = encode_label_column(values, names, delimiter=options.delimiter, name_row=rows.name)
    chosen = _choose_rows(rows, columns.split, split)
    images: ImageStore | None = _embedded_pictures(rows, columns)
    if images is None:
        images = _picture_files(rows, columns, options=options, chosen=chosen)
    address = f"{name}@{split}" if split else name
    everything = RecordSet(address, labels.space, images=images, positive=labels.positive, unknown=labels.unknown)
    return everything if chosen is None else everything.select(chosen)


def _find_column(asked: str | None, known: Sequence[str], columns: Sequence[str], *, where: str) -> str | None:
    if asked is not None:
        if asked not in columns:
            raise InputError(where, f"there is no column {asked!r}", choose_one_of(asked, columns))
        return asked
    return find_column(known, columns)


def find_column(known: Sequence[str], columns: Sequence[str]) -> str | None:
    """The column that has the first of some names; case, blanks and underscores do not matter.

    >>> find_column(("image", "filename"), ["File Name", "cat"])
    'File Name'
    """
    plain = {re.sub(r"[\s_-]", "", column).lower(): column for column in reversed(columns)}
    return next((plain[name] for name in known if name in plain), None)


def _choose_columns(
    schema: pa.Schema, names: Sequence[str] | None, *, where: str, options: TableOptions
) -> TableColumns:
    columns = schema.names
    image = _find_column(options.image, IMAGE_COLUMNS, columns, where=where)
    if image is None:
        wrong = f"no column of pictures among {shorten(columns, limit=5)}"
        raise InputError(where, wrong, "name it with ?image=COLUMN")
    split = _find_column(options.split_column, (SPLIT_COLUMN,), columns, where=where)
    kind = schema.field(image).type
    fields = {field.name for field in kind} if pa.types.is_struct(kind) else set()
    if "bytes" in fields:
        pixels, path = f"{image}.bytes", f"{image}.path" if "path" in fields else None
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        pixels, path = image, None
    else:
        pixels, path = None, image
    labels = _find_column(options.labels, LABEL_COLUMNS, columns, where=where)
    if labels is not None:
        return TableColumns(image, pixels, path, [labels], False, split)
    hot = names or [column for column in columns if column not in (image, split)]
    there = set(columns)
    for name in hot:
        if name not in there:
            wrong = f"no column of labels, and none for the label {name!r}"
            raise InputError(where, wrong, f"{choose_one_of(name, columns)}; name that of labels with ?labels=COLUMN")
    if not hot:
        raise InputError(where, f"no column of labels beside {image!r}", "add one")
    return TableColumns(image, pixels, path, hot, True, split)


def _check_same_columns(paths: Sequence[Path], columns: Sequence[str]) -> None:
    """Refuse a label column that only a later file has: the first file's columns are all that are read."""
    there = set(columns)
    for path in paths[1:]:
        more = [name for name in read_schema(path).names if name not in there]
        if more:
            wrong = f"column {more[0]!r} is not in {paths[0].name}, where columns are labels"
            raise InputError(str(path), wrong, "give all files the same columns, or list the labels with ?names=FILE")


def _choose_rows(rows: TableRows, column: str | None, split: str | None) -> NDArray[np.int64] | None:
    """Rows of a split, None for all."""
    if split is None:
        return None
    where = str(rows.tables.folder if len(rows.tables.files) > 1 else rows.tables.files[0].path)
    if column is not None:
        values = rows.table[column]
        if pa.types.is_nested(values.type):
            raise InputError(where, f"column {column!r} holds {values.type}", "write one split a row")
        try:
            values = values.cast(pa.string())
        except pa.ArrowException:
            raise InputError(where, f"column {column!r} holds text that is not UTF-8", "write it as UTF-8") from None
        known = set(values.drop_null().unique().to_pylist())
        mask = pc.fill_null(pc.equal(values, split), False).to_numpy()
    else:
        splits = [file.split for file in rows.tables.files]
        known = {name for name in splits if name is not None}
        mask = np.repeat([name == split for name in splits], np.diff(rows.starts))
        if not known:
            wrong = f"split {split!r} was asked for but there is no column {SPLIT_COLUMN!r}"
            raise InputError(where, wrong, f"leave out @{split} or name the column with ?split_column=COLUMN")
    if split not in known:
        raise InputError(where, f"there is no split {split!r}", choose_one_of(split, known))
    return np.flatnonzero(mask)


def _path_column(rows: TableRows, columns: TableColumns) -> pa.ChunkedArray:
    """Paths or names of the pictures, as text."""
    values = rows.table[columns.image]
    if columns.pixels is not None:
        values = pc.struct_field(values, "path")
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type) or pa.types.is_null(values.type)):
        wrong = f"column {columns.image!r} holds {values.type}, neither paths nor encoded pictures"
        raise InputError(str(rows.tables.files[0].path), wrong, "name the right one with ?image=COLUMN")
    # Long offsets, so that any number of paths fits in one array.
    return values.cast(pa.large_string())


def _embedded_pictures(rows: TableRows, columns: TableColumns) -> EmbeddedStore | None:
    """The pictures inside the table; None where it has their paths only."""
    if columns.pixels is None:
        return None
    groups = list_row_groups([file.path for file in rows.tables.files], columns.pixels)
    missing = sum(group.count_missing(columns.pixels) for group in groups)
    if missing and missing == rows.table.num_rows and columns.path is not None:
        return None
    if missing:
        group = next(group for group in groups if group.count_missing(columns.pixels))
        row = group.before + group.first_missing(columns.pixels) + 1
        raise InputError(f"{group.path}, row {row}", "the row has no picture", "add it or leave out the row")
    names = None if columns.path is None else _path_column(rows, columns).combine_chunks()
    # Many files carry one name for all pictures, or none; such names would tell nobody which is meant.
    telling = names is not None and not names.null_count and pc.count_distinct(names).as_py() == len(names)
    return EmbeddedStore(groups, columns.pixels, names=names if telling else None, cache=cache_folder())


def _picture_files(
    rows: TableRows, columns: TableColumns, *, options: TableOptions, chosen: NDArray[np.int64] | None
) -> FileStore:
    folder = rows.tables.folder
    root = folder if options.root is None else folder / options.root
    paths = _path_column(rows, columns)
    blank = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(paths), ""), True).to_numpy()
    if blank.any():
        where = rows.name(int(blank.argmax()))
        raise InputError(where, f"the row has no picture in column {columns.image!r}", "add it or leave out the row")
    nul = pc.match_substring(paths, "\0").to_numpy()
    if nul.any():
        at = int(nul.argmax())
        wrong = f"the picture's path {paths[at].as_py()!r} holds the character NUL"
        raise InputError(rows.name(at), wrong, "correct it, for no file's name has it")
    if options.root is None:
        paths = _start_from(folder, rows, paths)
    paths = paths.combine_chunks()
    if not options.allow_escape:
        # One pass of Arrow finds the few names that could leave the root at all.
        for row in np.flatnonzero(pc.match_substring_regex(paths, MAY_ESCAPE.pattern).to_numpy(zero_copy_only=False)):
            resolve_inside(root, paths[row].as_py(), where=rows.name(int(row)))
    taken = paths if chosen is None else paths.take(pa.array(chosen))
    _refuse_twins(_normalise(taken, root), where=str(rows.tables.files[0].path))
    return FileStore(root, paths)


def _start_from(folder: Path, rows: TableRows, paths: pa.ChunkedArray) -> pa.ChunkedArray:
    """Paths that start from each table's own folder, rewritten to start from the common one."""
    parts = []
    for file, start, end in zip(rows.tables.files, rows.starts, rows.starts[1:], strict=False):
        part, within = paths.slice(start, end - start), file.path.parent.relative_to(folder).as_posix()
        if within != ".":
            joined = pc.binary_replace_slice(part, start=0, stop=0, replacement=f"{within}/")
            part = pc.if_else(pc.starts_with(part, "/"), part, joined)
        parts.extend(part.chunks)
    return pa.chunked_array(parts, pa.large_string())


def _normalise(paths: pa.Array, root: Path) -> pa.Array:
    """Paths in one spelling each: without `.`, `..` and doubled slashes, and from the root where they lie in it."""
    odd = pc.match_substring_regex(paths, r"(^|/)\.{0,2}(/|$)")
    base = os.path.join(os.path.abspath(root), "")  # noqa: PTH100, PTH118 (links are not followed)
    plain = [os.path.normpath(base + path if path[0] != "/" else path) for path in paths.filter(odd).to_pylist()]
    return pc.replace_with_mask(paths, odd, pa.array([path.removeprefix(base) for path in plain], pa.large_string()))


def _refuse_twins(paths: pa.Array, *, where: str) -> None:
    if pc.count_distinct(paths).as_py() == len(paths):
        return
    counts = pc.value_counts(paths)
    twins = counts.filter(pc.greater(counts.field("counts"), 1))
    picture, times = twins[0]["values"].as_py(), twins[0]["counts"].as_py()
    wrong = f"picture {picture!r} stands on {times} rows ({len(twins)} pictures do so)"
    raise InputError(where, wrong, "give each picture one row with all its labels")
