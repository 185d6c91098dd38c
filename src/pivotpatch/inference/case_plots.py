"""Pictures of what a model says: an image, its patches and the three opinions about one label."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from pivotpatch.core.counterfactual import CounterfactualLogits
from pivotpatch.core.errors import InputError
from pivotpatch.core.patches import PatchBox, patch_boxes
from pivotpatch.inference.colours import BASELINE, KINDS

OPINIONS = dict(zip(("whole image", "its patches", "both (TDE)"), KINDS.values(), strict=True))
"""The colour of each opinion."""
_BASELINE = "baseline"
_MARK = "#F0E442"


class Case(NamedTuple):
    """One picture to explain.

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
    """Show why a label is given to a picture or not.

    On the left the picture, each patch with its share in the decision and dimmed where that is
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
    """Show two pictures beside each other as `plot_case` shows one, such as a scene with an object and without it.

    Args:
        one: the left picture.
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
    _check_case(case, label, labels)
    draw_shares(picture, case.image, case.logits.weights[0, :, label].tolist(), overlap=case.overlap)
    if case.mark is not None:
        picture.add_patch(_frame(case.mark, fill=False, edgecolor=_MARK, linestyle="--", linewidth=2))
    picture.set_title(case.title, parse_math=False)
    logits = case.logits
    chances = torch.stack([logits.image_logits.sigmoid(), logits.pooled_logits.sigmoid(), logits.probs])
    opinions = dict(zip(OPINIONS, chances[:, 0, label].tolist(), strict=True))
    draw_opinions(bars, opinions if case.baseline is None else {_BASELINE: case.baseline, **opinions})
    bars.set_xlabel(f"probability of “{labels[label]}”", parse_math=False)


def _check_case(case: Case, label: int, labels: Sequence[str]) -> None:
    image, (batch, patches, count) = case.image, case.logits.weights.shape
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise InputError("plot", f"the image is {image.dtype} of shape {image.shape}", "give RGB bytes (H, W, 3)")
    if batch != 1:
        raise InputError("plot", f"logits are of {batch} images", "give those of one, a batch of 1")
    if math.isqrt(patches) ** 2 != patches:
        raise InputError("plot", f"logits are of {patches} patches", "give those of a square grid")
    if len(labels) != count or not 0 <= label < count:
        raise InputError(
            "plot",
            f"label {label}, {len(labels)} names and logits of {count} labels",
            "give one name a label, and the index of one of them",
        )


def _frame(box: PatchBox, **style: Any) -> Rectangle:
    # The centre of the first pixel is at 0.
    return Rectangle((box.left - 0.5, box.top - 0.5), box.right - box.left, box.bottom - box.top, **style)


def draw_shares(axes: Axes, image: NDArray[np.uint8], shares: Sequence[float], *, overlap: float) -> None:
    """Show a picture (H,W,3), each of its P patches with its share and dimmed where that is small."""
    height, width = image.shape[:2]
    axes.imshow(image, interpolation="nearest")
    boxes = patch_boxes(height, width, grid=math.isqrt(len(shares)), overlap=overlap)
    for box, share in zip(boxes, shares, strict=True):
        axes.add_patch(_frame(box, color="black", alpha=0.35 * (1 - share)))
        axes.add_patch(_frame(box, fill=False, edgecolor="white"))
        # Towards the border of the picture, where objects are rarest.
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
