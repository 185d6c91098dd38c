"""Data sets in tables: CSV, TSV, JSON lines and Parquet, with paths to images or the images themselves."""

import re
from bisect import bisect_right
from collections.abc import Sequence
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
    "image", "img", "imagepath", "imgpath", "filepath", "filename", "path", "file", "imagefile", "imagename",
)  # fmt: skip
LABEL_COLUMNS = ("labels", "label", "tags", "tag", "categories", "category", "classes", "class")
SPLIT_COLUMN = "split"


class TableOptions(NamedTuple):
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
    """Read a table of images and labels.

    Labels are one column, of delimited text or of lists, where `?cat` is unknown; or one column each: 1 present, 0
    absent, -1 or nothing unknown. The label space is that of the whole table, so that splits agree.

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
    options = TableOptions(image, labels, delimiter, names, split_column, root, allow_escape)
    return read_tables(find_tables(location), split, name=f"table:{location}", options=options)


class _Columns(NamedTuple):
    """Which column of a table is what; `image.bytes` and the like as Parquet names a field."""

    image: str
    pixels: str | None  # the encoded images, None where they are files
    path: str | None  # their paths or names
    labels: Sequence[str]
    hot: bool  # whether each column of `labels` is one label
    split: str | None


class _Rows(NamedTuple):
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
    first, *others = (file.path for file in tables.files)
    schema = read_schema(first)
    names = find_label_names(tables.folder, options.names)
    columns = _choose_columns(schema, names, where=str(first), options=options)
    if columns.hot and names is None:  # a label column that only some files have is an error where it is read
        more = dict.fromkeys(name for path in others for name in read_schema(path).names if name not in schema.names)
        columns = columns._replace(labels=[*columns.labels, *more])
    wanted = [column for column in (columns.path, *columns.labels, columns.split) if column is not None]
    pieces = [read_columns(file.path, wanted) for file in tables.files]
    starts = np.cumsum([0, *(piece.num_rows for piece in pieces)]).tolist()
    rows = _Rows(join_tables(first, pieces), tables, starts)
    if columns.hot:
        labels = encode_label_columns({name: rows.table[name] for name in columns.labels}, name_row=rows.name)
    else:
        names = class_label_names(schema, columns.labels[0]) if names is None else names
        values = rows.table[columns.labels[0]]
        labels = encode_label_column(values, names, delimiter=options.delimiter, name_row=rows.name)
    chosen = _choose_rows(rows, columns.split, split)
    images: ImageStore | None = _embedded_images(rows, columns)
    if images is None:
        images = _image_files(rows, columns, options=options, chosen=chosen)
    address = f"{name}@{split}" if split else name
    everything = RecordSet(address, labels.space, images=images, positive=labels.positive, unknown=labels.unknown)
    return everything if chosen is None else everything.select(chosen)


def find_column(known: Sequence[str], columns: Sequence[str]) -> str | None:
    """The column that has the first of some names; case, blanks and underscores do not matter.

    >>> find_column(("image", "filename"), ["File Name", "cat"])
    'File Name'
    """
    plain = {re.sub(r"[\s_-]", "", column).lower(): column for column in reversed(columns)}
    return next((plain[name] for name in known if name in plain), None)


def _choose_columns(schema: pa.Schema, names: Sequence[str] | None, *, where: str, options: TableOptions) -> _Columns:
    columns = schema.names
    for asked in (options.image, options.labels, options.split_column):
        if asked is not None and asked not in columns:
            raise InputError(where, f"there is no column {asked!r}", choose_one_of(asked, columns))
    image = options.image or find_column(IMAGE_COLUMNS, columns)
    if image is None:
        wrong = f"no column of images among {shorten(columns, limit=5)}"
        raise InputError(where, wrong, f"name it with ?image=COLUMN, as in {where}?image={columns[0]}")
    split = options.split_column or find_column((SPLIT_COLUMN,), columns)
    kind = schema.field(image).type
    fields = {field.name for field in kind} if pa.types.is_struct(kind) else set()
    pixels: str | None = None
    path: str | None = image
    if "bytes" in fields:
        pixels, path = f"{image}.bytes", f"{image}.path" if "path" in fields else None
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        pixels, path = image, None
    labels = options.labels or find_column(LABEL_COLUMNS, columns)
    if labels is not None:
        return _Columns(image, pixels, path, [labels], False, split)
    hot = names or [column for column in columns if column not in (image, split)]
    missing = sorted(set(hot) - set(columns))
    if missing or not hot:
        wrong = f"no column of labels beside {image!r}" + (f", and none for {shorten(missing)}" if missing else "")
        raise InputError(where, wrong, "name it with ?labels=COLUMN, or add it")
    return _Columns(image, pixels, path, hot, True, split)


def _choose_rows(rows: _Rows, column: str | None, split: str | None) -> NDArray[np.int64] | None:
    """Rows of a split, None for all."""
    if split is None:
        return None
    where = str(rows.tables.folder if len(rows.tables.files) > 1 else rows.tables.files[0].path)
    if column is not None:
        try:
            values = rows.table[column].cast(pa.string())
        except pa.ArrowException:
            raise InputError(where, f"column {column!r} holds no text", "write one split per row, in UTF-8") from None
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


def _path_column(rows: _Rows, columns: _Columns) -> pa.ChunkedArray:
    """Paths or names of the images, as text."""
    values = rows.table[columns.image]
    if columns.pixels is not None:
        values = pc.struct_field(values, "path")
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type) or pa.types.is_null(values.type)):
        wrong = f"column {columns.image!r} holds {values.type}, neither paths nor encoded images"
        raise InputError(str(rows.tables.files[0].path), wrong, "name the right one with ?image=COLUMN")
    # Long offsets, so that any number of paths fits in one array.
    return values.cast(pa.large_string())


def _embedded_images(rows: _Rows, columns: _Columns) -> EmbeddedStore | None:
    """The images inside the table; None where it has their paths only, so that the first row holds no bytes."""
    if columns.pixels is None:
        return None
    groups = list_row_groups([file.path for file in rows.tables.files], columns.pixels)
    if columns.path is not None and not next(groups[0].values(columns.pixels)).is_valid:
        return None
    names = None if columns.path is None else _path_column(rows, columns).combine_chunks()
    # Many files carry one name for all images, or none; such names would tell nobody which is meant.
    telling = names is not None and not names.null_count and pc.count_distinct(names).as_py() == len(names)
    return EmbeddedStore(groups, columns.pixels, names=names if telling else None, cache=cache_folder())


def _image_files(
    rows: _Rows, columns: _Columns, *, options: TableOptions, chosen: NDArray[np.int64] | None
) -> FileStore:
    folder = rows.tables.folder
    paths = _path_column(rows, columns)
    useless = pc.fill_null(pc.match_substring_regex(paths, r"^\s*$|\x00"), True).to_numpy()
    if useless.any():
        where, wrong = rows.name(int(useless.argmax())), f"the row has no path of an image in column {columns.image!r}"
        raise InputError(where, wrong, "add it or leave out the row")
    if options.root is None:
        paths = _start_from(folder, rows, paths)
    root = folder / (options.root or "")
    paths = paths.combine_chunks()
    if not options.allow_escape:
        # One pass of Arrow finds the few names that could leave the root at all.
        for row in np.flatnonzero(pc.match_substring_regex(paths, MAY_ESCAPE.pattern).to_numpy(zero_copy_only=False)):
            resolve_inside(root, paths[row].as_py(), where=rows.name(int(row)))
    counts = pc.value_counts(paths if chosen is None else paths.take(pa.array(chosen)))
    twins = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twins):
        wrong = f"image {twins[0]['values'].as_py()!r} stands on {twins[0]['counts']} rows ({len(twins)} images do so)"
        raise InputError(str(rows.tables.files[0].path), wrong, "give each image one row with all its labels")
    return FileStore(root, paths)


def _start_from(folder: Path, rows: _Rows, paths: pa.ChunkedArray) -> pa.ChunkedArray:
    """Paths that start from each table's own folder, rewritten to start from the common one."""
    parts = []
    for file, start, end in zip(rows.tables.files, rows.starts, rows.starts[1:], strict=False):
        part, within = paths.slice(start, end - start), file.path.parent.relative_to(folder).as_posix()
        if within != ".":
            joined = pc.binary_replace_slice(part, start=0, stop=0, replacement=f"{within}/")
            part = pc.if_else(pc.starts_with(part, "/"), part, joined)
        parts.extend(part.chunks)
    return pa.chunked_array(parts, pa.large_string())
