"""A figure of what a data set holds: how often labels occur, how many an image has, and which occur together."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from pivotpatch.data.check import DataSummary
from pivotpatch.errors import cut

# One hue that also reads in greyscale and for every kind of colour blindness.
_BAR, _SHADES, _NOTHING = "#0072B2", "Blues", "#d9d9d9"
_ROW = 0.18  # inches of one line of text
_NAME = 24  # characters of a label that are shown
_MOST = 100  # labels on one sheet


def plot_overview(summary: DataSummary) -> Figure:
    """All of a data set on one sheet: labels per image, images of each label, and P(column | row) of all pairs.

    Of more labels than fit on a sheet, the most frequent are drawn. The diagonal, and what nobody knows, is grey.
    """
    order = np.argsort(-summary.label_counts, kind="stable")[:_MOST]
    side = max(_ROW * len(order), 4.0)
    title = (
        f"{summary.address}: {summary.num_records:,} images, {len(summary.labels):,} labels,"
        f" {summary.labels_per_image:.2f} labels per image"
    )
    if len(order) < len(summary.labels):
        title += f"\nonly the {_MOST} most frequent labels are drawn"
    figure = Figure(figsize=(side + 7, side + 3.4), layout="constrained", dpi=150)
    figure.suptitle(title, parse_math=False)
    areas = figure.add_gridspec(2, 2, width_ratios=[3.6, side + 3.4], height_ratios=[2, side + 1])
    _draw_histogram(figure.add_subplot(areas[0, 0]), summary)
    _draw_bars(figure.add_subplot(areas[1, 0]), summary, order)
    _draw_matrix(figure.add_subplot(areas[:, 1]), summary, np.sort(order))
    return figure


def plot_cooccurrence(summary: DataSummary) -> Figure:
    """P(column | row) of all pairs of labels as a matrix of shades; of many labels, the most frequent."""
    order = np.argsort(-summary.label_counts, kind="stable")[:_MOST]
    side = max(_ROW * len(order), 4.0)
    figure = Figure(figsize=(side + 3.4, side + 2), layout="constrained", dpi=150)
    _draw_matrix(figure.add_subplot(), summary, np.sort(order))
    return figure


def plot_label_counts(summary: DataSummary) -> Figure:
    """Images of each label as bars, the most frequent first."""
    order = np.argsort(-summary.label_counts, kind="stable")[:_MOST]
    figure = Figure(figsize=(3.6, _ROW * len(order) + 1), layout="constrained", dpi=150)
    _draw_bars(figure.add_subplot(), summary, order)
    return figure


def _draw_histogram(axes: Axes, summary: DataSummary) -> None:
    axes.bar(np.arange(len(summary.histogram)), summary.histogram, width=0.9, color=_BAR)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="labels per image", ylabel="images")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bars(axes: Axes, summary: DataSummary, order: NDArray[np.int64]) -> None:
    counts, places = summary.label_counts[order], np.arange(len(order))
    axes.bar_label(axes.barh(places, counts, color=_BAR), fmt="{:,.0f}", padding=2, fontsize=7)
    axes.set_yticks(places, [cut(summary.labels[i], _NAME) for i in order], fontsize=7, parse_math=False)
    axes.set(xlim=(0, 1.25 * max(int(counts.max()), 1)), ylim=(len(order) - 0.5, -0.5), xlabel="images")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=3)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_matrix(axes: Axes, summary: DataSummary, shown: NDArray[np.int64]) -> None:
    shares = summary.cooccurrence[np.ix_(shown, shown)]
    shares = np.ma.masked_invalid(np.where(np.eye(len(shown), dtype=bool), np.nan, shares))
    names, places = [cut(summary.labels[i], _NAME) for i in shown], np.arange(len(shown))
    axes.set_facecolor(_NOTHING)
    image = axes.imshow(shares, cmap=_SHADES, vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks(places, names, rotation=90, fontsize=7, parse_math=False)
    axes.set_yticks(places, names, fontsize=7, parse_math=False)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.xaxis.set_label_position("top")
    axes.set_ylabel("where this label is ...", labelpad=8)
    axes.set_xlabel("... this one is there too in this share of the images", labelpad=8)
    axes.figure.colorbar(image, ax=axes, shrink=0.6, aspect=30, label="P(column | row)")
