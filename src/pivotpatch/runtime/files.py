"""Files: find images, read text and JSON with messages that name the place, keep paths inside their root."""

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from pivotpatch.errors import InputError, explaining, install_hint, quote_fault

Kind = TypeVar("Kind")

HEIF = (".heic", ".heif", ".hif")
"""Suffixes of images that need the extra `heif`."""
_CAMERAS = "3fr arw cr2 cr3 crw dng gpr iiq nef nrw orf pef raf raw rw2 rwl sr2 srw x3f"
RAW = tuple(f".{name}" for name in _CAMERAS.split())
"""Suffixes of what a camera's sensor saw, which is no image yet."""
OTHER = (".jxl", ".psd")
"""Suffixes of images in formats that are not read."""
VIDEO = (".3gp", ".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpg", ".mts", ".webm", ".wmv")
"""Suffixes of videos."""
TABLES = (".csv", ".tsv", ".json", ".jsonl")
"""Suffixes of tables, which bulk tagging does not read."""
_ALWAYS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".jp2")
STDIN = "-"
# Only a name with one of these can leave its root: a root, a drive, or a step up.
MAY_ESCAPE = re.compile(r"^[/\\]|:|\.\.")
# Control characters, which break lines and tables, and halves of UTF-16 pairs, which no file can hold.
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark; an empty file is an error."""
    try:
        text = path.read_text("utf-8-sig")
        fault = "" if text.strip() else "the file is empty"
    except FileNotFoundError:
        fault = "there is no such file"
    except (OSError, UnicodeDecodeError) as error:
        fault = f"cannot be read ({quote_fault(error)})"
    if fault:
        raise InputError(str(path), fault, "check the location, or copy or write the file again")
    return text


def read_json(path: Path, *, convert: Callable[[dict[str, object]], object] | None = None) -> object:
    """What a JSON file holds; `convert` replaces each object as soon as it is read, so that memory stays small."""
    text, todo = read_text(path), "correct it, or copy or download the file again"
    with explaining(str(path), "not valid JSON", todo, of=(ValueError, RecursionError)):
        return json.loads(text, object_hook=convert)


def read_names(path: Path) -> list[str]:
    """Names of labels in order, from a JSON list or a text file with one per line."""
    if path.suffix.lower() != ".json":
        return [line.strip() for line in read_text(path).split("\n") if line.strip()]
    listed = read_json(path)
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        raise InputError(str(path), "it is not a JSON list of label names", 'write ["cat", "dog"], or a name per line')
    return listed


def check_name(name: str, *, where: str) -> None:
    """Refuse a label or file name that is blank or holds characters that cannot be written out."""
    if not name.strip() or _UNWRITABLE.search(name):
        raise InputError(where, f"the name {name!r} is blank or holds control characters", "give it a printable name")


def resolve_inside(root: Path, name: str, *, where: str) -> None:
    """Refuse a file name that leaves `root`, by its path alone: nothing is looked up, links are not followed."""
    if not MAY_ESCAPE.search(name):
        return
    base = Path(os.path.abspath(root))  # noqa: PTH100 (resolve() would follow links and ask the disk)
    if not Path(os.path.abspath(base / name)).is_relative_to(base):  # noqa: PTH100
        raise InputError(where, f"{name!r} lies outside {root}", "correct the path, or say TABLE?allow_escape=true")


@cache
def image_suffixes() -> tuple[str, ...]:
    """Suffixes of images that can be read here, which depends on what is installed."""
    return _ALWAYS if find_spec("pillow_heif") is None else (*_ALWAYS, *HEIF)


@cache
def unread_suffixes() -> tuple[str, ...]:
    """Suffixes of files that hold images but cannot be read here; `describe_unread` says why."""
    return tuple(suffix for suffix in (*HEIF, *RAW, *OTHER, *VIDEO) if suffix not in image_suffixes())


def are_same(name: str, path: Path | None) -> bool:
    """Whether two names lead to one file that is there."""
    with suppress(OSError, ValueError):  # the latter of a name that no file can have
        return path is not None and path.samefile(name)
    return False


def is_image(name: str) -> bool:
    """Whether a file's suffix is that of an image."""
    return name.lower().endswith(image_suffixes())


def describe_unread(unread: Mapping[str, int]) -> list[str]:
    """A line for each kind of files that were left out, and what would read them.

    >>> describe_unread({".nef": 1, ".mov": 1, ".mp4": 1})
    ['1 raw file was not read; export it as JPEG first', '2 videos were not read; only images get tags']
    """
    lines = []
    for suffixes, kind, todo in (
        (HEIF, "HEIC file", f"{install_hint('heif')} reads THEM"),
        (RAW, "raw file", "export THEM as JPEG first"),
        (OTHER, "JXL or PSD file", "export THEM as JPEG first"),
        (VIDEO, "video", "only images get tags"),
    ):
        count = sum(unread.get(suffix, 0) for suffix in suffixes)
        many, them = (f"1 {kind} was", "it") if count == 1 else (f"{count:,} {kind}s were", "them")
        lines += [f"{many} not read; {todo.replace('THEM', them)}"] if count else []
    return lines


def walk_files(folder: str, *, skip: bool = False) -> Iterator[str]:
    """Paths of all files below a folder, sorted per folder; hidden ones and links to folders are left out.

    A folder that cannot be listed is an error; with `skip`, one below the first comes as a path, after all files.
    """
    lost: list[str] = []

    def refuse(error: OSError) -> None:
        if not skip or error.filename == folder:
            raise InputError(str(error.filename), f"cannot be read ({error.strerror})", "check its rights") from None
        lost.append(os.path.normpath(error.filename))

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        place = os.path.normpath(place)
        prefix = "" if place == "." else os.path.join(place, "")  # noqa: PTH118 (paths stay text: there may be millions)
        yield from (prefix + name for name in sorted(files) if not name.startswith("."))
    yield from lost


def no_image(where: str, unread: Mapping[str, int] | None = None) -> InputError:
    """The error of a folder or pattern without images; `unread` counts what it has instead, by suffix."""
    if unread:
        return InputError(where, "there is no image in it that can be read", ", ".join(describe_unread(unread)))
    return InputError(where, "there is no image in it", f"known kinds: {', '.join(image_suffixes())}")


def find_images(
    words: Sequence[str], *, lines: Iterable[str] = (), unread: Counter[str] | None = None
) -> Iterator[str]:
    """Paths of images, in the order of the words that name them.

    A file is taken whatever its name. Of a folder and all in it, and of what a pattern (`*`, `?`, `[...]`, `**` for
    any depth) matches, files with an image's suffix are taken in alphabetical order; hidden ones are left out, links
    to folders are not followed. A folder in it that cannot be listed comes as a path that is no image, at the end. An
    image that several words name comes once.

    Args:
        words: files, folders and patterns; `-` stands for `lines`. One that is not there is an error at once, one that
            has no image when its turn comes.
        lines: files, one per line; blank lines are left out.
        unread: counts the files of `unread_suffixes` that were left out, as they are passed.
    """
    for word in words:
        if word != STDIN and not os.path.lexists(word) and not glob.has_magic(word):
            todo = "download it and give its path" if "://" in word else "check the path"
            raise InputError(word, "there is no such file or folder", todo)
        if word.lower().endswith(TABLES) and os.path.isfile(word):  # noqa: PTH113
            todo = "give its images, or their folder; predict --out also takes a .txt or .parquet file of them"
            raise InputError(word, "is a table, not an image", todo)
    counts: Counter[str] = Counter() if unread is None else unread
    found = (path for word in words for path in _find(word, lines, counts))
    return drop_repeated(found, words)


def drop_repeated(found: Iterator[Kind], words: Sequence[str]) -> Iterator[Kind]:
    """What some words name, each image once; nothing is remembered where none of them lies in another, or is a list."""
    if len(words) > 1 and any(word == STDIN or word.lower().endswith((".txt", ".parquet")) for word in words):
        return _drop(found)
    # Of a pattern its folder; what begins as another does stands behind it.
    fixed = (str(Path(f"{re.split(r'[*?[]', word)[0]}x").parent) if glob.has_magic(word) else word for word in words)
    places = sorted(Path(os.path.abspath(place)).parts for place in fixed)  # noqa: PTH100
    return found if not any(b[: len(a)] == a for a, b in pairwise(places)) else _drop(found)


def _drop(found: Iterator[Kind]) -> Iterator[Kind]:
    seen = set[object]()
    for each in found:
        key = os.path.abspath(each) if isinstance(each, str) else each  # noqa: PTH100
        if key not in seen:
            seen.add(key)
            yield each


def _find(word: str, lines: Iterable[str], unread: Counter[str]) -> Iterator[str]:
    if word == STDIN:
        yield from (path for line in lines if (path := line.rstrip("\r\n")).strip())
        return
    is_folder = os.path.isdir(word)  # noqa: PTH112
    if os.path.lexists(word) and not is_folder:
        yield word
        return
    matches = () if is_folder else filter(os.path.isfile, sorted(glob.glob(word, recursive=True)))  # noqa: PTH207
    places = walk_files(word, skip=True) if is_folder else matches
    found, others = False, Counter[str]()
    for path in places:
        if is_image(path) or (is_folder and os.path.isdir(path)):  # noqa: PTH112 (one that cannot be listed)
            found = True
            yield path
        elif (suffix := os.path.splitext(path)[1].lower()) in unread_suffixes():  # noqa: PTH122
            others[suffix] += 1
            unread[suffix] += 1
    if not found:
        raise no_image(word, others)
