"""Figures of what a model says of an image, and the colours of all figures."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from pivotpatch.core.counterfactual import CounterfactualLogits
from pivotpatch.core.patches import PatchBox, patch_boxes
from pivotpatch.inference.prediction import COLOURS, Tag, nest_boxes

# The Okabe-Ito set and grey, which every kind of colour vision tells apart.
MODEL = "#0072B2"
BASELINE = "#808080"
KINDS = {"image": "#E69F00", "patch": "#56B4E9", "tde": MODEL}
"""Of logits; a model is judged by the last."""
RUNS = (MODEL, BASELINE, "#009E73", "#CC79A7", "#E69F00", "#D55E00")
"""Of several runs: the model, its baseline, and others."""
OPINIONS = dict(zip(("whole image", "its patches", "both (TDE)"), KINDS.values(), strict=True))
"""The colour of each opinion."""
_OTHER = "baseline"
_MARK = "#F0E442"


class Case(NamedTuple):
    """One image to explain.

    Attributes:
        image: RGB pixels (H,W,3), of any size.
        logits: of this one image, B = 1.
        title: a line above.
        mark: pixels to point at.
        overlap: of the patches, see `patch_boxes`.
        baseline: what another model gives to the label, to be shown beside.
    """

    image: NDArray[np.uint8]
    logits: CounterfactualLogits
    title: str = ""
    mark: PatchBox | None = None
    overlap: float = 0.0
    baseline: float | None = None


def plot_case(
    image: NDArray[np.uint8],
    logits: CounterfactualLogits,
    *,
    label: int,
    labels: Sequence[str],
    title: str = "",
    overlap: float = 0.0,
    baseline: float | None = None,
) -> Figure:
    """Show why a label is given to an image or not.

    On the left the image, each patch with its share in the decision and dimmed where that is
    small; on the right the probability of the label from the whole image, from the patches, and
    from both; above them a baseline's, where one is given.

    Args:
        image: RGB pixels (H,W,3), of any size.
        logits: of this one image, B = 1.
        label: index of the label to explain.
        labels: names of the L labels.
        title: a line above.
        overlap: of the patches, see `patch_boxes`.
        baseline: what another model gives to the label.
    """
    figure = Figure(figsize=(7.2, 3.1), dpi=150, layout="constrained")
    picture, bars = figure.subplots(1, 2, width_ratios=(1, 1.2))
    _draw_case(picture, bars, Case(image, logits, overlap=overlap, baseline=baseline), label=label, labels=labels)
    figure.suptitle(title, parse_math=False)
    return figure


def plot_pair(one: Case, other: Case, *, label: int, labels: Sequence[str]) -> Figure:
    """Show two images beside each other as `plot_case` shows one, such as a scene with an object and without it.

    Args:
        one: the left image.
        other: the right one.
        label: index of the label to explain.
        labels: names of the L labels.
    """
    figure = Figure(figsize=(7.2, 5.2), dpi=150, layout="constrained")
    axes = figure.subplots(2, 2, height_ratios=(1.9, 1), sharey="row")
    for (picture, bars), case in zip(axes.T, (one, other), strict=True):
        _draw_case(picture, bars, case, label=label, labels=labels)
    return figure


def _draw_case(picture: Axes, bars: Axes, case: Case, *, label: int, labels: Sequence[str]) -> None:
    assert len(case.logits.weights) == 1, "one image"
    draw_shares(picture, case.image, case.logits.weights[0, :, label].tolist(), overlap=case.overlap)
    if case.mark is not None:
        picture.add_patch(_frame(case.mark, fill=False, edgecolor=_MARK, linestyle="--", linewidth=2))
    picture.set_title(case.title, parse_math=False)
    logits = case.logits
    chances = torch.stack([logits.image_logits.sigmoid(), logits.pooled_logits.sigmoid(), logits.probs])
    opinions = dict(zip(OPINIONS, chances[:, 0, label].tolist(), strict=True))
    draw_opinions(bars, opinions if case.baseline is None else {_OTHER: case.baseline, **opinions})
    bars.set_xlabel(f"probability of “{labels[label]}”", parse_math=False)


def _frame(box: PatchBox, **style: Any) -> Rectangle:
    # The centre of the first pixel is at 0.
    return Rectangle((box.left - 0.5, box.top - 0.5), box.right - box.left, box.bottom - box.top, **style)


def draw_shares(axes: Axes, image: NDArray[np.uint8], shares: Sequence[float], *, overlap: float) -> None:
    """Show an image (H,W,3), each of its P patches with its share and dimmed where that is small."""
    height, width = image.shape[:2]
    axes.imshow(image, interpolation="nearest")
    boxes = patch_boxes(height, width, grid=math.isqrt(len(shares)), overlap=overlap)
    for box, share in zip(boxes, shares, strict=True):
        axes.add_patch(_frame(box, color="black", alpha=0.35 * (1 - share)))
        axes.add_patch(_frame(box, fill=False, edgecolor="white"))
        # Towards the border of the image, where objects are rarest.
        right, low = box.left + box.right > width, box.top + box.bottom > height
        axes.annotate(
            f"{share:.0%}",
            (box.right - 1 if right else box.left, box.bottom - 1 if low else box.top),
            xytext=(-4 if right else 4, 4 if low else -4),
            textcoords="offset points",
            ha="right" if right else "left",
            va="bottom" if low else "top",
            color="white",
            fontweight="bold" if share == max(shares) else "normal",
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "black", "edgecolor": "none", "alpha": 0.7},
        )
    axes.set_axis_off()


def draw_opinions(axes: Axes, chances: dict[str, float]) -> None:
    """Show a bar for each probability by its name, with the colours of `OPINIONS`."""
    colours = [OPINIONS.get(name, BASELINE) for name in chances]
    bars = axes.barh(list(chances), list(chances.values()), color=colours, edgecolor="black", linewidth=0.6)
    axes.bar_label(bars, [f"{chance:.2f}" for chance in chances.values()], padding=4)
    axes.set(xlim=(0, 1.15), xticks=(0, 0.5, 1), ylim=(len(chances) - 0.5, -0.5))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines["bottom"].set_bounds(0, 1)


# Greys for the other two opinions: the bar to decide with has the colour of the tag.
_GREYS = {"whole image": "#D0D0D0", "its patches": "#8C8C8C"}
_THRESHOLD: dict[str, Any] = {"color": "black", "linestyle": ":", "linewidth": 1.2}
_WIDTH = 7.2


def plot_tag(image: NDArray[np.uint8], tag: Tag, *, overlap: float) -> Figure:
    """Show what speaks for one label, as `plot_case` does.

    Args:
        image: RGB pixels (h,w,3).
        tag: the label.
        overlap: of the patches, see `patch_boxes`.
    """
    figure = Figure(figsize=(_WIDTH, 3.1), dpi=150, layout="constrained")
    picture, bars = figure.subplots(1, 2, width_ratios=(1, 1.2))
    if tag.weights is None or tag.patch_prob is None:
        _draw_image(picture, image, size=image.shape[:2])
        draw_opinions(bars, {"whole image": tag.prob})
        bars.set_ylim(1, -1)
    else:
        grid = math.isqrt(len(tag.weights))
        if min(image.shape[:2]) < grid:  # then patches have parts of pixels
            image = image.repeat(grid, axis=0).repeat(grid, axis=1)
        draw_shares(picture, image, tag.weights, overlap=overlap)
        draw_opinions(bars, dict(zip(OPINIONS, (tag.image_prob, tag.patch_prob, tag.prob), strict=True)))
    bars.set_xlabel(f"probability of “{tag.label}”, given above {tag.threshold:.2f}", parse_math=False)
    return figure


def plot_tags(image: NDArray[np.uint8], tags: Sequence[Tag], *, size: tuple[int, int]) -> Figure:
    """Show an image with the frame of each tag's pivot patch, and what each opinion says of each tag.

    Args:
        image: RGB pixels (h,w,3).
        tags: 8 at most.
        size: rows and columns that the tags' boxes are in.
    """
    rows = 0.44 * len(tags) + 0.7
    picture_rows = min(_WIDTH * 0.5 * size[0] / size[1], 4.4) + 0.25
    figure = Figure(figsize=(_WIDTH, max(rows, picture_rows, 2.2)), dpi=150, layout="constrained")
    picture, bars = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_image(picture, image, size=size)
    _draw_pivots(picture, tags, size=size)
    _draw_tags(bars, tags)
    _explain_bars(figure, tags)
    return figure


def _draw_image(axes: Axes, image: NDArray[np.uint8], *, size: tuple[int, ...]) -> None:
    axes.imshow(image, extent=(0, size[1], size[0], 0))
    axes.set_axis_off()


def _draw_pivots(axes: Axes, tags: Sequence[Tag], *, size: tuple[int, int]) -> None:
    """Frame pivot patches; tags that share one get frames inside each other, and their names below each other."""
    shared = Counter(tag.box for tag in tags)
    for tag, colour, depth in zip(tags, COLOURS, nest_boxes(tags), strict=False):
        if tag.box is None:
            return
        left, top, right, bottom = tag.box
        step = min(0.014 * max(size), 0.04 * min(right - left, bottom - top))
        inset = step * (depth + 0.5)
        corner, sides = (left + inset, top + inset), (right - left - 2 * inset, bottom - top - 2 * inset)
        axes.add_patch(Rectangle(corner, *sides, fill=False, edgecolor="white", linewidth=3.6))
        axes.add_patch(Rectangle(corner, *sides, fill=False, edgecolor=colour, linewidth=2.4))
        far, low = left + right > size[1], top + bottom > size[0]  # towards the border, where objects are rarest
        edge = step * (shared[tag.box] + 0.5)
        axes.annotate(
            tag.label,
            (right - edge if far else left + edge, bottom - edge if low else top + edge),
            xytext=(-3 if far else 3, (12 * depth + 3) * (1 if low else -1)),
            textcoords="offset points",
            ha="right" if far else "left",
            va="bottom" if low else "top",
            fontsize=8,
            color=_ink(colour),
            bbox={"boxstyle": "round,pad=0.15", "facecolor": colour, "edgecolor": "white", "linewidth": 0.6},
            zorder=3,
            parse_math=False,
        )


def _ink(colour: str) -> str:
    """Black or white, whichever is read more easily on a colour."""
    red, green, blue = to_rgb(colour)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _draw_tags(axes: Axes, tags: Sequence[Tag]) -> None:
    """Rows of bars: thin ones for the whole image and the patches, a thick one to decide with."""
    thick, thin, shift = 0.4, 0.17, 0.0
    if tags[0].patch_prob is not None:
        shift = thin
        opinions = zip(*((tag.image_prob, tag.patch_prob) for tag in tags), strict=True)
        for place, (values, grey) in enumerate(zip(opinions, _GREYS.values(), strict=True)):
            rows = np.arange(len(tags)) - thick / 2 + thin * (place - 0.5)
            axes.barh(rows, values, height=thin, color=grey, edgecolor="black", linewidth=0.4)
    rows, probs = np.arange(len(tags)) + shift, [tag.prob for tag in tags]
    bars = axes.barh(rows, probs, height=thick, color=COLOURS[: len(tags)], edgecolor="black", linewidth=0.6)
    blank = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # a threshold may run through the number
    texts = [f"{prob:.2f}" for prob in probs]
    axes.bar_label(bars, texts, padding=3, fontsize=8, fontweight="bold", bbox=blank, zorder=3)
    axes.vlines([tag.threshold for tag in tags], rows - thick / 2, rows + thick / 2, **_THRESHOLD)
    axes.set_yticks(range(len(tags)), [tag.label for tag in tags], parse_math=False)
    spare = max(2.4 - len(tags), 0) / 2  # so that the bars of a single tag are not huge
    axes.set(xlim=(0, 1.13), xticks=(0, 0.5, 1), ylim=(len(tags) - 0.4 + spare, -0.6 - spare))
    axes.tick_params(labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    if all(tag.prob <= tag.threshold for tag in tags):
        axes.set_title("no label is above its threshold", fontsize=9)
    axes.spines["bottom"].set_bounds(0, 1)


def _explain_bars(figure: Figure, tags: Sequence[Tag]) -> None:
    """A line below that says what each bar is."""
    box: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.4}
    own = tuple(Rectangle((0, 0), 1, 1, facecolor=colour, **box) for colour in COLOURS[: min(len(tags), 3)])
    handles: dict[str, Any] = {"probability": own}
    if tags[0].patch_prob is not None:
        greys = {name: Rectangle((0, 0), 1, 1, facecolor=grey, **box) for name, grey in _GREYS.items()}
        handles = {**greys, "both (TDE)": own}
    handles["threshold"] = Line2D([], [], **_THRESHOLD)
    figure.legend(
        handles.values(),
        handles,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="outside lower right",
        ncols=len(handles),
        frameon=False,
        fontsize=8,
    )
