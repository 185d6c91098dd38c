"""Why a model gives its tags, drawn on the image with Pillow; and the colours of all figures."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from pivotpatch.errors import cut
from pivotpatch.runtime.prediction import Tag
from pivotpatch.runtime.values import PatchBox, patch_boxes

# The Okabe-Ito set, which every kind of colour vision tells apart.
TAGS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""One colour per tag, the most probable first."""
OPINIONS = {"whole image": "#E69F00", "its patches": "#56B4E9", "both (TDE)": "#0072B2"}
"""The colour of each opinion."""
KINDS = dict(zip(("image", "patch", "tde"), OPINIONS.values(), strict=True))
"""Of logits; a model is judged by the last."""
MODEL, BASELINE = "#0072B2", "#808080"
RUNS = (MODEL, BASELINE, "#009E73", "#CC79A7", "#E69F00", "#D55E00")
"""Of several runs: the model, its baseline, and others."""
_SIDE, _MARGIN, _ROW, _BARS = 560, 24, 46, 330  # pixels: the image's longer side, around, of a tag's bars, their width
_NAMES = 190  # pixels for the names of the tags
_GREY, _DARK = "#D0D0D0", "#8C8C8C"


def draw_tags(image: NDArray[np.uint8], tags: Sequence[Tag], *, size: tuple[int, int]) -> Image.Image:
    """An image with the frame of each tag's pivot patch, and bars of what each opinion says of each tag.

    Args:
        image: RGB pixels (h,w,3).
        tags: those after the eighth are left out.
        size: rows and columns that the tags' boxes are in.
    """
    tags = tags[: len(TAGS)]
    canvas, scale = _open_canvas(image, size, rows=len(tags))
    draw = ImageDraw.Draw(canvas)
    shared: Counter[PatchBox] = Counter()
    names: list[tuple[str, PatchBox, int]] = []
    for tag, colour in zip(tags, TAGS, strict=False):
        if tag.box is not None:
            depth = shared[tag.box]
            shared[tag.box] += 1
            corners = PatchBox(*(round(_MARGIN + scale * value) for value in tag.box))
            _draw_frame(draw, corners, colour, inset=5 + 8 * depth)
            names.append((tag.label, corners, depth))
    for label, corners, depth in names:  # above all frames
        _write_corner(draw, label, corners, canvas_side=_find_side(size, scale), line=depth)
    left, top = _MARGIN * 2 + _find_side(size, scale)[1], _MARGIN
    for tag, colour in zip(tags, TAGS, strict=False):
        opinions = [] if tag.patch_prob is None else [(tag.image_prob, _GREY), (tag.patch_prob, _DARK)]
        _write(draw, tag.label, (left + _NAMES - 8, top + _ROW / 2), anchor="rm", width=_NAMES - 8)
        for place, (prob, grey) in enumerate(opinions):
            _draw_bar(draw, prob, grey, left=left + _NAMES, top=top + 3 + 8 * place, high=7)
        start = top + (20 if opinions else 12)
        _draw_bar(draw, tag.prob, colour, left=left + _NAMES, top=start, high=16)
        line = left + _NAMES + tag.threshold * _BARS
        draw.line([line, start - 2, line, start + 18], fill="black", width=2)
        _write(draw, f"{tag.prob:.2f}", (left + _NAMES + tag.prob * _BARS + 6, start + 8), anchor="lm", halo=True)
        top += _ROW
    if all(tag.prob <= tag.threshold for tag in tags):
        _write(draw, "no label is above its threshold", (left + _NAMES, top + 10), anchor="lm")
        top += 24
    told = "coloured: probability, line: threshold"
    if any(tag.patch_prob is not None for tag in tags):
        told = "light: whole image, dark: its patches, coloured: both (TDE), line: threshold"
    _write(draw, told, (left + _NAMES, top + 12), anchor="lm", points=11, centre=True)
    return canvas


def draw_tag(
    image: NDArray[np.uint8], tag: Tag, *, overlap: float, baseline: float | None = None, told: str | None = None
) -> Image.Image:
    """An image with the share of each patch in one label, and the label's probability by each opinion.

    Args:
        image: RGB pixels (h,w,3).
        tag: the label.
        overlap: of the patches, see `patch_boxes`.
        baseline: what another model gives to the label, above the others.
        told: a line below; by default the label and its threshold.
    """
    size, weights = (image.shape[0], image.shape[1]), tag.weights or ()
    grid = math.isqrt(len(weights))
    if min(size) < grid:  # then patches have parts of pixels
        image = image.repeat(grid, axis=0).repeat(grid, axis=1)
        size = (image.shape[0], image.shape[1])
    canvas, scale = _open_canvas(image, size, rows=3 if baseline is None else 4)
    draw = ImageDraw.Draw(canvas, "RGBA")
    for box, share in zip(patch_boxes(*size, grid=grid, overlap=overlap) if weights else (), weights, strict=True):
        corners = PatchBox(*(round(_MARGIN + scale * value) for value in box))
        draw.rectangle(corners, fill=(0, 0, 0, round(90 * (1 - share))), outline="white", width=2)
        _write_corner(draw, f"{share:.0%}", corners, canvas_side=_find_side(size, scale))
    probs = (tag.prob,) if tag.patch_prob is None else (tag.image_prob, tag.patch_prob, tag.prob)
    bars = [(name, colour, prob) for (name, colour), prob in zip(OPINIONS.items(), probs, strict=False)]
    left, top = _MARGIN * 2 + _find_side(size, scale)[1], _MARGIN
    for name, colour, prob in [("baseline", BASELINE, baseline), *bars] if baseline is not None else bars:
        _write(draw, name, (left + _NAMES - 8, top + 16), anchor="rm")
        _draw_bar(draw, prob, colour, left=left + _NAMES, top=top + 6, high=20)
        _write(draw, f"{prob:.2f}", (left + _NAMES + prob * _BARS + 6, top + 16), anchor="lm", halo=True)
        top += _ROW
    told = told or f"probability of “{tag.label}”, given above {tag.threshold:.2f}"
    _write(draw, told, (left, top + 10), anchor="lm", width=_NAMES + _BARS + 60)
    return canvas


def _open_canvas(image: NDArray[np.uint8], size: tuple[int, int], *, rows: int) -> tuple[Image.Image, float]:
    """A white image with a place for bars at its right, and the pixels on it that are one pixel of `size`."""
    scale = _SIDE / max(size)
    height, width = _find_side(size, scale)
    needed = max(height, rows * _ROW + 48) + 2 * _MARGIN
    canvas = Image.new("RGB", (width + _NAMES + _BARS + 60 + 3 * _MARGIN, needed), "white")
    canvas.paste(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC), (_MARGIN, _MARGIN))
    return canvas, scale


def _find_side(size: tuple[int, int], scale: float) -> tuple[int, int]:
    """Rows and columns of an image on the canvas."""
    return max(round(size[0] * scale), 8), max(round(size[1] * scale), 8)


def _draw_frame(draw: ImageDraw.ImageDraw, box: PatchBox, colour: str, *, inset: int) -> None:
    inset = min(inset, (box.right - box.left) // 3, (box.bottom - box.top) // 3)
    inner = (box.left + inset, box.top + inset, box.right - inset, box.bottom - inset)
    draw.rectangle(inner, outline="white", width=6)
    room = int(min(inner[2] - inner[0], inner[3] - inner[1]) >= 2)  # a very narrow image has none
    draw.rectangle((inner[0] + room, inner[1] + room, inner[2] - room, inner[3] - room), outline=colour, width=4)


def _draw_bar(draw: ImageDraw.ImageDraw, prob: float, colour: str, *, left: float, top: float, high: int) -> None:
    draw.rectangle((left, top, left + max(prob, 0.0) * _BARS, top + high), fill=colour, outline="black")


def _write_corner(
    draw: ImageDraw.ImageDraw, text: str, box: PatchBox, *, canvas_side: tuple[int, int], line: int = 0
) -> None:
    """Write into the corner of a patch that is nearest to the border of the image, where objects are rarest."""
    rows, columns = canvas_side
    right = box.left + box.right - 2 * _MARGIN > columns
    low = box.top + box.bottom - 2 * _MARGIN > rows
    at = box.right - 10 if right else box.left + 10, box.bottom - 10 - 24 * line if low else box.top + 10 + 24 * line
    anchor = ("r" if right else "l") + ("d" if low else "a")
    font, text = _load_font(15), cut(text)
    edges = draw.textbbox(at, text, font=font, anchor=anchor)
    draw.rectangle((edges[0] - 4, edges[1] - 3, edges[2] + 4, edges[3] + 3), fill="#202020")
    draw.text(at, text, font=font, anchor=anchor, fill="white")


def _write(
    draw: ImageDraw.ImageDraw,
    text: str,
    at: tuple[float, float],
    *,
    anchor: str,
    points: int = 15,
    width: int | None = None,
    halo: bool = False,
    centre: bool = False,
) -> None:
    """Write a line of text; one that is wider than `width` is cut, one that is `centre`d may begin further left."""
    font, text = _load_font(points), cut(text)
    if width is not None:
        while len(text) > 1 and draw.textlength(text, font=font) > width:
            text = text[:-2] + "…"
    if centre:
        at = (at[0] + _BARS / 2, at[1])
        anchor = "mm"
    draw.text(at, text, font=font, anchor=anchor, fill="black", stroke_width=3 if halo else 0, stroke_fill="white")


@cache
def _load_font(points: int) -> "ImageFont.FreeTypeFont | ImageFont.ImageFont":
    """The font that Pillow brings."""
    return ImageFont.load_default(points)
