"""Find table files and read columns of them: CSV, TSV, JSON lines and Parquet."""

import csv
import glob
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from pivotpatch.errors import InputError, choose_one_of, quote_fault

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
MAX_COLUMNS = 50_000
"""Columns that a table may have; each takes a fifth of a millisecond however few rows there are."""
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_CHUNK = 256  # lines of JSON held at once: too few objects to start the garbage collector
_CSV_BLOCK = 1 << 24  # bytes of CSV that Arrow parses at once; no row can be longer
# One thread, for only then do errors in CSV files tell the row.
_CSV_READING = pacsv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK)


class TableFile(NamedTuple):
    """One file of a table, and the split that its name states, for tables without a split column."""

    path: Path
    split: str | None = None


class TableFiles(NamedTuple):
    """The files of a table, and the folder that paths in them and in options start from."""

    folder: Path
    files: Sequence[TableFile]


def find_tables(location: str) -> TableFiles:
    """The table at a location: a file, a folder of Parquet shards (or its `data` folder), or a glob pattern."""
    place = Path(location)
    if place.is_file():
        paths, folder = [place], place.parent
    elif place.is_dir():
        paths, folder = sorted(place.glob("*.parquet")) or sorted(place.glob("data/*.parquet")), place
        if not paths:
            raise InputError(location, "no Parquet file in this folder or its data folder", "name the table's file")
    else:
        matches = map(Path, sorted(glob.glob(location, recursive=True)))  # noqa: PTH207 (may be absolute)
        paths = [path for path in matches if path.is_file()]
        if not paths:
            raise InputError(location, "there is no such file or folder", "check the location")
        folder = Path(os.path.commonpath([path.parent for path in paths]))
    for path in paths:
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(str(path), f"unknown kind of table {path.suffix!r}", f"give one of {', '.join(SUFFIXES)}")
    # A single file is named freely; of several, the name says which split each holds.
    named = not place.is_file()
    return TableFiles(folder, [TableFile(path, _SHARD.sub("", path.stem) if named else None) for path in paths])


def read_schema(path: Path) -> pa.Schema:
    """The columns of a table file; those of JSON lines have type null, which is known only once they are read."""
    if not path.stat().st_size:
        raise InputError(str(path), "the file is empty", "copy or write it again")
    if path.suffix.lower() == ".parquet":
        with open_parquet(path) as file:
            _check_count(path, file.metadata.num_columns)
            schema = file.schema_arrow
    elif path.suffix.lower() in (".csv", ".tsv"):
        with path.open("rb") as file:
            _check_count(path, file.readline(_CSV_BLOCK).count(_csv_parsing(path).delimiter.encode()) + 1)
        with _explain_faults(path), pacsv.open_csv(path, _CSV_READING, _csv_parsing(path)) as reader:
            schema = pa.schema([(name, pa.string()) for name in reader.schema.names])
    else:
        schema = pa.schema([(name, pa.null()) for name in _json_keys(path)])
    if not schema.names:
        raise _no_rows(path)
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise InputError(str(path), f"two columns are named {min(twice)!r}", "give each column its own name")
    return schema


def read_columns(path: Path, columns: Sequence[str], *, types: Mapping[str, pa.DataType] | None = None) -> pa.Table:
    """Read some columns of a table file; of a Parquet struct, `column.field` reads that field alone.

    Args:
        path: the file.
        columns: their names.
        types: what columns of a CSV or TSV file hold, where that is not text.
    """
    if path.suffix.lower() not in (".parquet", ".csv", ".tsv"):
        return _read_json_lines(path, columns)
    _check_columns(path, columns, read_schema(path).names)
    if path.suffix.lower() == ".parquet":
        with open_parquet(path) as file:
            table = file.read(columns=list(columns))
            table.validate(full=True)  # Arrow does not look whether text is UTF-8
            return table.cast(pa.schema([(field.name, _plain_type(field.type)) for field in table.schema]))
    # As text unless numbers are asked for: an image named 007 must not become the number 7.
    kinds = {name: (types or {}).get(name, pa.string()) for name in columns}
    convert = pacsv.ConvertOptions(column_types=kinds, include_columns=list(columns))
    with _explain_faults(path):
        table = pacsv.read_csv(path, _CSV_READING, _csv_parsing(path), convert)
    _check_quotes(path)
    return table


def join_tables(where: Path, tables: Sequence[pa.Table]) -> pa.Table:
    """One table of several with the same columns, whose types may differ where one holds the other."""
    if not any(table.num_rows for table in tables):
        raise _no_rows(where)
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        wrong = f"a column changes its type ({quote_fault(error)})"
        raise InputError(str(where), wrong, "write values of one kind in a column") from None


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file to read from; whatever is wrong with it then is told in words."""
    with _explain_faults(path), pq.ParquetFile(path) as file:
        yield file


@contextmanager
def _explain_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if "straddling object" in str(error):
            wrong = f"a row is longer than {_CSV_BLOCK >> 20} MB"
            raise InputError(str(path), wrong, "close its quotes, or write JSON lines or Parquet") from None
        wrong = f"damaged or cut short ({quote_fault(error)})"
        raise InputError(str(path), wrong, "correct it, or copy or write it again") from None


def _no_rows(path: Path) -> InputError:
    return InputError(str(path), "the table has no rows", "give at least one image")


def _check_columns(path: Path, columns: Sequence[str], there: Iterable[str]) -> None:
    there = set(there)
    for column in columns:
        if column not in there and column.rpartition(".")[0] not in there:
            raise InputError(str(path), f"there is no column {column!r}", choose_one_of(column, there))


def _check_count(path: Path, columns: int) -> None:
    if columns > MAX_COLUMNS:
        wrong = f"{columns} columns are more than the limit of {MAX_COLUMNS}"
        raise InputError(str(path), wrong, "check that it is the right file, or write one column of labels")


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that holds the same values without dictionaries and views, which pandas and Polars may write."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_plain_type(kind.value_type))
    return pa.large_string() if pa.types.is_string_view(kind) else kind


def _csv_parsing(path: Path) -> pacsv.ParseOptions:
    return pacsv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True)


def _check_quotes(path: Path) -> None:
    """Refuse a file that ends inside a quoted value, which Arrow takes as one long value: all rows in it are lost."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        if sum(line.count('"') for line in file) % 2 == 0:
            return
        file.seek(0)
        rows = csv.reader(file, delimiter=_csv_parsing(path).delimiter, strict=True)
        try:
            for _ in rows:
                pass
        except csv.Error as error:
            wrong = f"badly quoted ({error})"
            raise InputError(
                f"{path}, up to line {rows.line_num}", wrong, "close the quotes, or copy it again"
            ) from None


# JSON by Python's parser: Arrow's takes names such as 2020-01-01 for dates, and its time grows with the square of the
# number of columns.
def _json_rows(path: Path) -> Iterator[dict[str, object]]:
    """The objects of a JSON lines file; blank lines are left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                if not isinstance(row, dict):
                    raise TypeError("write one object per line")
            except (ValueError, TypeError, RecursionError) as error:  # also what is not UTF-8
                wrong = f"no JSON object ({quote_fault(error)})"
                raise InputError(f"{path}, line {number}", wrong, "correct it, or copy the file again") from None
            yield row


def _json_keys(path: Path) -> list[str]:
    """All keys of all lines, for one far down may have the first value of a column."""
    keys: dict[str, None] = {}
    for row in _json_rows(path):
        if not keys.keys() >= row.keys():
            keys |= dict.fromkeys(row)
            _check_count(path, len(keys))
    return [key.encode(errors="replace").decode() for key in keys]


def _read_json_lines(path: Path, columns: Sequence[str]) -> pa.Table:
    pieces, there, rows = [], set[str](), _json_rows(path)
    while chunk := list(islice(rows, _CHUNK)):
        there.update(*chunk)
        arrays = []
        for column in columns:
            try:
                arrays.append(pa.array([row.get(column) for row in chunk]))
            except (pa.ArrowException, UnicodeError, OverflowError) as error:
                wrong = f"column {column!r} cannot be held ({quote_fault(error)})"
                raise InputError(str(path), wrong, "write values of one kind in a column") from None
        pieces.append(pa.table(arrays, names=list(columns)))
    if pieces:
        _check_columns(path, columns, there)
    return join_tables(path, pieces)
