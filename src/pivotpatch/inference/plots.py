"""Figures of why a label is given to an image or not, and the colours of all figures."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from pivotpatch.core.counterfactual import CounterfactualLogits
from pivotpatch.runtime.drawing import OPINIONS
from pivotpatch.runtime.values import PatchBox, patch_boxes

# The Okabe-Ito set and grey, which every kind of colour vision tells apart.
MODEL = "#0072B2"
BASELINE = "#808080"
KINDS = dict(zip(("image", "patch", "tde"), OPINIONS.values(), strict=True))
"""Of logits; a model is judged by the last."""
RUNS = (MODEL, BASELINE, "#009E73", "#CC79A7", "#E69F00", "#D55E00")
"""Of several runs: the model, its baseline, and others."""


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
    picture, bars = figure.subplots(1, 2, width_ratios=(1, 1.1))
    draw_case(picture, bars, image, logits, label=label, labels=labels, overlap=overlap, baseline=baseline)
    figure.suptitle(title, parse_math=False)
    return figure


def draw_case(
    picture: Axes,
    bars: Axes,
    image: NDArray[np.uint8],
    logits: CounterfactualLogits,
    *,
    label: int,
    labels: Sequence[str],
    overlap: float = 0.0,
    baseline: float | None = None,
) -> None:
    """Draw what `plot_case` shows to two places of a figure."""
    assert len(logits.weights) == 1, "one image"
    _draw_shares(picture, image, logits.weights[0, :, label].tolist(), overlap=overlap)
    probs = torch.stack([logits.image_logits.sigmoid(), logits.pooled_logits.sigmoid(), logits.probs])[:, 0, label]
    others = {} if baseline is None else {"baseline": baseline}
    _draw_opinions(bars, {**others, **dict(zip(OPINIONS, probs.tolist(), strict=True))})
    bars.set_xlabel(f"probability of “{labels[label]}”", parse_math=False)


def _frame(box: PatchBox, **style: Any) -> Rectangle:
    # The centre of the first pixel is at 0.
    return Rectangle((box.left - 0.5, box.top - 0.5), box.right - box.left, box.bottom - box.top, **style)


def _draw_shares(axes: Axes, image: NDArray[np.uint8], shares: Sequence[float], *, overlap: float) -> None:
    """Show an image (H,W,3), each of its P patches with its share and dimmed where that is small."""
    axes.imshow(image, interpolation="nearest")
    axes.set_axis_off()
    height, width = image.shape[:2]
    boxes = patch_boxes(height, width, grid=math.isqrt(len(shares)), overlap=overlap)
    for box, share in zip(boxes, shares, strict=True):
        axes.add_patch(_frame(box, color="black", alpha=0.35 * (1 - share)))
        axes.add_patch(_frame(box, fill=False, edgecolor="white"))
        _write(axes, f"{share:.0%}", box, size=(height, width), fontweight="bold" if share == max(shares) else "normal")


def _write(axes: Axes, text: str, box: PatchBox, *, size: tuple[int, int], fontweight: str) -> None:
    """Write to the corner of a patch that is nearest to the border of the image, where objects are rarest."""
    right, low = box.left + box.right > size[1], box.top + box.bottom > size[0]
    axes.annotate(
        text,
        (box.right if right else box.left, box.bottom if low else box.top),
        xytext=(-5 if right else 5, 5 if low else -5),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom" if low else "top",
        color="white",
        bbox={"boxstyle": "round,pad=0.2", "facecolor": "#000000B3", "edgecolor": "black"},
        fontweight=fontweight,
        zorder=3,
        parse_math=False,
    )


def _draw_opinions(axes: Axes, probs: Mapping[str, float]) -> None:
    """Show a bar for each probability by its name, with the colours of `OPINIONS`."""
    colours = [OPINIONS.get(name, BASELINE) for name in probs]
    bars = axes.barh(list(probs), list(probs.values()), color=colours, edgecolor="black", linewidth=0.6)
    axes.bar_label(bars, [f"{prob:.2f}" for prob in probs.values()], padding=4)
    axes.set(xlim=(0, 1.15), xticks=(0, 0.5, 1), ylim=(len(probs) - 0.5, -0.5))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines["bottom"].set_bounds(0, 1)
