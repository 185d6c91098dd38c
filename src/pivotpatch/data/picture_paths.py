"""Find pictures by file, folder and pattern, and keep any number of their paths outside of memory."""

import glob
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from urllib.request import url2pathname

import pyarrow as pa

from pivotpatch.data.folder import IMAGE_SUFFIXES
from pivotpatch.errors import InputError

STDIN = "-"
_BATCH = 1 << 16  # paths that are held at once
_COLUMN = "path"


def locate_file(text: str) -> str:
    """The path that a path or a `file://` URL names.

    What follows a `#` or `?` is part of the name: a file on a disk has neither fragments nor queries.

    >>> locate_file("photos/a b.jpg"), locate_file("file:///photos/a%20b#1.jpg")
    ('photos/a b.jpg', '/photos/a b#1.jpg')
    """
    scheme, between, rest = text.partition("://")
    if not between:
        return text
    host, slash, path = rest.partition("/")
    if scheme.lower() != "file" or host.lower() not in ("", "localhost"):
        raise InputError(text, "is not on this machine", "download it and give the file")
    return url2pathname(slash + path)


def find_pictures(words: Sequence[str], *, lines: Iterable[str] = ()) -> Iterator[str]:
    """Paths of pictures, in the order of the words that name them.

    A file is taken whatever its name. Of a folder and all in it, and of what a pattern (`*`, `?`, `[...]`, `**` for
    any depth) matches, files with a picture's suffix are taken in alphabetical order; hidden ones are left out, links
    to folders are not followed. A picture that is named twice comes twice.

    Args:
        words: files and folders, also as `file://` URLs, and patterns; `-` stands for `lines`. One that is not there
            is an error at once, one that has no picture when its turn comes.
        lines: files, one a line; blank lines are left out.
    """
    places = [locate_file(word) for word in words]
    for word, place in zip(words, places, strict=True):
        if word != STDIN and not os.path.lexists(place) and (word != place or not glob.has_magic(place)):
            raise InputError(word, "there is no such file or folder", "check the path")
    return (path for place in places for path in _find(place, lines))


def _find(word: str, lines: Iterable[str]) -> Iterator[str]:
    if word == STDIN:
        yield from (_read_line(path) for line in lines if (path := line.rstrip("\r\n")).strip())
        return
    if os.path.isdir(word):  # noqa: PTH112 (paths stay text here: there may be millions)
        found = _walk(word)
    elif os.path.lexists(word):
        found = iter((word,))
    else:
        matches = glob.iglob(word, recursive=True)  # noqa: PTH207 (may be absolute)
        found = iter(sorted(path for path in matches if _is_picture(path) and os.path.isfile(path)))  # noqa: PTH113
    first = next(found, None)
    if first is None:
        raise InputError(word, "there is no picture in it", f"known kinds: {', '.join(IMAGE_SUFFIXES)}")
    yield first
    yield from found


def _read_line(line: str) -> str:
    with suppress(InputError):  # one picture among many, which fails when it is read
        return locate_file(line)
    return line


def _walk(folder: str) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise InputError(str(error.filename), f"cannot be read ({error.strerror})", "check its rights") from None

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        place = os.path.normpath(place)
        prefix = "" if place == "." else os.path.join(place, "")  # noqa: PTH118
        yield from (prefix + name for name in sorted(files) if not name.startswith(".") and _is_picture(name))


def _is_picture(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


class PathList(NamedTuple):
    """What a list of paths is known by.

    Attributes:
        length: how many there are.
        digest: tells lists with other paths, or in another order, apart.
    """

    length: int
    digest: str


def write_paths(paths: Iterable[str], file: Path) -> PathList:
    """Write paths to an Arrow file as they come."""
    length, digest, rest = 0, hashlib.sha256(), iter(paths)
    schema = pa.schema([(_COLUMN, pa.binary())])  # for a name need not be UTF-8
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_file(stream, schema) as writer:
        while batch := [os.fsencode(path) for path in islice(rest, _BATCH)]:
            writer.write(pa.record_batch([pa.array(batch, pa.binary())], schema))
            digest.update(b"\0".join([*batch, b""]))
            length += len(batch)
    return PathList(length, digest.hexdigest())


class PathStore:
    """Pictures whose paths lie in a file that `write_paths` wrote; they are read where they are, not held."""

    def __init__(self, file: Path, root: Path, *, start: int = 0, count: int | None = None) -> None:
        """Open the file.

        Args:
            file: the paths.
            root: the folder that they start from.
            start: the first path to take.
            count: how many to take, all that follow by default.
        """
        self.file = file
        self.root = root
        self._start = start
        self._paths = pa.ipc.open_file(pa.memory_map(str(file))).read_all().column(0).slice(start, count)

    def __reduce__(self) -> tuple[Callable[[], "PathStore"], tuple[()]]:
        # A worker process opens the file for itself.
        return partial(PathStore, self.file, self.root, start=self._start, count=len(self)), ()

    def __len__(self) -> int:
        return len(self._paths)

    def name(self, index: int) -> str:
        """The path; signs that are not UTF-8 are replaced."""
        path: bytes = self._paths[index].as_py()
        return path.decode("utf-8", "replace")

    def source(self, index: int) -> Path:
        """The file."""
        path: bytes = self._paths[index].as_py()
        try:
            return self.root / path.decode("utf-8")
        except UnicodeDecodeError:
            raise InputError(self.name(index), "its name is not UTF-8", "rename it") from None
