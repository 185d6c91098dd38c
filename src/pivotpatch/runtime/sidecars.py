"""Tags in files beside an image, which is never touched itself: XMP for photo managers, a caption, or JSON.

`photo.jpg` gets `photo.jpg.xmp`, as digiKam, darktable, Immich and PhotoPrism name it: `photo.xmp` could be meant for
`photo.png` too. Where only `photo.xmp` is there, the name that Adobe's programs use beside raw files, tags go into it.
The caption is `photo.txt`, where programs that train on captions look for it; JSON is `photo.jpg.json`.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from pivotpatch.errors import InputError, check_known
from pivotpatch.runtime.xmp import EMPTY, LARGEST, leaf_of, merge_tags, read_record
from pivotpatch.writing import explain_disk_faults, flush, replacing

Kind = Literal["xmp", "txt", "json"]
KINDS: tuple[str, ...] = get_args(Kind)
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def find_sidecar(image: Path, kind: Kind) -> Path:
    """The file that holds an image's tags, or will."""
    check_known(kind, KINDS, where="sidecar", what="kind")
    if kind == "txt":
        return image.with_suffix(".txt")
    beside = image.with_name(f"{image.name}.{kind}")
    short = image.with_suffix(".xmp")
    if kind == "json" or beside.exists() or short.is_symlink() or not short.is_file() or short == image:
        return beside
    record = read_record(_read(short) or EMPTY, where=str(short))
    is_others = record is not None and record.suffix not in (None, _suffix_of(image))  # such as that of photo.png
    return beside if is_others else short


def write_sidecar(image: Path, tags: Sequence[tuple[str, float]], kind: Kind, *, overwrite: bool = False) -> bool:
    """Write an image's tags beside it; tells whether the file changed, and leaves it alone where it would not.

    XMP is merged with what is there: a later run takes out only tags that an earlier one has added.

    Args:
        image: its file.
        tags: labels and probabilities, in order. `animals|cat` is a hierarchy for XMP, and `cat` for the rest but JSON.
        kind: `xmp`, `txt` or `json`.
        overwrite: replace a caption that says something else, and JSON of another program; else they are an error.
    """
    with explain_disk_faults(image.parent):  # a name that is just short enough for the image is none for a sidecar
        path = find_sidecar(image, kind)
        if path.is_symlink():
            raise InputError(str(path), "is a link; what it leads to is not ours to change", "replace it by a file")
        if path.exists() and image.exists() and path.samefile(image):
            wrong, todo = "is the image itself", "give it a name that ends as its kind does, such as .jpg"
            raise InputError(str(path), wrong, todo)
    before = _read(path)
    cleaned = [(label, prob) for name, prob in tags if (label := clean_label(name))]
    labels = [label for label, _ in cleaned]
    if kind == "xmp":
        after = merge_tags(before or EMPTY, labels, suffix=_suffix_of(image), where=str(path))
    elif kind == "txt":
        after = f"{', '.join(dict.fromkeys(map(leaf_of, labels)))}\n".encode()
    else:
        listed = [{"label": label, "prob": round(float(prob), 6)} for label, prob in cleaned]
        text = json.dumps({"image": image.name, "tags": listed}, ensure_ascii=False, indent=2)
        after = f"{text}\n".encode("utf-8", "backslashreplace")  # a name that is no Unicode becomes JSON's escapes
    if after == before:
        return False
    is_ours = kind == "xmp" or before is None or (kind == "json" and _is_ours(before))
    if not is_ours and not overwrite:
        raise InputError(str(path), "is there already and says something else", "move it away, or overwrite it")
    _write(path, after)
    return True


def is_tagged(image: Path, kind: Kind) -> bool:
    """Whether a run has been here, be it one that found nothing; False where the sidecar cannot be read.

    A caption is taken for ours.
    """
    try:
        path = find_sidecar(image, kind)
        content = _read(path)
        if content is None or kind == "txt":
            return content is not None
        return _is_ours(content) if kind == "json" else read_record(content, where=str(path)) is not None
    except (OSError, ValueError):  # the latter also of a name that no file can have
        return False


def clean_label(name: str) -> str:
    r"""A label as one line that every kind of file can hold; parts of a hierarchy without spaces around them.

    >>> clean_label(" hot\tdog\x00"), clean_label("animals | cat|")
    ('hot dog', 'animals|cat')
    """
    parts = (" ".join(_NOT_IN_XML.sub(" ", part).split()) for part in name.split("|"))
    return "|".join(filter(None, parts))


def _suffix_of(image: Path) -> str:
    return clean_label(image.suffix.lower())


def _is_ours(content: bytes) -> bool:
    """Whether `write_sidecar` wrote a JSON file; False for that of another program."""
    try:
        said = json.loads(content)
        return said.keys() == {"image", "tags"} and all(tag.keys() == {"label", "prob"} for tag in said["tags"])
    except (ValueError, RecursionError, AttributeError, TypeError):
        return False


def _read(path: Path) -> bytes | None:
    with explain_disk_faults(path.parent):
        try:
            with path.open("rb") as file:
                return file.read(LARGEST + 1)
        except FileNotFoundError:
            return None


def _write(path: Path, content: bytes) -> None:
    with explain_disk_faults(path.parent), replacing(path) as written:
        written.unlink(missing_ok=True)  # what a crash has left, or a link, which must not be followed
        with written.open("xb") as file:
            file.write(content)
        if path.exists():  # somebody's work may be in it
            shutil.copymode(path, written)
            flush(written)
