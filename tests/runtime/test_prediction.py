"""Predictions of known numbers: tags, boxes, JSON, figures and notebooks."""

import json
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from pivotpatch.errors import InputError
from pivotpatch.runtime.prediction import Prediction
from pivotpatch.runtime.values import PatchBox

LABELS = ("cat", "dog", "cup", "bird")
# The boxes of four patches of 101 x 67 pixels: sides are rounded up, so that the inner borders overlap by a pixel.
BOXES = [PatchBox(0, 0, 34, 51), PatchBox(33, 0, 67, 51), PatchBox(0, 50, 34, 101), PatchBox(33, 50, 67, 101)]
WEIGHTS = np.array([[0.1, 0.7, 0.1, 0.25], [0.2, 0.1, 0.1, 0.25], [0.3, 0.1, 0.1, 0.25], [0.4, 0.1, 0.7, 0.25]])
PIXELS = np.random.default_rng(0).integers(0, 256, (101, 67, 3), dtype=np.uint8)


def make(**changes: object) -> Prediction:
    prediction = Prediction(
        picture="photo.jpg",
        source=PIXELS,
        size=(101, 67),
        labels=LABELS,
        probs=np.array([0.625, 0.875, 0.75, 0.25]),
        image_probs=np.array([0.1, 0.2, 0.3, 0.4]),
        patch_probs=np.array([0.5, 0.6, 0.7, 0.8]),
        weights=WEIGHTS,
        thresholds=np.array([0.5, 0.5, 0.75, 0.5]),
    )
    return replace(prediction, **changes)  # type: ignore[arg-type]


def test_tags_are_above_their_own_threshold_the_most_probable_first() -> None:
    assert [tag.label for tag in make().tags] == ["dog", "cat"]  # the cup is at its threshold, not above
    assert [tag.label for tag in make(thresholds=np.zeros(4)).tags] == ["dog", "cup", "cat", "bird"]
    assert [tag.label for tag in make().top(3)] == ["dog", "cup", "cat"]
    assert [tag.label for tag in make(probs=np.full(4, 0.6)).top(99)] == list(LABELS)
    dog = make().tags[0]
    assert (dog.prob, dog.threshold, dog.box) == (0.875, 0.5, BOXES[0])
    with pytest.raises(InputError, match="top_k: it is 0"):
        make().top(0)
    for ask in (make().get, make().plot):
        with pytest.raises(InputError, match="unknown label 'dogg'; did you mean 'dog'"):
            ask("dogg")


def test_the_box_is_that_of_the_pivot_patch_in_the_pictures_own_pixels() -> None:
    for place, box in enumerate(BOXES):
        weights = np.zeros((4, 4))
        weights[place] = 1
        assert {tag.box for tag in make(weights=weights).top(4)} == {box}
    assert make(overlap=0.5, size=(30, 60)).get("dog").box == PatchBox(0, 0, 40, 20)  # a patch of two thirds


def test_plain_types_for_json_and_a_line_for_print() -> None:
    thirds = make(thresholds=np.array([1.0, 1 / 3, 1.0, 1.0]), weights=np.full((4, 4), 1 / 3))
    content = json.loads(json.dumps(thirds.to_dict(), allow_nan=False))
    (tag,) = content.pop("tags")
    assert content == {"picture": "photo.jpg", "size": [101, 67]}
    assert tag.pop("weights") == [0.333333] * 4
    assert (tag.pop("image_prob"), tag.pop("patch_prob")) == (pytest.approx(0.2), pytest.approx(0.6))
    assert tag == {"label": "dog", "prob": 0.875, "threshold": 0.333333, "box": [0, 0, 34, 51]}
    assert str(make()) == "<Prediction of photo.jpg, 101 x 67 pixels: dog 0.88, cat 0.62>"


def test_a_figure_shows_the_tags_or_what_comes_next() -> None:
    def draw(prediction: Prediction, label: str | None = None) -> bytes:
        return prediction.plot(label).tobytes()

    assert draw(make()) == make().draw(make().tags).tobytes()
    assert draw(make(), "cup") == make().draw(make().get("cup")).tobytes()  # which is not given
    none = make(thresholds=np.ones(4))
    assert draw(none) == none.draw(none.top(3)).tobytes()
    assert draw(make()) != draw(make(patch_probs=None, weights=None))


def test_a_notebook_gets_the_figure_with_names_as_they_are() -> None:
    labels = ("<script>alert(1)</script>", "a & b", "$x^2$", "\"quoted\" {0} 'single'")
    shown = Image.open(BytesIO(make(labels=labels, thresholds=np.zeros(4))._repr_png_()))
    assert shown.format == "PNG"


def test_boxes_of_tiny_images_cover_them() -> None:
    weights, one = np.full((16, 1), 1 / 16, np.float32), np.ones(1, np.float32)
    for size in ((1, 7), (2, 1), (3, 3), (5, 2)):
        covered = np.zeros(size, bool)
        for box in Prediction(None, np.zeros((*size, 3), np.uint8), size, ("a",), one, one, one, weights, one)._boxes:
            assert 0 <= box.left < box.right <= size[1]
            assert 0 <= box.top < box.bottom <= size[0]
            covered[box.top : box.bottom, box.left : box.right] = True
        assert covered.all()
