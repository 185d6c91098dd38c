"""Images that are no files of their own: in tar shards and Parquet files, and at remote addresses (fsspec).

`find_sources` lists them by where they lie, so that a worker anywhere reads one image without what is around it.
"""

import glob
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from pivotpatch.errors import InputError, explaining, import_extra, quote_fault
from pivotpatch.runtime.files import STDIN, drop_repeated, find_images, is_image, no_image

MAX_BYTES = 1 << 28
"""Bytes of an encoded image that is held whole: one that lies in a shard or far away."""
COLUMNS = ("image", "bytes", "jpg", "jpeg", "png", "webp", "content", "picture", "path", "file_name", "file", "url")
"""Columns of a Parquet file with images, or their names; the first that is there."""
PACKED = (".tar", ".parquet", ".txt")
"""Suffixes of what holds images or their names: WebDataset shards, tables, lists."""
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]+(::[A-Za-z][\w+.-]+)*://")
_BLOCK = 512  # bytes that a tar file consists of
_AT_ONCE = 32  # images of a Parquet file that are read at once
# Of Arrow, or of a file system, of which each has its own.
_explaining = partial(explaining, wrong="cannot be read", todo="check the path, or copy it again")


class Source(NamedTuple):
    """Where an image lies in a file: from byte `at` on in a tar shard, or in row `at` of a Parquet file (`size` -1)."""

    name: str
    file: str
    at: int
    size: int


Found = str | Source | InputError
"""An image in a list: a file or an address, a place in a file, or why some could not be found."""


class Opened(NamedTuple):
    """An image and how to read it: a file or its bytes, or an `InputError`."""

    name: str
    read: Callable[[], Path | bytes]


def is_address(name: str) -> bool:
    """Whether a name is one for fsspec, such as s3://bucket/a.jpg.

    >>> is_address("s3://bucket/a.jpg"), is_address("C:/a.jpg")
    (True, False)
    """
    return _ADDRESS.match(name) is not None


def find_sources(
    words: Sequence[str], *, lines: Iterable[str] = (), unread: Counter[str] | None = None
) -> Iterator[Found]:
    """Images in the order of the words that name them, as `find_images` finds them, and in more kinds of places.

    A .tar file (also a pattern of them) stands for its images, a .parquet file for those of its first column of
    `COLUMNS`, a .txt file for the names in it, one per line. All that, folders, patterns and images may be addresses
    that fsspec knows. A shard that is damaged counts as one more image, which cannot be read.
    """
    find_images([word for word in words if not is_address(word)])  # refuses at once what is not there
    if any(map(is_address, words)):
        import_extra("fsspec")
    return drop_repeated((source for word in words for source in _find(word, lines, unread)), words)


def _find(word: str, lines: Iterable[str], unread: Counter[str] | None) -> Iterator[Found]:
    if is_address(word):
        yield from _find_remote(word)
    elif word == STDIN or not word.lower().endswith(PACKED) or os.path.isdir(word):  # noqa: PTH112
        yield from find_images([word], lines=lines, unread=unread)
    else:
        files = [word] if os.path.lexists(word) else sorted(glob.glob(word, recursive=True))  # noqa: PTH207
        if not files:
            raise no_image(word)
        for file in files:
            yield from _unpack(file)


def _find_remote(word: str) -> Iterator[Found]:
    """Images at an address of a file, a folder or a pattern."""
    found = False
    with explaining(word, "cannot be listed", "check the address and your rights"):  # each file system has its errors
        system, place = import_extra("fsspec").core.url_to_fs(word)
        if glob.has_magic(place):
            files = iter(sorted(system.glob(place)))
            files = files if place.lower().endswith(PACKED) else filter(is_image, files)
        elif not place.lower().endswith(PACKED) and system.isdir(place):
            walk = system.walk(place, on_error="raise")
            files = (f"{folder}/{name}" for folder, _, names in walk for name in sorted(names))
            files = (file for file in files if is_image(file))
        else:
            files = iter([place])
        for file in files:
            found = True
            address = system.unstrip_protocol(file)
            yield from _unpack(address) if file.lower().endswith(PACKED) else (address,)
    if not found:
        raise no_image(word)


def _unpack(file: str) -> Iterator[Found]:
    """What lies in a shard, a table or a list; at the end an error where it is damaged."""
    unpack = {".tar": _list_tar, ".parquet": _list_parquet, ".txt": _list_lines}[os.path.splitext(file)[1].lower()]  # noqa: PTH122
    try:
        with _open(file) as stream:
            yield from unpack(stream, file)
    except InputError:
        raise
    except Exception as error:  # of tarfile, Arrow, or a file system
        yield InputError(file, f"cannot be read to its end ({quote_fault(error)})", "copy or write it again")


def _list_lines(stream: IO[bytes], _file: str) -> Iterator[str]:
    for line in stream:
        name = line.decode("utf-8", "surrogateescape").rstrip("\r\n").removeprefix("\ufeff")  # as Windows begins
        if name.strip():
            yield name


def _list_tar(stream: IO[bytes], file: str) -> Iterator[Source]:
    end = 0
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        for member in tar:
            end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
            hidden = PurePosixPath(member.name).name.startswith(".")  # as of macOS
            if member.isreg() and not member.sparse and is_image(member.name) and not hidden:
                yield Source(f"{file}/{member.name}", file, member.offset_data, member.size)
            tar.members = []  # type: ignore[attr-defined]  # else it holds all it has seen
    stream.seek(end)
    if any(stream.read(_BLOCK)):  # tarfile takes damage amid a shard for its end
        raise tarfile.ReadError(f"no header at byte {end}")


def _list_parquet(stream: IO[bytes], file: str) -> Iterator[Found]:
    table = open_table(stream)
    column, embedded = _choose_column(table.schema_arrow, file)
    if embedded:
        yield from (Source(f"{file}#{row + 1}", file, row, -1) for row in range(table.metadata.num_rows))
        return
    for batch in table.iter_batches(columns=[column]):
        yield from (name if isinstance(name, str) else "" for name in batch.column(0).to_pylist())


def open_table(stream: IO[bytes]) -> Any:
    """A Parquet file; only a large one is read by pieces, for there Arrow makes room for all that a page claims."""
    pieces = 1 << 20 if stream.seek(0, os.SEEK_END) > MAX_BYTES else 0
    return import_extra("pyarrow.parquet", "parquet").ParquetFile(stream, buffer_size=pieces, pre_buffer=False)


def _choose_column(schema: Any, file: str) -> tuple[str, bool]:
    """The column of images, as Parquet names it, and whether it holds their bytes or their names."""
    for name in filter(schema.names.__contains__, COLUMNS):
        pixels, _ = find_fields(schema, name)
        if pixels is not None or _name_type(schema.field(name).type) in ("string", "large_string", "string_view"):
            return pixels or name, pixels is not None
    raise InputError(file, "has no column of images", f"call it one of {', '.join(COLUMNS)}")


def find_fields(schema: Any, column: str) -> tuple[str | None, str | None]:
    """As Parquet names them, the encoded images of a column (None where they are files) and their paths or names."""
    kind = schema.field(column).type
    fields = [kind.field(place).name for place in range(kind.num_fields)] if str(kind).startswith("struct") else []
    if "bytes" in fields:
        return f"{column}.bytes", f"{column}.path" if "path" in fields else None
    return (column, None) if "binary" in _name_type(kind) else (None, column)


def _name_type(kind: Any) -> str:
    """Of values where they are a dictionary, as pandas writes a category; without what a type holds."""
    return re.split("[<,]", str(kind).removeprefix("dictionary<values="))[0]


def open_sources(listed: Iterable[Any], root: Path) -> Iterator[Opened]:
    """How to read images of a list that was written as JSON; relative names are those below `root`.

    Files and shards may be read by many threads at once; rows of tables are read here, from the first one on.
    """
    rows = _Rows(root)
    for each in listed:
        if isinstance(each, str) and not is_address(each):
            yield Opened(each, partial(Path, root, each))
        elif isinstance(each, dict):
            yield Opened(each["error"][0], partial(_give, InputError(*each["error"]), ""))
        else:
            source = Source(each, each, 0, MAX_BYTES + 1) if isinstance(each, str) else Source(*each)
            held = source.size < 0
            read = partial(_give, rows.read(source), source.name) if held else partial(_read_bytes, source, root)
            yield Opened(source.name, read)


def to_json(found: object) -> object:
    """What stands in a list written as JSON for an error."""
    assert isinstance(found, InputError)
    return {"error": found.parts}


def _open(file: str, root: Path | None = None) -> IO[bytes]:
    """A local or remote file, to be read."""
    if is_address(file):
        return import_extra("fsspec").open(file, "rb").open()
    return (Path(file) if root is None else root / file).open("rb")


def _read_bytes(source: Source, root: Path) -> bytes:
    """An image in a tar shard, or a remote file that is one."""
    end = source.at + min(source.size, MAX_BYTES + 1)
    with _explaining(source.name):
        if is_address(source.file):
            system, place = import_extra("fsspec").core.url_to_fs(source.file)
            content = system.cat_file(place, start=source.at, end=end)
        else:
            with (root / source.file).open("rb") as stream:
                stream.seek(source.at)
                content = stream.read(end - source.at)
    if source.name != source.file and len(content) < end - source.at:
        raise InputError(source.name, "the shard ends before it", "copy or write the shard again")
    return _give(content, source.name)


def _give(content: bytes | InputError | None, name: str) -> bytes:
    """What was read, unless it is none or too long."""
    if isinstance(content, InputError):
        raise content
    if content is None:
        raise InputError(name, "there is no image in this row", "fill it, or leave the row out")
    if len(content) > MAX_BYTES:
        raise InputError(name, f"has more than the limit of {MAX_BYTES:,} bytes", "shrink the image")
    return content


class _Rows:
    """Reads images of Parquet files by rows, one after the other, a few at a time."""

    def __init__(self, root: Path) -> None:
        self._root, self._next = root, ("", -1)
        self._group = self._failed = "", range(0)
        self._values: Iterator[bytes | None] = iter(())

    def read(self, source: Source) -> bytes | InputError | None:
        """The bytes of a row, or why there are none."""
        file, rows = self._failed
        if file == source.file and source.at in rows:  # what cannot be read is tried once
            return InputError(source.name, "lies in a damaged part of the table", "copy or write the table again")
        try:
            with _explaining(source.name):
                if self._next != (source.file, source.at):
                    self._values = self._stream(source.file, source.at)
                self._next = source.file, source.at + 1
                return next(self._values)
        except InputError as error:
            self._failed, self._next = self._group, ("", -1)
            return error

    def _stream(self, file: str, at: int) -> Iterator[bytes | None]:
        """Images of a table from a row on."""
        self._group, first = (file, range(at, at + 1)), 0
        with _open(file, self._root) as stream:
            table = open_table(stream)
            column, _ = _choose_column(table.schema_arrow, file)
            for group in range(table.num_row_groups):
                rows = range(first, first + table.metadata.row_group(group).num_rows)
                first = rows.stop
                if at < rows.stop:
                    self._group, place = (file, rows), rows.start
                    for batch in table.iter_batches(_AT_ONCE, row_groups=[group], columns=[column], use_threads=False):
                        values = batch.column(0)
                        values = values.field("bytes") if hasattr(values, "field") else values
                        yield from (value.as_py() for value in values[max(at - place, 0) :])
                        place += len(values)
        raise InputError(file, "has fewer rows than when it was listed", "begin anew with --overwrite")
