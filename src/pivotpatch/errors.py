"""The one error of the package and the sentence it speaks."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

# Control characters, the two separators of lines that are none, and halves of UTF-16 pairs, which no screen can show.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LONGEST = 240, 320, 400  # characters of where, wrong and todo; a path of 200 stays whole
_QUOTED = 80  # characters of one value or name
_FAULT = 200  # characters of what another library says
_LISTED = 300  # characters of all names that an advice lists

BASE = ("numpy", "onnxruntime", "rich")
"""What is always installed, unless somebody took it away."""
EXTRAS = {
    "multipart": "app",
    "starlette": "app",
    "uvicorn": "app",
    "fsspec": "remote",
    "pillow_heif": "heif",
    "huggingface_hub": "hub",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "ray": "ray",
    "transformers": "transformers",
}
"""The optional part that a module comes with; all others come with `train`."""


class InputError(ValueError):
    """What a caller can mend: `<where>: <what is wrong, with the value>; <what to do>`.

    It is one line of less than 1,000 characters, whatever is quoted in it.
    """

    def __init__(self, where: str, wrong: str, todo: str) -> None:
        parts = [cut(part, limit) for part, limit in zip((where, wrong, todo), _LONGEST, strict=True)]
        super().__init__(f"{parts[0]}: {parts[1]}; {parts[2]}")
        self.parts = parts[0], parts[1], parts[2]

    def __reduce__(self) -> tuple[type["InputError"], tuple[str, str, str]]:
        return type(self), self.parts  # so that it survives the way out of a worker process


def cut(text: str, limit: int = _QUOTED) -> str:
    r"""A text as one line without control characters; what is longer than `limit` loses its middle.

    >>> cut("one\ntwo"), cut("abcdefghijklmnopqrstuvwxyz", 12)
    ('one\\ntwo', 'abcd ... xyz')
    """
    if len(text) > 2 * limit:  # what is dropped need not be looked at
        text = text[:limit] + text[-limit:]
    line = _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)
    if len(line) <= limit:
        return line
    kept = limit - len(" ... ")
    return f"{line[: kept - kept // 2]} ... {line[len(line) - kept // 2 :]}"


def quote(value: object) -> str:
    """A value from outside as a message shows it: as Python writes it, cut where it is long.

    >>> quote("cat"), len(quote("cat" * 1000))
    ("'cat'", 80)
    """
    return cut(repr(value))


def quote_fault(error: BaseException) -> str:
    r"""What another library's error says, as one line; its name where it says nothing.

    >>> quote_fault(ValueError("bad\n  number")), quote_fault(KeyError())
    ('bad number', 'KeyError')
    """
    said = " ".join(str(error)[: 4 * _FAULT].split())
    if not said or isinstance(error, KeyError):  # which says a key alone
        said = ": ".join(filter(None, (type(error).__name__, said)))
    return cut(said if len(said) <= _FAULT else f"{said[: _FAULT - 4]} ...", _FAULT)  # its beginning tells most


@contextmanager
def explaining(
    where: str, wrong: str, todo: str, *, of: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """Turn what another library raises into an `InputError`, with its words in brackets; `of` which kinds."""
    try:
        yield
    except InputError:
        raise
    except of as error:
        raise InputError(where, f"{wrong} ({quote_fault(error)})", todo) from error


def choose_one_of(name: str, known: Iterable[str]) -> str:
    """Advice for an unknown name: the nearest known one first, then the list where it is short.

    >>> choose_one_of("rest101", ["resnet101", "vit"])
    "did you mean 'resnet101'? known: resnet101, vit"
    """
    from difflib import get_close_matches  # rarely needed, and every start would wait for it

    names = sorted(known)
    close = get_close_matches(str(name)[:_QUOTED], names, n=1, cutoff=0.5)
    hint = f"did you mean {quote(close[0])}? " if close else ""
    shown = [cut(each) for each in names[:20]]
    while sum(map(len, shown)) > _LISTED:
        shown.pop()
    more = f", ... ({len(names)} in all)" if len(names) > len(shown) else ""
    return f"{hint}known: {', '.join(shown)}{more}"


def check_known(name: str, known: Iterable[str], *, where: str, what: str) -> None:
    """Refuse a name that is none of the known ones.

    >>> check_known("vit", ["resnet101", "vit"], where="here", what="backbone")
    """
    if name not in known:
        raise InputError(where, f"unknown {what} {quote(name)}", choose_one_of(name, known))


def shorten(names: Iterable[str], *, limit: int = 3) -> str:
    """A few names for a one-line message, each cut where it is long.

    >>> shorten(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(map(cut, listed[:limit])) + more


def import_extra(name: str, extra: str | None = None) -> Any:
    """A module of an optional part, or of `extra`; where it is missing, an error that says how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise explain_missing(error, extra) from None


def explain_missing(error: ImportError, extra: str | None = None) -> InputError:
    """What to install where a module of an optional part is missing.

    >>> explain_missing(ModuleNotFoundError(name="torch.nn")).parts[:2]
    ('torch', 'is not installed')
    """
    name = str(error.name).partition(".")[0]
    todo = f"pip install {name}" if name in BASE else install_hint(extra or EXTRAS.get(name, "train"))
    return InputError(name, "is not installed", todo)


def install_hint(extra: str) -> str:
    """The command that installs an optional part: from the clone, where there is one.

    >>> install_hint("app").startswith("pip install ")
    True
    """
    root = Path(__file__).parents[2]
    if Path(__file__).parent != root / "src" / "pivotpatch" or not (root / "pyproject.toml").is_file():
        return f"pip install 'pivotpatch[{extra}]'"
    return f"pip install -e '{'.' if Path.cwd() == root else root}[{extra}]'"
