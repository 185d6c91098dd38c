"""Figures inside a page: SVG that takes the colours of the page, or pixels where that would be too large."""

import re
import warnings
from base64 import b64encode
from io import BytesIO
from xml.etree import ElementTree as ET

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

LARGEST = 200_000
"""Characters of an SVG figure; a larger one is embedded as pixels."""
_SMALLEST = 0.68  # of its own size, to which a figure may shrink on a narrow screen before it scrolls


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
        parent.attrib = {key.rpartition("}")[2]: _adapt(key, value, name) for key, value in parent.attrib.items()}
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": text}
    return Markup(ET.tostring(root, encoding="unicode"))  # noqa: S704  # a serialiser escapes what it writes


def _adapt(key: str, value: str, name: str) -> str:
    """An attribute's value: names become the figure's own, colours the page's."""
    key = key.rpartition("}")[2]
    if key == "id":
        return f"{name}-{value}"
    if key == "href" and value.startswith("#"):
        return f"#{name}-{value[1:]}"
    if key in ("style", "clip-path", "fill", "stroke"):
        value = re.sub(r"url\(#", f"url(#{name}-", value)
        return value.replace("#000000", "currentColor").replace("#ffffff", "var(--card)")
    return value
