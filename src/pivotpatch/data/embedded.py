"""Images that lie inside Parquet files, fetched one at a time without holding them in memory."""

import hashlib
import os
import struct
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pivotpatch.data.table_files import open_parquet
from pivotpatch.errors import InputError, choose_one_of

_UNPACKING = Lock()  # else each thread that finds a row group still packed unpacks all of it


def cache_folder() -> Path:
    """Where unpacked images are kept: `PIVOTPATCH_CACHE`, or `pivotpatch` in the user's cache folder."""
    own = os.environ.get("PIVOTPATCH_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pivotpatch"


class RowGroup(NamedTuple):
    """A row group of a Parquet file."""

    path: Path
    number: int
    before: int  # rows of the file that come before
    rows: int

    def values(self, leaf: str) -> Iterator[pa.Scalar]:
        """The values of a column or `struct.bytes`, read a few at a time: the group is never in memory as a whole."""
        with pq.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False) as file:
            for batch in file.iter_batches(64, row_groups=[self.number], columns=[leaf], use_threads=False):
                column = batch.column(0)
                yield from pc.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column


def list_row_groups(files: Sequence[Path], leaf: str) -> list[RowGroup]:
    """The row groups of Parquet files that hold rows, one file after the other."""
    groups = []
    for path in files:
        with open_parquet(path) as file:
            metadata, before = file.metadata, 0
        leaves = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        if leaf not in leaves:
            raise InputError(str(path), f"there is no column {leaf!r}", choose_one_of(leaf, leaves))
        for number in range(metadata.num_row_groups):
            rows = metadata.row_group(number).num_rows
            if rows:
                groups.append(RowGroup(path, number, before, rows))
            before += rows
    return groups


class EmbeddedStore:
    """Encoded images in a binary column of Parquet files; one that is null has no bytes.

    Parquet can only be read a row group at a time. The first image asked of a row group unpacks the group into a
    file of the cache folder; every image is then one short read there. So opening is quick, memory stays flat however
    large the files are, and no file is held open that worker processes would share. The cache may be deleted at any
    time.

    Attributes:
        groups: the row groups, in the order of the rows.
        leaf: the column of bytes, as Parquet names it: `image` or `image.bytes`.
        names: the images' names; None names them by file and row.
        cache: folder of the unpacked row groups.
    """

    def __init__(self, groups: Sequence[RowGroup], leaf: str, *, names: pa.Array | None, cache: Path) -> None:
        self.groups = groups
        self.leaf = leaf
        self.names = names
        self.cache = cache
        self._starts = np.cumsum([0, *(group.rows for group in groups)]).tolist()
        self._keys = {path: self._key(path) for path in {group.path for group in groups}}

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
        unpacked = self.cache / self._keys[group.path] / f"{group.number}.images"
        with suppress(FileNotFoundError, NotADirectoryError):
            return _read_image(unpacked, row)
        with _UNPACKING:
            with suppress(FileNotFoundError, NotADirectoryError):
                return _read_image(unpacked, row)  # unpacked while this thread waited
            self._unpack(group, unpacked)
        return _read_image(unpacked, row)

    def _find(self, index: int) -> tuple[RowGroup, int]:
        at = bisect_right(self._starts, index) - 1
        return self.groups[at], index - self._starts[at]

    def _key(self, path: Path) -> str:
        """A folder name that changes with the file, so that no stale image is ever read."""
        state = path.stat()
        text = f"{path.resolve()}\n{state.st_size}\n{state.st_mtime_ns}\n{self.leaf}"
        return f"{path.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def _unpack(self, group: RowGroup, unpacked: Path) -> None:
        if not group.path.exists() or self._key(group.path) != self._keys[group.path]:
            raise InputError(str(group.path), "the file has changed since it was opened", "open it again")
        temporary: Path | None = None
        try:
            unpacked.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=unpacked.parent, suffix=".part", delete=False) as file:
                temporary = Path(file.name)
                _write_images(file, group, self.leaf)
                file.flush()
                os.fsync(file.fileno())  # else a crash may leave the new name on a file without its content
            temporary.replace(unpacked)
            pa.default_memory_pool().release_unused()
        except (pa.ArrowException, OSError) as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            wrong = f"images of {group.path} cannot be unpacked here ({error})"
            todo = "set PIVOTPATCH_CACHE to a folder with room"
            if getattr(error, "errno", None) is None:  # Arrow's own complaint about what it reads
                todo = "the file is damaged or cut short: copy or write it again"
            raise InputError(str(self.cache), wrong, todo) from None


def _write_images(file: IO[bytes], group: RowGroup, leaf: str) -> None:
    """Write where each image starts and the last one ends, then the images."""
    starts = np.zeros(group.rows + 1, dtype="<i8")
    file.seek(starts.nbytes)
    for row, image in enumerate(group.values(leaf)):
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
