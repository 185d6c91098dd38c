"""One way to name a data set everywhere: `scheme:location@split?option=value&option=value`."""

import inspect
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pivotpatch.errors import InputError, choose_one_of
from pivotpatch.runtime.checks import TABLE_KINDS

if TYPE_CHECKING:
    from pivotpatch.data.records import RecordSet

# scheme -> module and function; imported when first asked for, so that `--help` stays quick.
READERS: Mapping[str, str] = {
    "coco": "pivotpatch.data.coco:read_coco",
    "voc": "pivotpatch.data.voc:read_voc",
    "vg": "pivotpatch.data.visual_genome:read_visual_genome",
    "table": "pivotpatch.data.table:read_table",
    "folder": "pivotpatch.data.folder:read_folder",
    "scenes": "pivotpatch.data.scenes:read_scenes",
}


@dataclass(frozen=True)
class Address:
    """A data set's address, taken apart; `str` writes it so that `parse_address` reads the same again."""

    scheme: str
    location: str
    split: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        # Of the signs @ only those that would be taken for the split's, so that folders stay readable.
        location = _quote(self.location, r"[%?]|@(?=[^/]*$)")
        split = f"@{_quote(self.split, '[%?@/]')}" if self.split else ""
        pairs = [f"{_quote(name, '[%&=]')}={_quote(value, '[%&]')}" for name, value in self.options.items()]
        return f"{self.scheme}:{location}{split}" + (f"?{'&'.join(pairs)}" if pairs else "")


def _quote(text: str, signs: str) -> str:
    return re.sub(signs, lambda sign: f"%{ord(sign[0]):02X}", text)


def parse_address(text: str) -> Address:
    """Take an address apart; `%3F` and the like stand for the signs that an address itself is written with.

    >>> parse_address("voc:/data/VOCdevkit@2007-test?difficult=unknown")
    Address(scheme='voc', location='/data/VOCdevkit', split='2007-test', options={'difficult': 'unknown'})
    >>> parse_address("table:why%3F.csv").location
    'why?.csv'
    """
    scheme, colon, rest = text.partition(":")
    if not colon or scheme not in READERS:
        wrong = f"unknown scheme {scheme!r}" if colon else "is neither an address nor a table or folder that is there"
        todo = choose_one_of(scheme, READERS) if colon else "check the path"
        if os.path.isfile(text):  # noqa: PTH113 (False for a name that is too long)
            wrong = f"is no table ({', '.join(TABLE_KINDS)})"
            todo = f"for COCO's annotations write coco:{text}" if text.lower().endswith(".json") else "save it as CSV"
        raise InputError(f"address {text!r}", wrong, todo)
    rest, _, query = rest.partition("?")
    location, at, split = rest.rpartition("@")
    if not at or "/" in split:  # an @ inside a folder's name
        location, split = rest, ""
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    options = {unquote(name): unquote(value) for name, _, value in pairs}
    return Address(scheme, unquote(location), unquote(split) or None, options)


def read_address(word: str) -> str | None:
    """The address that a word is, or that the path of a table or folder means; None where it is neither.

    A path may have a split and options as an address has: `photos.csv@train?image=path`.

    >>> read_address("coco:/data@val2017"), read_address("photos.csv?image=path"), read_address("photos")
    ('coco:/data@val2017', 'table:photos.csv?image=path', None)
    """
    if re.match("[a-zA-Z]{2,}:", word):
        return word
    whole, parsed = Address("table", word), parse_address(f"table:{word}")
    try:
        # A file that is there may have any sign in its name.
        for address in (whole, parsed) if Path(word).exists() else (parsed, whole):
            path = Path(address.location)
            if path.is_dir() or path.suffix.lower() in TABLE_KINDS:
                return str(replace(address, scheme="folder" if path.is_dir() else "table"))
    except OSError:  # too long for the name of a file
        pass
    return None


def choose_split(split: str | None, known: Collection[str], *, where: str, todo: str = "") -> str:
    """The split, where it is one of those known; an error says which are, or what to do where there is none."""
    if split is None or split not in known:
        wrong = "no split is given" if split is None else f"there is no split {split!r}"
        raise InputError(where, wrong, choose_one_of(split or "", known) if known else todo)
    return split


def open_records(address: str) -> "RecordSet":
    """Read the data set at an address, or the table or folder at a path; the address becomes its name."""
    from pydantic import ValidationError, validate_call

    address = read_address(address) or address
    parsed = parse_address(address)
    module, _, function = READERS[parsed.scheme].partition(":")
    reader = getattr(import_module(module), function)
    known = [p.name for p in inspect.signature(reader).parameters.values() if p.kind is p.KEYWORD_ONLY]
    try:
        records: RecordSet = validate_call(reader)(parsed.location, parsed.split, **parsed.options)
    except ValidationError as error:
        fault = error.errors()[0]
        name = str(fault["loc"][0])
        wrong = f"option {name}: value {parsed.options[name]!r}: {fault['msg']}"
        todo = "correct it" if name in known else choose_one_of(name, known)
        raise InputError(f"address {address!r}", wrong, todo) from None
    except OSError as error:
        where, wrong = str(error.filename or address), f"cannot be read ({error.strerror or error})"
        raise InputError(where, wrong, "check the location and its rights") from None
    records.name = address
    return records
