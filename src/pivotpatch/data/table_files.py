"""Table files (CSV, TSV, JSON lines, Parquet): find them, read columns of them, fetch images that lie inside."""

import csv
import glob
import hashlib
import json
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from pivotpatch.errors import InputError, choose_one_of, explaining, quote_fault, shorten
from pivotpatch.runtime.checks import TABLE_KINDS
from pivotpatch.runtime.packed import open_table
from pivotpatch.writing import replacing

MAX_COLUMNS = 50_000
"""Columns that a table may have; each takes a fifth of a millisecond however few rows there are."""
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_CHUNK = 256  # lines of JSON held at once: too few objects to start the garbage collector
_CSV_BLOCK = 1 << 24  # bytes of CSV that Arrow parses at once; no row can be longer
_SAMPLE = 5  # rows that tell what separates their values
_UNPACKING = Lock()  # else each thread that finds a file still packed unpacks all of it


class TableFiles(NamedTuple):
    """The files of a table, and the folder that paths in them and in options start from."""

    folder: Path
    splits: Mapping[Path, str | None]  # the split that each file's name states, for tables without a split column

    @property
    def where(self) -> str:
        """What messages name: the only file, or the folder."""
        return str(next(iter(self.splits)) if len(self.splits) == 1 else self.folder)


def find_tables(location: str) -> TableFiles:
    """The table at a location: a file, a folder of Parquet shards (or its `data` folder), or a glob pattern."""
    place = Path(location)
    if place.is_file():  # named freely; of several files, the name says which split each holds
        splits: dict[Path, str | None] = {place: None}
    else:
        paths = sorted(place.glob("*.parquet")) or sorted(place.glob("data/*.parquet"))
        paths = paths or [path for path in map(Path, sorted(glob.glob(location))) if path.is_file()]  # noqa: PTH207
        splits = {path: _SHARD.sub("", path.stem) for path in paths}
    if not splits:
        raise InputError(location, "there is no such table, nor Parquet files in such a folder", "check the location")
    for path in splits:
        if path.suffix.lower() not in TABLE_KINDS:
            wrong = f"unknown kind of table {path.suffix!r}"
            raise InputError(str(path), wrong, f"give one of {', '.join(TABLE_KINDS)}")
    return TableFiles(place if place.is_dir() else Path(os.path.commonpath([path.parent for path in splits])), splits)


def read_schema(path: Path) -> pa.Schema:
    """The columns of a table file; those of JSON lines have type null, which is known only once they are read."""
    suffix = path.suffix.lower()
    with _explain_faults(path):
        if suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                count, schema = file.metadata.num_columns, file.schema_arrow
        else:
            text = suffix in (".csv", ".tsv")
            names = _read_header(path) if text else list(dict.fromkeys(key for row in _json_rows(path) for key in row))
            count, schema = len(names), pa.schema([(name, pa.string() if text else pa.null()) for name in names])
    twice = [name for name, held in Counter(schema.names).items() if held > 1]
    wrong = "the file is empty" if not schema.names else f"two columns are named {min(twice)!r}" if twice else ""
    if count > MAX_COLUMNS:
        wrong = f"{count} columns are more than the limit of {MAX_COLUMNS}"
    if wrong:
        raise InputError(str(path), wrong, "check that it is the right file, or write it again")
    return schema


def read_columns(path: Path, columns: Sequence[str], *, types: Mapping[str, pa.DataType] | None = None) -> pa.Table:
    """Read some columns of a table file; of a Parquet struct, `column.field` reads that field alone.

    `types` says what columns of a CSV or TSV file hold, where that is not text.
    """
    there = set(read_schema(path).names)
    check_columns(str(path), (c for c in columns if c.rpartition(".")[0] not in there), there)
    with _explain_faults(path):
        if path.suffix.lower() == ".parquet":
            with pq.ParquetFile(path) as file:
                table = file.read(columns=list(columns))
            table.validate(full=True)  # Arrow does not look whether text is UTF-8
            return table.cast(pa.schema([(field.name, _plain_type(field.type)) for field in table.schema]))
        if path.suffix.lower() not in (".csv", ".tsv"):
            rows, pieces = _json_rows(path), []
            while chunk := list(islice(rows, _CHUNK)):
                pieces.append(pa.table({column: pa.array([row.get(column) for row in chunk]) for column in columns}))
            return pa.concat_tables(pieces, promote_options="permissive")
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
    missing = [column for column in columns if column not in there]
    if missing:
        more = f", nor {shorten(missing[1:])}" if missing[1:] else ""
        raise InputError(where, f"there is no column {missing[0]!r}{more}", choose_one_of(missing[0], there))


def join_tables(tables: Sequence[pa.Table], *, where: str) -> pa.Table:
    """One table of several with the same columns, whose types may differ where one holds the other."""
    if not any(table.num_rows for table in tables):
        raise InputError(where, "the table has no rows", "give at least one image")
    with _explain_faults(where):
        return pa.concat_tables(tables, promote_options="permissive")


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file to read from; whatever is wrong with it then is told in words."""
    with _explain_faults(path), pq.ParquetFile(path) as file:
        yield file


@contextmanager
def _explain_faults(path: Path | str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, RecursionError, csv.Error) as error:
        said, wrong, todo = quote_fault(error), "damaged or cut short", "correct it, or copy or write it again"
        if "utf" in said.lower() and str(path).lower().endswith((".csv", ".tsv")):
            wrong, todo = "is no UTF-8 text", "save it as UTF-8, which Excel calls CSV UTF-8"
        elif "conversion error" in said:  # numbers were asked for, as scores are
            wrong, todo = "a column holds no numbers", "leave it out; before a data set name a model, or scores"
        raise InputError(str(path), f"{wrong} ({said})", todo) from None


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that holds the same values without dictionaries and views, which pandas and Polars may write."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_plain_type(kind.value_type))
    return pa.large_string() if pa.types.is_string_view(kind) else kind


def _delimiter(path: Path) -> str:
    """What parts the first rows into equally many values, two or more: first what the file's name promises.

    European Excel writes `;`. Where none does, as in a damaged file, what parts the header is taken.
    """
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    widths = {sign: _measure_rows(path, sign) for sign in sorted(",;\t", key=usual.__ne__)}
    even = (sign for sign, counts in widths.items() if len({*counts}) == 1 < counts[0])
    return next(even, next((sign for sign, counts in widths.items() if counts and counts[0] > 1), usual))


def _measure_rows(path: Path, delimiter: str) -> list[int]:
    """Values in each of the first rows, up to one that Python's reader refuses as too long."""
    widths = list[int]()
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file, suppress(csv.Error):
        for row in islice(filter(None, csv.reader(file, delimiter=delimiter)), _SAMPLE):
            widths.append(len(row))
    return widths


def _read_header(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        return next((row for row in csv.reader(file, delimiter=_delimiter(path)) if row), [])


def _check_quotes(path: Path) -> None:
    """Refuse a file with an open quote, where Arrow would take all rows that follow for one long value."""
    with path.open("rb") as file:
        if sum(line.count(b'"') for line in file) % 2 == 0:
            return
    # Not by Python's reader: it refuses long values, and text in columns that nobody asks for may be no UTF-8.
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


class EmbeddedStore:
    """Encoded images in a binary column of Parquet files; one that is null has no bytes.

    Parquet cannot be read an image at a time. The first image asked of a file unpacks the column into an Arrow file of
    the cache folder, which is mapped from then on: opening is quick and memory stays flat. The cache may be deleted at
    any time.
    """

    def __init__(self, files: Sequence[Path], leaf: str, *, names: pa.Array | None = None) -> None:
        """Look how many images each file has in the column `leaf`, as Parquet names it: `image` or `image.bytes`.

        `names` are taken where each image has one of its own; else they are named by file and row.
        """
        telling = names is not None and pc.count_distinct(names, mode="only_valid").as_py() == len(names)
        self.files, self.leaf, self.names = list(files), leaf, names if telling else None
        self._titles = _tell_apart(files)
        self._unpacked, self._starts = [_find_unpacked(path, leaf) for path in files], [0]
        for path in files:
            with open_parquet(path) as file:
                held = file.metadata
            check_columns(str(path), [leaf], (held.schema.column(i).path for i in range(held.num_columns)))
            self._starts.append(self._starts[-1] + held.num_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def name(self, index: int) -> str:
        """The name that the table gives, or the file and the row in it."""
        return self.name_row(index) if self.names is None else str(self.names[index].as_py())

    def name_row(self, index: int) -> str:
        """The file and the row in it: an end of the path by which bulk tagging names the image."""
        at, row = self._find(index)
        return f"{self._titles[at]}#{row + 1}"

    def source(self, index: int) -> bytes:
        """The image's encoded bytes."""
        at, row = self._find(index)
        with _UNPACKING:
            images = _map_images(self.files[at], self.leaf, self._unpacked[at])
        return images[row].as_py() or b""

    def _find(self, index: int) -> tuple[int, int]:
        at = bisect_right(self._starts, index) - 1
        return at, index - self._starts[at]


def _tell_apart(files: Sequence[Path]) -> list[str]:
    """The names of files; where two have the same, their paths from the folder that holds all of them."""
    names = [path.name for path in files]
    if len({*names}) == len(names):
        return names
    top = os.path.commonpath([path.absolute().parent for path in files])
    return [path.absolute().relative_to(top).as_posix() for path in files]


def _find_unpacked(path: Path, leaf: str) -> Path:
    """The place of a column of a file as it is now: in `PIVOTPATCH_CACHE`, or `pivotpatch` in the user's cache."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pivotpatch"
    state = path.stat()
    text = f"{path.resolve()}\n{state.st_size}\n{state.st_mtime_ns}\n{leaf}"
    name = f"{path.stem[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.arrow"
    return Path(os.environ.get("PIVOTPATCH_CACHE") or usual) / name


@lru_cache
def _map_images(path: Path, leaf: str, unpacked: Path) -> pa.ChunkedArray:
    """The column of a file, mapped from the cache; unpacked first where it is not there."""
    todo = "copy the file again if it is damaged, or set PIVOTPATCH_CACHE to a folder with room"
    where, wrong = str(unpacked.parent), f"images of {path} cannot be unpacked here"
    with explaining(where, wrong, todo, of=(pa.ArrowException, OSError)):
        if not unpacked.exists():
            if not path.exists() or _find_unpacked(path, leaf) != unpacked:
                raise InputError(str(path), "the file has changed since it was opened", "open it again")
            unpacked.parent.mkdir(parents=True, exist_ok=True)
            schema = pa.schema([("image", pa.large_binary())])
            with (
                replacing(unpacked, through=unpacked.parent) as part,
                pa.OSFile(str(path)) as packed,
                open_table(packed) as file,
                pa.OSFile(str(part), "wb") as stream,
                pa.ipc.new_file(stream, schema) as writer,
            ):
                for batch in file.iter_batches(64, columns=[leaf], use_threads=False):  # never in memory as a whole
                    images = batch.column(0)
                    images = pc.struct_field(images, "bytes") if pa.types.is_struct(images.type) else images
                    writer.write(pa.record_batch([images.cast(pa.large_binary())], schema))
        return pa.ipc.open_file(pa.memory_map(str(unpacked))).read_all().column(0)
