"""Predictions of known numbers: tags, boxes, JSON, figures and notebooks."""

import json
import re
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from pivotpatch.core.patches import PatchBox
from pivotpatch.errors import InputError
from pivotpatch.inference.prediction import LONGEST, Prediction

LABELS = ("cat", "dog", "cup", "bird")
# The boxes of four patches of 101 x 67 pixels: sides are rounded up, so that the inner borders overlap by a pixel.
BOXES = [PatchBox(0, 0, 34, 51), PatchBox(33, 0, 67, 51), PatchBox(0, 50, 34, 101), PatchBox(33, 50, 67, 101)]
WEIGHTS = torch.tensor([[0.1, 0.7, 0.1, 0.25], [0.2, 0.1, 0.1, 0.25], [0.3, 0.1, 0.1, 0.25], [0.4, 0.1, 0.7, 0.25]])
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (101, 67, 3), dtype=np.uint8)


def make(**changes: object) -> Prediction:
    prediction = Prediction(
        picture="photo.jpg",
        source=PIXELS,
        size=(101, 67),
        labels=LABELS,
        probs=torch.tensor([0.625, 0.875, 0.75, 0.25]),
        image_probs=torch.tensor([0.1, 0.2, 0.3, 0.4]),
        patch_probs=torch.tensor([0.5, 0.6, 0.7, 0.8]),
        weights=WEIGHTS,
        thresholds=torch.tensor([0.5, 0.5, 0.75, 0.5]),
    )
    return replace(prediction, **changes)  # type: ignore[arg-type]


def without_patches() -> Prediction:
    return make(patch_probs=None, weights=None)


def render(figure: Figure) -> None:
    figure.savefig(BytesIO(), format="png")  # a warning is an error here


def axes_of(prediction: Prediction, label: str | None = None) -> tuple[Axes, Axes]:
    figure = prediction.plot(label)
    render(figure)
    picture, bars = figure.axes
    return picture, bars


def widths(bars: Axes) -> list[float]:
    return [round(float(patch.get_width()), 4) for patch in bars.patches if isinstance(patch, Rectangle)]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_tags_are_above_their_own_threshold_the_most_probable_first() -> None:
    assert [tag.label for tag in make().tags] == ["dog", "cat"]  # the cup is at its threshold, not above
    assert [tag.label for tag in make(thresholds=torch.zeros(4)).tags] == ["dog", "cup", "cat", "bird"]
    assert make(thresholds=torch.ones(4)).tags == ()


def test_a_tag_holds_the_numbers_of_its_label() -> None:
    dog = make().tags[0]
    assert dog == make().get("dog")
    assert (dog.prob, dog.threshold, dog.box) == (0.875, 0.5, BOXES[0])
    assert dog.image_prob == pytest.approx(0.2)
    assert dog.patch_prob == pytest.approx(0.6)
    assert dog.weights == pytest.approx((0.7, 0.1, 0.1, 0.1))


def test_the_box_is_that_of_the_pivot_patch_in_the_pictures_own_pixels() -> None:
    assert [make().get(label).box for label in ("dog", "cup")] == [BOXES[0], BOXES[3]]
    for place, box in enumerate(BOXES):
        weights = torch.zeros(4, 4)
        weights[place] = 1
        assert {tag.box for tag in make(weights=weights).top(4)} == {box}
    wide = make(overlap=0.5, size=(30, 60)).get("dog").box  # a patch of two thirds
    assert wide == PatchBox(0, 0, 40, 20)


def test_the_most_probable_are_told_whatever_the_threshold() -> None:
    assert [tag.label for tag in make().top(3)] == ["dog", "cup", "cat"]
    assert len(make().top(99)) == 4
    equal = make(probs=torch.full((4,), 0.6))
    assert [tag.label for tag in equal.top(4)] == list(LABELS)
    with pytest.raises(InputError, match="top: count is 0; give 1 or more"):
        make().top(0)


def test_an_unknown_label_is_answered_with_the_nearest() -> None:
    for ask in (make().get, make().plot):
        with pytest.raises(InputError, match="unknown label 'dogg'; did you mean 'dog'"):
            ask("dogg")


def test_plain_types_for_json() -> None:
    content = json.loads(json.dumps(make(thresholds=torch.tensor([1.0, 0.5, 1.0, 1.0])).to_dict(), allow_nan=False))
    (tag,) = content.pop("tags")
    assert content == {"picture": "photo.jpg", "size": [101, 67]}
    assert tag.pop("weights") == pytest.approx([0.7, 0.1, 0.1, 0.1])
    assert (tag.pop("image_prob"), tag.pop("patch_prob")) == (pytest.approx(0.2), pytest.approx(0.6))
    assert tag == {"label": "dog", "prob": 0.875, "threshold": 0.5, "box": [0, 0, 34, 51]}


def test_the_picture_of_a_file_is_read_small_and_turned(tmp_path: Path) -> None:
    stored = np.zeros((1000, 2000, 3), dtype=np.uint8)
    stored[:, 1000:] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise: what is stored right is shown below
    Image.fromarray(stored).save(tmp_path / "photo.jpg", exif=exif)
    image = make(source=tmp_path / "photo.jpg", size=(2000, 1000)).image
    assert image.shape == (LONGEST, LONGEST // 2, 3)
    assert image[:300].max() < 10
    assert image[340:].min() > 245


@pytest.mark.parametrize(("side", "spans"), [(1, [(0, 1), (0, 1), (0, 1)]), (2, [(0, 1), (0, 2), (1, 2)])])
def test_patches_share_the_pixels_of_a_tiny_picture(side: int, spans: list[tuple[int, int]]) -> None:
    thirds = torch.eye(9)[:, [0, 4, 8, 2]]
    tiny = make(size=(side, 9), source=PIXELS[:side, :9], weights=thirds)
    boxes = [tiny.get(label).box for label in LABELS]
    columns = [(0, 3), (3, 6), (6, 9)]
    expected = [PatchBox(left, top, right, bottom) for (left, right), (top, bottom) in zip(columns, spans, strict=True)]
    assert boxes == [*expected, PatchBox(6, spans[0][0], 9, spans[0][1])]
    for label in (None, "cat"):
        render(tiny.plot(label))
    assert "span" in tiny._repr_html_()


def test_a_figure_frames_each_pivot_patch_and_has_three_bars_a_tag() -> None:
    picture, bars = axes_of(make())
    assert texts(picture) == ["dog", "cat"]
    assert widths(bars) == pytest.approx([0.2, 0.1, 0.6, 0.5, 0.875, 0.625], abs=1e-4)
    assert [text.get_text() for text in bars.get_yticklabels()] == ["dog", "cat"]
    assert texts(bars) == ["0.88", "0.62"]
    for frame, box in zip(picture.patches[1::2], (BOXES[0], BOXES[3]), strict=True):
        assert isinstance(frame, Rectangle)
        (left, top), width, height = frame.get_xy(), frame.get_width(), frame.get_height()
        assert (left, top, left + width, top + height) == pytest.approx(box, abs=1)
    assert list(picture.get_images()[0].get_extent()) == [0, 67, 101, 0]


def test_frames_of_one_patch_lie_inside_each_other() -> None:
    picture, _ = axes_of(make(weights=torch.eye(4)[:, [1, 1, 1, 1]], thresholds=torch.zeros(4)))
    frames = [frame for frame in picture.patches[1::2] if isinstance(frame, Rectangle)]
    assert len(frames) == 4
    sides = [(frame.get_x(), -frame.get_width()) for frame in frames]
    assert sides == sorted(sides)
    assert len(set(sides)) == 4
    assert len({text.get_position() for text in picture.texts}) == 4


def test_a_figure_of_a_network_without_patches_has_one_bar_a_tag_and_no_frames() -> None:
    picture, bars = axes_of(without_patches())
    assert not picture.patches
    assert widths(bars) == [0.875, 0.625]
    picture, bars = axes_of(without_patches(), "bird")
    assert not picture.patches
    assert widths(bars) == [0.25]


def test_one_label_is_explained_whether_it_is_given_or_not() -> None:
    picture, bars = axes_of(make(), "cup")
    assert texts(picture) == ["10%", "10%", "10%", "70%"]
    assert widths(bars) == pytest.approx([0.3, 0.7, 0.75], abs=1e-4)
    assert bars.get_xlabel() == "probability of “cup”, given above 0.75"


def test_a_picture_without_tags_shows_what_is_most_probable() -> None:
    prediction = make(thresholds=torch.ones(4))
    picture, bars = axes_of(prediction)
    assert texts(picture) == ["dog", "cup", "cat"]
    assert bars.get_title() == "no label is above its threshold"
    assert "No label is above its threshold" in prediction._repr_html_()
    assert repr(prediction) == "<Prediction of photo.jpg, 101 x 67 pixels: no tags>"


def many(names: tuple[str, ...]) -> Prediction:
    count = len(names)
    return make(
        labels=names,
        probs=torch.linspace(0.9, 0.6, count),
        image_probs=torch.linspace(0.1, 0.9, count),
        patch_probs=torch.linspace(0.9, 0.1, count),
        weights=torch.full((4, count), 0.25),
        thresholds=torch.full((count,), 0.5),
    )


@pytest.mark.parametrize("size", [(2, 2), (3, 900), (900, 3)])
def test_pictures_of_every_form_are_drawn(size: tuple[int, int]) -> None:
    pixels = np.zeros((*size, 3), dtype=np.uint8)
    prediction = make(source=pixels, size=size)
    for label in (None, "dog"):
        picture, _ = axes_of(prediction, label)
        assert all(patch.get_width() > 0 and patch.get_height() > 0 for patch in picture.patches)  # type: ignore[attr-defined]
    assert "<img" in prediction._repr_html_()


HOSTILE = ("<script>alert(1)</script>", "a & b", "$x^2$", '"quoted" {0}', "'single'")


class Page(HTMLParser):
    """What a page holds: elements with their attributes, and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_a_notebook_gets_escaped_names_and_a_picture_of_its_own() -> None:
    prediction = replace(many(HOSTILE), picture='<img src="x">')
    html = prediction._repr_html_()
    page = Page(html)
    assert type(html) is str
    assert not page.all("script")
    for name in (*HOSTILE, '<img src="x">'):
        assert any(name in text for text in page.text), name
    (image,) = page.all("img")
    head, _, data = (image["src"] or "").partition(",")
    assert head == "data:image/jpeg;base64"
    assert Image.open(BytesIO(b64decode(data))).size == (67, 101)
    assert 'Prediction of <img src="x">' in (image["alt"] or "")
    assert "http" not in html.replace(data, "")
    assert len(page.all("tr")) == 1 + len(HOSTILE)
    render(prediction.plot())


def test_a_notebook_frames_the_pivot_patches() -> None:
    frames = [style["style"] or "" for style in Page(make()._repr_html_()).all("span")]
    sizes = [[float(value) for value in re.findall(r"([\d.]+)%", style)] for style in frames]
    expected = [
        [
            100 * box.left / 67,
            100 * box.top / 101,
            100 * (box.right - box.left) / 67,
            100 * (box.bottom - box.top) / 101,
        ]
        for box in (BOXES[0], BOXES[3])
    ]
    assert sizes == [pytest.approx(row, abs=0.01) for row in expected]
    plain = Page(without_patches()._repr_html_())
    assert not plain.all("span")
    assert len(plain.all("th")) == 3


def test_a_line_for_print() -> None:
    assert str(make()) == "<Prediction of photo.jpg, 101 x 67 pixels: dog 0.88, cat 0.62>"
    assert str(make(picture=None)).startswith("<Prediction of an image, 101 x 67")
