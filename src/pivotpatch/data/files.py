"""Read annotation files with messages that name the place, and keep picture paths inside their root."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from pivotpatch.errors import InputError

# Only a name with one of these can leave its root: a root, a drive, or a step up.
MAY_ESCAPE = re.compile(r"^[/\\]|:|\.\.")
# Control characters, which break lines and tables, and halves of UTF-16 pairs, which no file can hold.
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark; an empty file is an error."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(str(path), "there is no such file", "check the location") from None
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "check the location and its rights") from None
    if not content or content.isspace():
        raise InputError(str(path), "the file is empty", "copy or download it again")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            str(path),
            f"line {line} is not UTF-8 (byte 0x{content[error.start]:02x} at position {error.start})",
            "save the file as UTF-8",
        ) from None


def read_json(path: Path, *, convert: Callable[[dict[str, object]], object] | None = None) -> object:
    """What a JSON file holds.

    Args:
        path: the file.
        convert: called with each JSON object as soon as it is read, the innermost first; its result takes the
            object's place, so that what nobody needs never piles up in memory.
    """
    text = read_text(path)
    try:
        return json.loads(text, object_hook=convert)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        wrong = f"line {error.lineno}, column {error.colno}: {error.msg}"
        if cut:
            raise InputError(str(path), f"the JSON is cut short ({wrong})", "copy or download it again") from None
        raise InputError(str(path), f"not valid JSON ({wrong})", "correct it there") from None
    except InputError:  # of `convert`
        raise
    except ValueError:  # the one other cause: Python caps the digits of an integer
        raise InputError(str(path), "a number has thousands of digits", "correct it there") from None
    except RecursionError:
        raise InputError(str(path), "the JSON is nested too deeply", "check that it is the right file") from None


def check_name(name: str, *, where: str) -> None:
    """Refuse a label or file name that is blank or holds characters that cannot be written out."""
    if not name.strip() or _UNWRITABLE.search(name):
        raise InputError(where, f"the name {name!r} is blank or holds control characters", "give it a printable name")


def resolve_inside(root: Path, name: str, *, where: str, allow_escape: bool = False) -> None:
    """Refuse a file name that leaves `root`, by its path alone: nothing is looked up, links are not followed.

    Args:
        root: folder that must hold the file.
        name: path relative to `root`, or absolute.
        where: the place that gives the name, for the message.
        allow_escape: accept every name.
    """
    if allow_escape or not MAY_ESCAPE.search(name):
        return
    base = Path(os.path.abspath(root))  # noqa: PTH100 (resolve() would follow links and ask the disk)
    if not Path(os.path.abspath(base / name)).is_relative_to(base):  # noqa: PTH100
        raise InputError(where, f"{name!r} lies outside {root}", "correct the path or set allow_escape=true")
