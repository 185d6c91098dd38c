"""Pictures to try the page with, drawn here: things that everybody knows, or scenes for a network that knows digits."""

import math
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from pivotpatch.data.scenes import SCENE_LABELS, draw_scene, plan_scene

_SIDE = 384
_FINER = 3  # drawn this many times as large, then shrunk: Pillow draws no soft edges
_SCENES = (3, 5, 8)


class Example(NamedTuple):
    """A picture: what the page calls it, and the bytes of its file."""

    name: str
    content: bytes


def draw_examples(labels: Sequence[str]) -> tuple[Example, ...]:
    """Pictures for a network that knows some labels, the same ones every time."""
    if set(SCENE_LABELS.names) <= set(labels):
        plans = [plan_scene(0, "test-broken", index=index, size=_SIDE) for index in _SCENES]
        pictures = {f"Scene {place}": Image.fromarray(draw_scene(plan)) for place, plan in enumerate(plans, 1)}
    else:
        drawings = {"Street": _draw_street, "Clock": _draw_clock, "Beach": _draw_beach}
        pictures = {name: _draw(drawing) for name, drawing in drawings.items()}
    return tuple(Example(name, encode(picture)) for name, picture in pictures.items())


def encode(picture: Image.Image) -> bytes:
    """A picture as the bytes of a WebP file."""
    written = BytesIO()
    picture.save(written, "WEBP", quality=90)
    return written.getvalue()


def _draw(drawing: Callable[[ImageDraw.ImageDraw, float], None]) -> Image.Image:
    """A picture from a function that draws in hundredths of its side."""
    large = Image.new("RGB", (_SIDE * _FINER, _SIDE * _FINER))
    drawing(ImageDraw.Draw(large), _SIDE * _FINER / 100)
    return large.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS)


def _scale(unit: float, *places: float) -> list[float]:
    return [unit * place for place in places]


def _draw_disc(draw: ImageDraw.ImageDraw, unit: float, *, place: tuple[float, float, float], fill: str) -> None:
    x, y, radius = place
    draw.ellipse(_scale(unit, x - radius, y - radius, x + radius, y + radius), fill)


def _draw_street(draw: ImageDraw.ImageDraw, unit: float) -> None:
    """A stop sign and a traffic light beside a road."""
    draw.rectangle(_scale(unit, 0, 0, 100, 68), "#9fc5e8")
    for left, top, colour in ((0, 30, "#b09a86"), (24, 42, "#8d7f73"), (52, 24, "#a58f80"), (80, 38, "#94857a")):
        draw.rectangle(_scale(unit, left, top, left + 22, 68), colour)
        for row in range(top + 4, 62, 8):
            for column in range(left + 3, left + 19, 6):
                draw.rectangle(_scale(unit, column, row, column + 3, row + 4), "#3d4b57")
    draw.rectangle(_scale(unit, 0, 68, 100, 74), "#a7a7a2")
    draw.rectangle(_scale(unit, 0, 74, 100, 100), "#55585b")
    for left in range(4, 100, 22):
        draw.rectangle(_scale(unit, left, 86, left + 12, 88), "#e8e6dd")
    draw.rectangle(_scale(unit, 27, 34, 29, 76), "#8a8d90")
    for radius, colour in ((17, "#ffffff"), (15.6, "#c1121f")):
        draw.regular_polygon(((28 * unit, 24 * unit), radius * unit), 8, fill=colour)
    font = ImageFont.load_default(10 * unit)
    draw.text((28 * unit, 24 * unit), "STOP", "#ffffff", font, anchor="mm", stroke_width=unit / 4)
    draw.rectangle(_scale(unit, 77, 40, 79, 76), "#33373a")
    draw.rounded_rectangle(_scale(unit, 71, 10, 85, 44), 2 * unit, "#1d2124")
    for y, colour in ((16, "#ff3b30"), (27, "#5a4a12"), (38, "#12431f")):
        _draw_disc(draw, unit, place=(78, y, 4.4), fill=colour)


def _draw_clock(draw: ImageDraw.ImageDraw, unit: float) -> None:
    """A clock on a wall above a shelf."""
    draw.rectangle(_scale(unit, 0, 0, 100, 100), "#d9cbb8")
    draw.rectangle(_scale(unit, 0, 84, 100, 89), "#7a5230")
    for radius, colour in ((33, "#2b2b2b"), (30, "#fbfaf5")):
        _draw_disc(draw, unit, place=(50, 44, radius), fill=colour)
    font = ImageFont.load_default(6 * unit)
    for hour in range(1, 13):
        x, y = math.sin(math.pi * hour / 6), -math.cos(math.pi * hour / 6)
        draw.text(_point(unit, 50 + 24 * x, 44 + 24 * y), str(hour), "#1b1b1b", font, anchor="mm")
    for turn, length, width in ((10.15 / 12, 14, 2), (0.15, 21, 1.3)):
        x, y = math.sin(2 * math.pi * turn), -math.cos(2 * math.pi * turn)
        draw.line(_scale(unit, 50, 44, 50 + length * x, 44 + length * y), "#1b1b1b", round(width * unit))
    _draw_disc(draw, unit, place=(50, 44, 1.8), fill="#b3261e")


def _draw_beach(draw: ImageDraw.ImageDraw, unit: float) -> None:
    """An umbrella and a ball on the sand, a kite in the sky."""
    for top, bottom, colour in ((0, 48, "#8ecae6"), (48, 66, "#2a7f9e"), (66, 100, "#ecd9a6")):
        draw.rectangle(_scale(unit, 0, top, 100, bottom), colour)
    draw.line(_scale(unit, 64, 26, 70, 92), "#6b4a2f", round(1.4 * unit))
    for place, colour in enumerate(("#d62828", "#ffffff") * 3):
        draw.pieslice(_scale(unit, 36, 18, 92, 74), 180 + 30 * place, 210 + 30 * place, colour)
    for place, colour in enumerate(("#f4f1de", "#e76f51", "#2a9d8f") * 2):
        draw.pieslice(_scale(unit, 12, 70, 34, 92), 60 * place + 15, 60 * place + 75, colour)
    draw.polygon(_scale(unit, 24, 8, 34, 20, 24, 38, 14, 20), "#f77f00")
    draw.polygon(_scale(unit, 24, 8, 34, 20, 24, 20), "#7b2cbf")
    draw.line(_scale(unit, 24, 38, 30, 46, 24, 54, 31, 62), "#444444", round(0.5 * unit))


def _point(unit: float, x: float, y: float) -> tuple[float, float]:
    return x * unit, y * unit
