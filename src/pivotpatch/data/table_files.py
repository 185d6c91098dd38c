"""Find table files and read chosen columns of them: CSV, TSV, JSON lines and Parquet behind one pair of functions."""

import codecs
import csv
import glob
import io
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from pivotpatch.data.files import read_text
from pivotpatch.errors import InputError, choose_one_of, quote

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
MAX_COLUMNS = 50_000
"""Columns that a table may have; each takes a fifth of a millisecond however few rows there are."""
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
# Lines of JSON held at once: too few objects to start the garbage collector, which would take most of the time.
_CHUNK = 256
# Bytes of CSV that Arrow parses at once, none of whose rows can be longer.
_CSV_BLOCK = 1 << 24
# One thread, for only then do errors in CSV files tell the row.
_CSV_READING = pacsv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK)


@dataclass(frozen=True)
class TableFile:
    """One file of a table.

    Attributes:
        path: the file.
        split: the split its name states, for tables without a split column.
    """

    path: Path
    split: str | None = None


@dataclass(frozen=True)
class TableFiles:
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
        paths = [Path(match) for match in sorted(glob.glob(location, recursive=True))]  # noqa: PTH207 (may be absolute)
        if not paths:
            raise InputError(location, "there is no such file or folder", "check the location")
        folder = Path(os.path.commonpath([path.parent for path in paths]))
    for path in paths:
        if path.is_dir():
            raise InputError(str(path), "is a folder, not a table", "rename it or write a pattern that leaves it out")
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(str(path), f"unknown kind of table {path.suffix!r}", f"give one of {', '.join(SUFFIXES)}")
    # A single file is named freely; of several, the name says which split each holds.
    named = not place.is_file()
    return TableFiles(folder, [TableFile(path, _SHARD.sub("", path.stem) if named else None) for path in paths])


def read_schema(path: Path) -> pa.Schema:
    """The columns of a table file; those of JSON lines have type null, which is known only once they are read."""
    if not path.stat().st_size:
        raise InputError(str(path), "the file is empty", "copy or write it again")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        with open_parquet(path) as file:
            _check_count(path, file.metadata.num_columns)
            schema = file.schema_arrow
    elif suffix in (".csv", ".tsv"):
        schema = pa.schema([(name, pa.string()) for name in _csv_columns(path)])
    else:
        # All lines: one far down may have the first value of a column.
        keys: dict[str, None] = {}
        for chunk in _json_chunks(path, _CHUNK):
            keys |= {key: None for row in chunk for key in row}
            _check_count(path, len(keys))
        try:
            schema = pa.schema([(name, pa.null()) for name in keys])
        except UnicodeEncodeError as error:
            wrong = f"the name {quote(error.object)} holds half of a character"
            raise InputError(str(path), wrong, "correct it there") from None
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
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".tsv", ".parquet"):
        return _read_json_lines(path, columns)
    _check_columns(path, columns, set(read_schema(path).names))
    if suffix == ".parquet":
        with open_parquet(path) as file:
            table = file.read(columns=list(columns))
            table.validate(full=True)  # for Arrow does not look whether text is UTF-8
            return table.cast(pa.schema([(field.name, _plain_type(field.type)) for field in table.schema]))
    return _read_csv(path, columns, types or {})


def _check_columns(path: Path, columns: Sequence[str], there: Collection[str]) -> None:
    for column in columns:
        if column not in there and column.rpartition(".")[0] not in there:
            raise InputError(str(path), f"there is no column {column!r}", choose_one_of(column, there))


def _check_count(path: Path, columns: int) -> None:
    if columns > MAX_COLUMNS:
        wrong = f"{columns} columns are more than the limit of {MAX_COLUMNS}"
        raise InputError(str(path), wrong, "check that it is the right file, or write one column of labels")


def _no_rows(path: Path) -> InputError:
    return InputError(str(path), "the table has no rows", "give at least one picture")


def _damaged(path: Path, error: BaseException) -> InputError:
    why = str(error).split("\n")[0]
    return InputError(str(path), f"damaged or cut short ({why})", "copy or write it again")


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file to read from; whatever is wrong with it then is told in words."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(path, error) from None


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that holds the same values without dictionaries and views, which pandas and Polars may write."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain_type(field.type)) for field in kind])
    return kind


def _csv_parsing(path: Path) -> pacsv.ParseOptions:
    return pacsv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True)


def _csv_error(path: Path, error: BaseException) -> InputError:
    read_text(path)  # has the better message where the encoding is what is wrong
    ragged = re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", str(error))
    if ragged:
        row, expected, got = ragged.groups()
        wrong = f"row {row} (the header is row 1) has {got} columns, not {expected}"
        return InputError(str(path), wrong, "quote values that hold the delimiter, and complete the row")
    value = re.search(r"Row #(\d+): CSV conversion error to (\w+): invalid value '(.*)'", str(error))
    if value:
        row, kind, text = value.groups()
        wrong = f"row {row} (the header is row 1) holds {text!r} where numbers stand"
        return InputError(str(path), wrong, f"write a number ({kind}), or leave that column out")
    if "Empty CSV" in str(error):
        return _no_rows(path)
    if "straddling object" in str(error):
        wrong = f"a row is longer than {_CSV_BLOCK >> 20} MB"
        return InputError(str(path), wrong, "close its quotes, or write JSON lines or Parquet")
    return _damaged(path, error)


def _csv_columns(path: Path) -> list[str]:
    with path.open("rb") as file:
        _check_count(path, file.readline(_CSV_BLOCK).count(_csv_parsing(path).delimiter.encode()) + 1)
    try:
        with pacsv.open_csv(path, read_options=_CSV_READING, parse_options=_csv_parsing(path)) as reader:
            return list(reader.schema.names)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _csv_error(path, error) from None


def _read_csv(path: Path, columns: Sequence[str], types: Mapping[str, pa.DataType]) -> pa.Table:
    # As text unless it is asked for: a picture named 007 must not become the number 7.
    kinds = {name: types.get(name, pa.string()) for name in columns}
    convert = pacsv.ConvertOptions(column_types=kinds, include_columns=list(columns))
    try:
        table = pacsv.read_csv(
            path,
            read_options=_CSV_READING,
            parse_options=_csv_parsing(path),
            convert_options=convert,
        )
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _csv_error(path, error) from None
    _check_quotes(path)
    return table


def _check_quotes(path: Path) -> None:
    """Refuse a file that ends inside a quoted value, which Arrow would take as one long value."""
    with path.open("rb") as file:
        quotes = sum(block.count(b'"') for block in iter(lambda: file.read(1 << 24), b""))
    if quotes % 2 == 0:
        return
    rows = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=_csv_parsing(path).delimiter, strict=True)
    begin = 1
    try:
        for _ in rows:
            begin = rows.line_num + 1
    except csv.Error as error:
        wrong = f"the row that begins on line {begin} is badly quoted ({error})"
        raise InputError(str(path), wrong, "close the quotes, or copy the file again where it is cut short") from None


def _json_chunks(path: Path, size: int) -> Iterator[list[dict[str, object]]]:
    """The objects of a JSON lines file, `size` lines at a time; blank lines are left out."""
    with path.open("rb") as file:
        numbered = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        while chunk := list(islice(numbered, size)):
            if chunk[0][0] == 1:
                chunk[0] = 1, chunk[0][1].removeprefix(codecs.BOM_UTF8)
            rows = []
            # A line that is no object by its ends could make up with its neighbours what it is not by itself.
            if all(line.lstrip().startswith(b"{") and line.rstrip().endswith(b"}") for _, line in chunk):
                with suppress(ValueError, RecursionError):  # all at once: several times faster than line by line
                    rows = json.loads(b"[" + b",".join(line for _, line in chunk) + b"]")
            if len(rows) != len(chunk) or not all(isinstance(row, dict) for row in rows):
                rows = [_parse_line(f"{path}, line {number}", line) for number, line in chunk]
            yield rows


def _parse_line(where: str, line: bytes) -> dict[str, object]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        raise InputError(where, "not UTF-8", "save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise InputError(where, f"not JSON ({error})", "correct it, or copy the file again if cut short") from None
    if not isinstance(row, dict):
        raise InputError(where, f"holds {line.decode()[:40].strip()!r}", "write one JSON object a line")
    return row


def _read_json_lines(path: Path, columns: Sequence[str]) -> pa.Table:
    # Python's parser and not Arrow's: it names the line of an error, and never takes a name for a date.
    pieces, there = [], set[str]()
    for chunk in _json_chunks(path, _CHUNK):
        there.update(*chunk)
        arrays = []
        for column in columns:
            try:
                arrays.append(pa.array([row.get(column) for row in chunk]))
            except (pa.ArrowException, UnicodeError, OverflowError) as error:
                wrong = f"column {column!r} cannot be held ({str(error).splitlines()[0]})"
                raise InputError(str(path), wrong, "write values of one kind in a column") from None
        pieces.append(pa.table(arrays, names=list(columns)))
    if pieces:
        _check_columns(path, columns, there)
    return join_tables(path, pieces)


def join_tables(where: Path, tables: Sequence[pa.Table]) -> pa.Table:
    """One table of several with the same columns, whose types may differ where one holds the other."""
    if not any(table.num_rows for table in tables):
        raise _no_rows(where)
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        wrong = f"a column changes its type ({str(error).splitlines()[0]})"
        raise InputError(str(where), wrong, "write values of one kind in a column") from None
