"""Small copies of pictures as text that a page can hold, as many as there is room for."""

from base64 import b64encode
from io import BytesIO
from typing import NamedTuple

from markupsafe import Markup
from PIL import Image

from pivotpatch.data.decoding import decode_image
from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores

SIDE = 240
"""Pixels of the longer side."""
_QUALITIES = (75, 40)  # of JPEG; the second for pictures of noise, which are many times as large
_LARGE = 24_000


class Thumbnail(NamedTuple):
    """A small copy.

    Attributes:
        address: a `data:` address; empty where the picture cannot be shown.
        width: pixels.
        height: pixels.
        problem: why it cannot be shown.
    """

    address: Markup
    width: int
    height: int
    problem: str = ""


class Album:
    """Makes small copies of the pictures of a data set, until a number or a size is reached.

    Args:
        scores: whose rows are asked for; they must know their places in `records`.
        records: the pictures.
        count: the most pictures.
        room: the most characters of all addresses together.
    """

    def __init__(self, scores: Scores, records: RecordSet | None, *, count: int, room: int) -> None:
        self.scores = scores
        self.records = records
        self.count = count
        self.room = room
        self._made: dict[int, Thumbnail] = {}

    def copy(self, row: int) -> Thumbnail | None:
        """A small copy of the picture in a row of the scores; None where there is none, or no room for it."""
        records, indices = self.records, self.scores.indices
        if records is None or indices is None or self.count < 1:
            return None
        made = self._made.get(row) or _shrink(records, int(indices[row]))
        self._made[row] = made
        if len(made.address) > self.room:
            return None
        self.count -= 1
        self.room -= len(made.address)
        return made


def _shrink(records: RecordSet, index: int) -> Thumbnail:
    place = records.place(index)
    try:
        pixels = decode_image(records.images.source(place), name=records.images.name(place))
    except InputError as error:
        return Thumbnail(Markup(), 0, 0, error.parts[1])
    small = Image.fromarray(pixels)
    small.thumbnail((SIDE, SIDE))
    for quality in _QUALITIES:
        written = BytesIO()
        small.save(written, "JPEG", quality=quality, optimize=True)
        if written.tell() <= _LARGE:
            break
    address = Markup("data:image/jpeg;base64,{}").format(b64encode(written.getvalue()).decode("ascii"))
    return Thumbnail(address, *small.size)
