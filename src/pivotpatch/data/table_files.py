"""Table files (CSV, TSV, JSON lines, Parquet): find them, read columns of them, fetch images that lie inside."""

import csv
import glob
import hashlib
import json
import os
import re
import struct
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import IO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from pivotpatch.errors import InputError, choose_one_of, quote_fault

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
MAX_COLUMNS = 50_000
"""Columns that a table may have; each takes a fifth of a millisecond however few rows there are."""
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_CHUNK = 256  # lines of JSON held at once: too few objects to start the garbage collector
_CSV_BLOCK = 1 << 24  # bytes of CSV that Arrow parses at once; no row can be longer
_UNPACKING = Lock()  # else each thread that finds a row group still packed unpacks all of it


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
    if place.is_file():  # named freely; of several files, the name says which split each holds
        paths, folder = [place], place.parent
    elif place.is_dir():
        paths, folder = sorted(place.glob("*.parquet")) or sorted(place.glob("data/*.parquet")), place
    else:
        paths = [Path(path) for path in sorted(glob.glob(location, recursive=True)) if os.path.isfile(path)]  # noqa: PTH113, PTH207
        folder = Path(os.path.commonpath([path.parent for path in paths])) if paths else place
    if not paths:
        wrong = "no Parquet file in this folder or its data folder" if place.is_dir() else "there is no such file"
        raise InputError(location, wrong, "check the location")
    for path in paths:
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(str(path), f"unknown kind of table {path.suffix!r}", f"give one of {', '.join(SUFFIXES)}")
    several = not place.is_file()
    return TableFiles(folder, [TableFile(path, _SHARD.sub("", path.stem) if several else None) for path in paths])


def read_schema(path: Path) -> pa.Schema:
    """The columns of a table file; those of JSON lines have type null, which is known only once they are read."""
    suffix = path.suffix.lower()
    with _explain_faults(path):
        if suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                _check_count(path, file.metadata.num_columns)
                schema = file.schema_arrow
        else:
            names = _read_header(path) if suffix in (".csv", ".tsv") else _list_keys(path)
            _check_count(path, len(names))
            kind = pa.string() if suffix in (".csv", ".tsv") else pa.null()
            schema = pa.schema([(name, kind) for name in names])
    if not schema.names:
        raise InputError(str(path), "the file is empty", "copy or write it again")
    twice = [name for name, held in Counter(schema.names).items() if held > 1]
    if twice:
        raise InputError(str(path), f"two columns are named {min(twice)!r}", "give each column its own name")
    return schema


def _check_count(path: Path, columns: int) -> None:
    if columns > MAX_COLUMNS:
        wrong = f"{columns} columns are more than the limit of {MAX_COLUMNS}"
        raise InputError(str(path), wrong, "check that it is the right file, or write one column of labels")


def read_columns(path: Path, columns: Sequence[str], *, types: Mapping[str, pa.DataType] | None = None) -> pa.Table:
    """Read some columns of a table file; of a Parquet struct, `column.field` reads that field alone.

    Args:
        path: the file.
        columns: their names.
        types: what columns of a CSV or TSV file hold, where that is not text.
    """
    if path.suffix.lower() not in (".parquet", ".csv", ".tsv"):
        with _explain_faults(path):
            return _read_json_lines(path, columns)
    there = set(read_schema(path).names)
    check_columns(str(path), (c for c in columns if c.rpartition(".")[0] not in there), there)
    with _explain_faults(path):
        if path.suffix.lower() == ".parquet":
            with pq.ParquetFile(path) as file:
                table = file.read(columns=list(columns))
            table.validate(full=True)  # Arrow does not look whether text is UTF-8
            return table.cast(pa.schema([(field.name, _plain_type(field.type)) for field in table.schema]))
        # As text unless numbers are asked for: an image named 007 must not become the number 7.
        kinds = {name: (types or {}).get(name, pa.string()) for name in columns}
        table = pacsv.read_csv(
            path,
            pacsv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK),  # only one thread tells the row of an error
            pacsv.ParseOptions(delimiter=_delimiter(path), newlines_in_values=True),
            pacsv.ConvertOptions(column_types=kinds, include_columns=list(columns)),
        )
        _check_quotes(path)
        return table


def check_columns(where: str, columns: Iterable[str], there: Iterable[str]) -> None:
    """Refuse a table that lacks one of some columns."""
    there = set(there)
    for column in columns:
        if column not in there:
            raise InputError(where, f"there is no column {column!r}", choose_one_of(column, there))


def join_tables(where: Path, tables: Sequence[pa.Table]) -> pa.Table:
    """One table of several with the same columns, whose types may differ where one holds the other."""
    if not any(table.num_rows for table in tables):
        raise InputError(str(where), "the table has no rows", "give at least one image")
    with _explain_faults(where):
        return pa.concat_tables(tables, promote_options="permissive")


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file to read from; whatever is wrong with it then is told in words."""
    with _explain_faults(path), pq.ParquetFile(path) as file:
        yield file


@contextmanager
def _explain_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, RecursionError, csv.Error) as error:
        fault = quote_fault(error)
        if "straddling object" in fault:
            fault = f"a row is longer than {_CSV_BLOCK >> 20} MB: an open quote, or too much for CSV"
        raise InputError(
            str(path), f"damaged or cut short ({fault})", "correct it, or copy or write it again"
        ) from None


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that holds the same values without dictionaries and views, which pandas and Polars may write."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_plain_type(kind.value_type))
    return pa.large_string() if pa.types.is_string_view(kind) else kind


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _read_header(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        return next((row for row in csv.reader(file, delimiter=_delimiter(path)) if row), [])


def _check_quotes(path: Path) -> None:
    """Refuse a file with an open quote, where Arrow would take all rows that follow for one long value."""
    with path.open("rb") as file:
        if sum(line.count(b'"') for line in file) % 2 == 0:
            return
    ends = re.escape(_delimiter(path)).encode() + rb"\r\n"
    value = rb'"[^"]*+(?:""[^"]*+)*+"|[^"%s][^%s]*+' % (ends, ends)
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    sound = re.match(rb"(?:(?:%s)?+(?:[%s]|\Z))*+" % (value, ends), content)
    if sound is not None and sound.end() < len(content):
        line = content.count(b"\n", 0, sound.end()) + 1
        raise InputError(f"{path}, line {line}", "badly quoted", "close the quotes, or copy it again")


# JSON by Python's parser: Arrow's takes names such as 2020-01-01 for dates, and its time grows with the square of the
# number of columns.
def _json_rows(path: Path) -> Iterator[dict[str, object]]:
    """The objects of a JSON lines file; blank lines are left out."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                yield {**json.loads(line)}
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"line {number}: {error}") from None


def _list_keys(path: Path) -> list[str]:
    """All keys of all lines, for one far down may have the first value of a column."""
    keys: dict[str, None] = {}
    for row in _json_rows(path):
        if not keys.keys() >= row.keys():
            keys |= dict.fromkeys(row)
    return list(keys)


def _read_json_lines(path: Path, columns: Sequence[str]) -> pa.Table:
    pieces, there, rows = [], set[str](), _json_rows(path)
    while chunk := list(islice(rows, _CHUNK)):
        there.update(*chunk)
        pieces.append(pa.table({column: pa.array([row.get(column) for row in chunk]) for column in columns}))
    check_columns(str(path), columns, there)
    return pa.concat_tables(pieces, promote_options="permissive")


def cache_folder() -> Path:
    """Where unpacked images are kept: `PIVOTPATCH_CACHE`, or `pivotpatch` in the user's cache folder."""
    own = os.environ.get("PIVOTPATCH_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pivotpatch"


class _RowGroup(NamedTuple):
    """A row group of a Parquet file; `key` names a cache folder and changes with the file."""

    path: Path
    key: str
    number: int
    before: int  # rows of the file that come before
    rows: int


def _make_key(path: Path, leaf: str) -> str:
    state = path.stat()
    text = f"{path.resolve()}\n{state.st_size}\n{state.st_mtime_ns}\n{leaf}"
    return f"{path.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class EmbeddedStore:
    """Encoded images in a binary column of Parquet files; one that is null has no bytes.

    Parquet can only be read a row group at a time. The first image asked of a row group unpacks the group into a
    file of the cache folder; every image is then one short read there. So opening is quick, memory stays flat however
    large the files are, and no file is held open that worker processes would share. The cache may be deleted at any
    time.
    """

    def __init__(self, files: Sequence[Path], leaf: str, *, names: pa.Array | None = None) -> None:
        """Look at the files' row groups.

        Args:
            files: one after the other.
            leaf: the column of bytes, as Parquet names it: `image` or `image.bytes`.
            names: the images' names; None names them by file and row.
        """
        self.leaf, self.names, self.cache = leaf, names, cache_folder()
        self._groups: list[_RowGroup] = []
        for path in files:
            with open_parquet(path) as file:
                held = file.metadata
            check_columns(str(path), [leaf], (held.schema.column(i).path for i in range(held.num_columns)))
            counts = [held.row_group(number).num_rows for number in range(held.num_row_groups)]
            key, before = _make_key(path, leaf), np.cumsum([0, *counts]).tolist()
            self._groups += [_RowGroup(path, key, i, before[i], rows) for i, rows in enumerate(counts) if rows]
        self._starts = np.cumsum([0, *(group.rows for group in self._groups)]).tolist()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def name(self, index: int) -> str:
        """The name that the table gives, or the file's name and the row in it."""
        if self.names is not None:
            return str(self.names[index].as_py())
        group, row = self._find(index)
        return f"{group.path.name}#{group.before + row + 1}"

    def source(self, index: int) -> bytes:
        """The image's encoded bytes."""
        group, row = self._find(index)
        unpacked = self.cache / group.key / f"{group.number}.images"
        with suppress(FileNotFoundError, NotADirectoryError):
            return _read_image(unpacked, row)
        with _UNPACKING:
            with suppress(FileNotFoundError, NotADirectoryError):
                return _read_image(unpacked, row)  # unpacked while this thread waited
            self._unpack(group, unpacked)
        return _read_image(unpacked, row)

    def has_bytes(self) -> bool:
        """Whether the first row holds an image; else all lie where their paths say."""
        return bool(next(_iterate(self._groups[0].path, self._groups[0].number, self.leaf)).is_valid)

    def _find(self, index: int) -> tuple[_RowGroup, int]:
        at = bisect_right(self._starts, index) - 1
        return self._groups[at], index - self._starts[at]

    def _unpack(self, group: _RowGroup, unpacked: Path) -> None:
        if not group.path.exists() or _make_key(group.path, self.leaf) != group.key:
            raise InputError(str(group.path), "the file has changed since it was opened", "open it again")
        part: Path | None = None
        try:
            unpacked.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=unpacked.parent, suffix=".part", delete=False) as file:
                part = Path(file.name)
                _write_images(file, group, self.leaf)
                file.flush()
                os.fsync(file.fileno())  # else a crash may leave the new name on a file without its content
            part.replace(unpacked)
            pa.default_memory_pool().release_unused()
        except (pa.ArrowException, OSError) as error:
            if part is not None:
                part.unlink(missing_ok=True)
            wrong = f"images of {group.path} cannot be unpacked here ({quote_fault(error)})"
            todo = "copy the file again if it is damaged, or set PIVOTPATCH_CACHE to a folder with room"
            raise InputError(str(self.cache), wrong, todo) from None


def _iterate(path: Path, group: int, leaf: str) -> Iterator[pa.Scalar]:
    """The values of a row group, read a few at a time: the group is never in memory as a whole."""
    with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        for batch in file.iter_batches(64, row_groups=[group], columns=[leaf], use_threads=False):
            column = batch.column(0)
            yield from pc.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column


def _write_images(file: IO[bytes], group: _RowGroup, leaf: str) -> None:
    """Write where each image starts and the last one ends, then the images."""
    starts = np.zeros(group.rows + 1, dtype="<i8")
    file.seek(starts.nbytes)
    for row, image in enumerate(_iterate(group.path, group.number, leaf)):
        starts[row] = file.tell()
        file.write(image.as_buffer() or b"")
    starts[-1] = file.tell()
    file.seek(0)
    file.write(starts.tobytes())


def _read_image(unpacked: Path, row: int) -> bytes:
    with unpacked.open("rb", buffering=0) as file:
        file.seek(8 * row)
        places = file.read(16)
        start, end = struct.unpack("<qq", places) if len(places) == 16 else (0, 0)
        if not file.tell() <= start <= end <= os.fstat(file.fileno()).st_size:
            raise FileNotFoundError(str(unpacked))  # cut short, which is as good as not there
        file.seek(start)
        return file.read(end - start)
