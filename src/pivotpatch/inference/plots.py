"""Figures of what a model says of an image, and the colours of all figures."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from pivotpatch.core.counterfactual import CounterfactualLogits
from pivotpatch.runtime.prediction import Tag
from pivotpatch.runtime.values import PatchBox, patch_boxes

# The Okabe-Ito set and grey, which every kind of colour vision tells apart.
MODEL = "#0072B2"
BASELINE = "#808080"
KINDS = {"image": "#E69F00", "patch": "#56B4E9", "tde": MODEL}
"""Of logits; a model is judged by the last."""
RUNS = (MODEL, BASELINE, "#009E73", "#CC79A7", "#E69F00", "#D55E00")
"""Of several runs: the model, its baseline, and others."""
TAGS = (MODEL, "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""One per tag, the most probable first."""
OPINIONS = dict(zip(("whole image", "its patches", "both (TDE)"), KINDS.values(), strict=True))
"""The colour of each opinion."""
_WIDTH = 7.2


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
    figure, (picture, bars) = _open_figure(3.1)
    draw_case(picture, bars, image, logits, label=label, labels=labels, overlap=overlap, baseline=baseline)
    figure.suptitle(title, parse_math=False)
    return figure


def plot_tag(image: NDArray[np.uint8], tag: Tag, *, overlap: float) -> Figure:
    """Show what speaks for one label, as `plot_case` does.

    Args:
        image: RGB pixels (h,w,3).
        tag: the label.
        overlap: of the patches, see `patch_boxes`.
    """
    figure, (picture, bars) = _open_figure(3.1)
    _draw_shares(picture, image, tag.weights or (), overlap=overlap)
    probs = (tag.prob,) if tag.patch_prob is None else (tag.image_prob, tag.patch_prob, tag.prob)
    _draw_opinions(bars, dict(zip(OPINIONS, probs, strict=False)))
    bars.set_xlabel(f"probability of “{tag.label}”, given above {tag.threshold:.2f}", parse_math=False)
    return figure


def plot_tags(image: NDArray[np.uint8], tags: Sequence[Tag], *, size: tuple[int, int]) -> Figure:
    """Show an image with the frame of each tag's pivot patch, and what each opinion says of each tag.

    Args:
        image: RGB pixels (h,w,3).
        tags: those after the eighth are left out.
        size: rows and columns that the tags' boxes are in.
    """
    tags = tags[: len(TAGS)]
    picture_rows = min(_WIDTH * 0.5 * size[0] / size[1], 4.4) + 0.25
    figure, (picture, bars) = _open_figure(max(0.44 * len(tags) + 0.7, picture_rows, 2.2))
    picture.imshow(image, extent=(0, size[1], size[0], 0))
    picture.set_axis_off()
    shared: Counter[PatchBox] = Counter()
    for tag, colour in zip(tags, TAGS, strict=False):
        if tag.box is not None:
            _draw_pivot(picture, tag.label, tag.box, colour=colour, depth=shared[tag.box], size=size)
            shared[tag.box] += 1
    _draw_tags(bars, tags)
    figure.legend(loc="outside lower right", ncols=4, frameon=False, fontsize=8)
    return figure


def _open_figure(height: float) -> tuple[Figure, tuple[Axes, Axes]]:
    """A place for an image, and one for bars."""
    figure = Figure(figsize=(_WIDTH, height), dpi=150, layout="constrained")
    picture, bars = figure.subplots(1, 2, width_ratios=(1, 1.1))
    return figure, (picture, bars)


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
    grid = math.isqrt(len(shares))
    if min(image.shape[:2]) < grid:  # then patches have parts of pixels
        image = image.repeat(grid, axis=0).repeat(grid, axis=1)
    axes.imshow(image, interpolation="nearest")
    axes.set_axis_off()
    height, width = image.shape[:2]
    boxes = patch_boxes(height, width, grid=grid, overlap=overlap) if shares else []
    for box, share in zip(boxes, shares, strict=True):
        axes.add_patch(_frame(box, color="black", alpha=0.35 * (1 - share)))
        axes.add_patch(_frame(box, fill=False, edgecolor="white"))
        _write(axes, f"{share:.0%}", box, size=(height, width), fontweight="bold" if share == max(shares) else "normal")


def _write(
    axes: Axes, text: str, box: PatchBox, *, size: tuple[int, int], line: int = 0, colour: str = "black", **style: Any
) -> None:
    """Write to the corner of a patch that is nearest to the border of the image, where objects are rarest."""
    right, low = box.left + box.right > size[1], box.top + box.bottom > size[0]
    axes.annotate(
        text,
        (box.right if right else box.left, box.bottom if low else box.top),
        xytext=(-5 if right else 5, (5 + 12 * line) * (1 if low else -1)),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom" if low else "top",
        color="white",
        bbox={"boxstyle": "round,pad=0.2", "facecolor": "#000000B3", "edgecolor": colour},
        zorder=3,
        parse_math=False,
        **style,
    )


def _draw_opinions(axes: Axes, probs: Mapping[str, float]) -> None:
    """Show a bar for each probability by its name, with the colours of `OPINIONS`."""
    colours = [OPINIONS.get(name, BASELINE) for name in probs]
    bars = axes.barh(list(probs), list(probs.values()), color=colours, edgecolor="black", linewidth=0.6)
    axes.bar_label(bars, [f"{prob:.2f}" for prob in probs.values()], padding=4)
    _finish_bars(axes, len(probs))


def _finish_bars(axes: Axes, count: int) -> None:
    spare = max(2.4 - count, 0) / 2  # so that a single bar is not huge
    axes.set(xlim=(0, 1.15), xticks=(0, 0.5, 1), ylim=(count - 0.5 + spare, -0.5 - spare))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines["bottom"].set_bounds(0, 1)


def _draw_pivot(axes: Axes, label: str, box: PatchBox, *, colour: str, depth: int, size: tuple[int, int]) -> None:
    """Frame a pivot patch; tags that share one get frames inside each other, and their names below each other."""
    inset = (depth + 0.5) * min(0.014 * max(size), 0.04 * min(box.right - box.left, box.bottom - box.top))
    sides = box.right - box.left - 2 * inset, box.bottom - box.top - 2 * inset
    for edge, width in (("white", 3.6), (colour, 2.4)):
        place = (box.left + inset, box.top + inset)
        axes.add_patch(Rectangle(place, *sides, fill=False, edgecolor=edge, linewidth=width))
    _write(axes, label, box, size=size, line=depth, colour=colour, fontsize=8)


def _draw_tags(axes: Axes, tags: Sequence[Tag]) -> None:
    """Rows of bars: thin grey ones for the whole image and the patches, a thick one to decide with."""
    rows, probs = np.arange(len(tags), dtype=np.float64), [tag.prob for tag in tags]
    looked = any(tag.patch_prob is not None for tag in tags)
    if looked:
        thin: dict[str, Any] = {"height": 0.17, "edgecolor": "black", "linewidth": 0.4}
        axes.barh(rows - 0.3, [tag.image_prob for tag in tags], color="#D0D0D0", label="whole image", **thin)
        axes.barh(rows - 0.13, [tag.patch_prob or 0.0 for tag in tags], color="#8C8C8C", label="its patches", **thin)
        rows += 0.16
    name = "both (TDE)" if looked else "probability"
    style: dict[str, Any] = {"height": 0.4, "edgecolor": "black", "linewidth": 0.6, "label": name}
    bars = axes.barh(rows, probs, color=TAGS[: len(tags)], **style)
    blank = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # a threshold may run through the number
    axes.bar_label(bars, [f"{prob:.2f}" for prob in probs], padding=3, fontsize=8, fontweight="bold", bbox=blank)
    limits = [tag.threshold for tag in tags]
    axes.vlines(limits, rows - 0.2, rows + 0.2, color="black", linestyle=":", linewidth=1.2, label="threshold")
    axes.set_yticks(range(len(tags)), [tag.label for tag in tags], parse_math=False)
    axes.tick_params(labelsize=9)
    if all(tag.prob <= tag.threshold for tag in tags):
        axes.set_title("no label is above its threshold", fontsize=9)
    _finish_bars(axes, len(tags))
