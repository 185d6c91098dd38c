"""The published RandAugment's operations, by Pillow: magnitude is a step from 0 to 9."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

GREY = (128, 128, 128)
Operation = Callable[[Image.Image, int, int, tuple[float, float]], Image.Image]


def steps(first: float, last: float, magnitude: int) -> float:
    """One of ten steps."""
    return first + (last - first) * magnitude / 9


def transform(image: Image.Image, *coefficients: float, smooth: bool) -> Image.Image:
    method = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, method, fillcolor=GREY)


def cover(image: Image.Image, magnitude: int, place: tuple[float, float]) -> Image.Image:
    """A box of up to 20 pixels around a random pixel."""
    half = round(steps(0, 20, magnitude)) // 2
    pixels = np.array(image)
    row, column = int(place[0] * pixels.shape[0]), int(place[1] * pixels.shape[1])
    pixels[max(row - half, 0) : row + half, max(column - half, 0) : column + half] = (125, 122, 113)
    return Image.fromarray(pixels)


OPERATIONS: dict[str, Operation] = {
    "invert": lambda image, _m, _sign, _place: ImageOps.invert(image),
    "cutout": lambda image, m, _sign, place: cover(image, m, place),
    "sharpness": lambda image, m, sign, _place: ImageEnhance.Sharpness(image).enhance(1 + sign * steps(0, 0.9, m)),
    "autocontrast": lambda image, _m, _sign, _place: ImageOps.autocontrast(image),
    "posterize": lambda image, m, _sign, _place: ImageOps.posterize(image, round(steps(8, 4, m))),
    "shear_x": lambda image, m, sign, _place: transform(image, 1, sign * steps(0, 0.3, m), 0, 0, 1, 0, smooth=True),
    "translate_x": lambda image, m, sign, _place: transform(
        image, 1, 0, sign * steps(0, 150 / 331, m) * image.width, 0, 1, 0, smooth=False
    ),
    "translate_y": lambda image, m, sign, _place: transform(
        image, 1, 0, 0, 0, 1, sign * steps(0, 150 / 331, m) * image.height, smooth=False
    ),
    "shear_y": lambda image, m, sign, _place: transform(image, 1, 0, 0, sign * steps(0, 0.3, m), 1, 0, smooth=True),
    "rotate": lambda image, m, _sign, _place: image.rotate(steps(0, 30, m), fillcolor=GREY),
    "equalize": lambda image, _m, _sign, _place: ImageOps.equalize(image),
    "contrast": lambda image, m, sign, _place: ImageEnhance.Contrast(image).enhance(1 + sign * steps(0, 0.9, m)),
    "color": lambda image, m, sign, _place: ImageEnhance.Color(image).enhance(1 + sign * steps(0, 0.9, m)),
    "solarize": lambda image, m, _sign, _place: ImageOps.solarize(image, steps(256, 0, m)),
    "brightness": lambda image, m, sign, _place: ImageEnhance.Brightness(image).enhance(1 + sign * steps(0, 0.9, m)),
}


def operate(
    name: str, pixels: NDArray[np.uint8], magnitude: int, sign: int, place: tuple[float, float]
) -> NDArray[np.uint8]:
    """Pixels (H,W,3) after an operation."""
    return np.asarray(OPERATIONS[name](Image.fromarray(pixels), magnitude, sign, place))
