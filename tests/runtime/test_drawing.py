"""Figures of known numbers: where a colour is says what is drawn."""

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageColor

from pivotpatch.runtime import drawing
from pivotpatch.runtime.drawing import TAGS, draw_tag, draw_tags
from pivotpatch.runtime.prediction import Tag
from pivotpatch.runtime.values import PatchBox, patch_boxes

SIZE = (200, 400)
WHITE = np.full((*SIZE, 3), 255, np.uint8)
BOXES = patch_boxes(*SIZE)
SCALE = drawing._SIDE / max(SIZE)
SPLIT = 2 * drawing._MARGIN + drawing._SIDE  # columns of the image; the bars are at its right


def make_tags(*boxes: PatchBox, prob: float = 0.75) -> list[Tag]:
    return [
        Tag(f"tag {place}", prob - 0.2 * place, 0.1, 0.5, 0.25, (0.25,) * 4, box) for place, box in enumerate(boxes)
    ]


def find(figure: Image.Image, colour: str) -> NDArray[np.bool_]:
    """Where a figure has a colour, in rows and columns."""
    found: NDArray[np.bool_] = (np.asarray(figure) == ImageColor.getrgb(colour)).all(axis=2)
    return found


def test_each_pivot_patch_is_framed_in_the_colour_of_its_bar() -> None:
    figure = draw_tags(WHITE, make_tags(BOXES[1], BOXES[2], BOXES[1]), size=SIZE)
    insets = []
    for colour, box, prob in zip(TAGS, (BOXES[1], BOXES[2], BOXES[1]), (0.75, 0.55, 0.35), strict=False):
        there = find(figure, colour)
        rows, columns = np.nonzero(there[:, :SPLIT])
        edges = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) - drawing._MARGIN
        away = (edges - np.rint(SCALE * np.array(box))) * [1, 1, -1, -1]
        assert away.min() > 0
        assert away.max() < 25
        insets.append(away.max())
        assert there[:, SPLIT:].any(axis=0).sum() == pytest.approx(prob * drawing._BARS, abs=5)
    assert insets[2] > insets[0]  # frames of one patch lie inside each other


@pytest.mark.parametrize("size", [(1, 1), (640, 16), (16, 640)])
def test_images_of_every_shape_and_labels_of_every_kind_are_drawn(size: tuple[int, int]) -> None:
    tags = make_tags(*patch_boxes(max(size[0], 2), max(size[1], 2)), *BOXES[:0], prob=0.95)
    odd = [tag._replace(label=name) for tag, name in zip(tags, ("", "<b>&", "猫 ☃ \n", "long " * 50), strict=True)]
    image = np.zeros((*size, 3), np.uint8)
    shapes = {draw_tags(image, odd, size=size).size, *(draw_tag(image, tag, overlap=0.25).size for tag in odd)}
    assert len({width for width, _ in shapes}) == 1
    assert max(height for _, height in shapes) < 1000
    assert find(draw_tags(image, odd * 3, size=size), TAGS[7]).any()  # those after the eighth are left out
