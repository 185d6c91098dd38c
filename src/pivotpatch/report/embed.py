"""What a page holds besides words: figures as SVG in the colours of the page, and small copies of images."""

import re
import warnings
from base64 import b64encode
from io import BytesIO
from typing import NamedTuple
from xml.etree import ElementTree as ET

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image

from pivotpatch.data.decoding import decode_image
from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores

LARGEST = 200_000
"""Characters of an SVG figure; a larger one is embedded as pixels."""
SIDE = 240
"""Pixels of the longer side of an image."""
_SMALLEST = 0.68  # of its own size, to which a figure may shrink on a narrow screen before it scrolls
_QUALITIES = (75, 40)  # of JPEG; the second for images of noise, which are many times as large
_LARGE = 24_000  # bytes of a small copy


def embed_figure(figure: Figure, *, name: str, text: str) -> Markup:
    """A figure as HTML.

    Args:
        figure: from one of the plot functions.
        name: its own within the page, made of letters.
        text: what it shows, for those who cannot see it.
    """
    points = figure.get_figwidth() * 72
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), warnings.catch_warnings():
        # The browser has the signs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        shown = _take_over(_save(figure, "svg"), name, text)
    if len(shown) > LARGEST:
        address = b64encode(_save(figure, "png")).decode("ascii")
        shown = Markup('<img src="data:image/png;base64,{}" alt="{}">').format(address, text)
    size = f"min-width:min({_SMALLEST * points:.0f}pt,28rem);max-width:{1.5 * points:.0f}pt"
    return Markup('<div class="plot"><div style="{}">{}</div></div>').format(size, shown)


def _save(figure: Figure, kind: str) -> bytes:
    written = BytesIO()
    figure.savefig(written, format=kind)
    return written.getvalue()


def _take_over(svg: bytes, name: str, text: str) -> Markup:
    """A figure's SVG as part of the page: black is the page's ink and white its ground, and nothing points outside."""
    root = ET.fromstring(svg)  # noqa: S314  # matplotlib wrote it
    for parent in list(root.iter()):
        parent.tag = parent.tag.rpartition("}")[2]
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):  # the style would hold for the whole page
                parent.remove(child)
        held = {key.rpartition("}")[2]: value for key, value in parent.attrib.items()}
        parent.attrib = {key: _adapt(key, value, name) for key, value in held.items()}
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": text}
    return Markup(ET.tostring(root, encoding="unicode"))  # noqa: S704  # a serialiser escapes what it writes


def _adapt(key: str, value: str, name: str) -> str:
    """An attribute's value: names become the figure's own, colours the page's."""
    if key == "id":
        return f"{name}-{value}"
    if key == "href" and value.startswith("#"):
        return f"#{name}-{value[1:]}"
    if key in ("style", "clip-path", "fill", "stroke"):
        value = re.sub(r"url\(#", f"url(#{name}-", value)
        return value.replace("#000000", "currentColor").replace("#ffffff", "var(--card)")
    return value


class Thumbnail(NamedTuple):
    """A small copy of an image: a `data:` address and its pixels, or the problem why it cannot be shown."""

    address: Markup
    width: int
    height: int
    problem: str = ""


class Album:
    """Makes small copies of the images of a data set, until a number or a size is reached.

    Args:
        scores: whose rows are asked for; they must know their places in `records`.
        records: the images.
        count: the most images.
        room: the most characters of all addresses together.
    """

    def __init__(self, scores: Scores, records: RecordSet | None, *, count: int, room: int) -> None:
        self._scores, self._records, self._count, self._room = scores, records, count, room

    def copy(self, row: int) -> Thumbnail | None:
        """A small copy of the image in a row of the scores; None where there is none, or no room for it."""
        records, indices = self._records, self._scores.indices
        if records is None or indices is None or self._count < 1:
            return None
        made = _shrink(records, int(indices[row]))
        if len(made.address) > self._room:
            return None
        self._count -= 1
        self._room -= len(made.address)
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
