"""Pictures of what a data set holds: how often labels occur, how many a picture has, and in which company."""

from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from pivotpatch.data.check import DataSummary

# One hue that also reads in greyscale and for every kind of colour blindness.
_BAR, _SHADES, _NOTHING = "#0072B2", "Blues", "#d9d9d9"
_ROW = 0.17  # inches of one line of text
_COLUMN_ROWS = 45  # labels in one column of bars before the next begins, unless there is room for more
_NAME = 24  # characters of a label that are shown
_MOST = 400  # labels on one sheet; more would be gigabytes of pixels that nobody can read


def plot_cooccurrence(summary: DataSummary) -> Figure:
    """P(column | row) of all pairs of labels as a matrix of shades; grey on the diagonal and where nothing is known."""
    shown = _keep_most_frequent(summary)
    figure = Figure(figsize=_matrix_size(len(shown.labels)), layout="constrained")
    figure.suptitle(_tell_cut(summary))
    _draw_matrix(figure, shown)
    return figure


def plot_label_counts(summary: DataSummary) -> Figure:
    """Pictures of each label as bars, the most frequent first."""
    shown = _keep_most_frequent(summary)
    figure = Figure(figsize=_bars_size(len(shown.labels), _COLUMN_ROWS), layout="constrained")
    figure.suptitle(_tell_cut(summary))
    _draw_bars(figure, shown, most=_COLUMN_ROWS)
    return figure


def plot_overview(summary: DataSummary) -> Figure:
    """All of a data set on one sheet: labels a picture, pictures of each label, and the company of labels."""
    shown = _keep_most_frequent(summary)
    histogram, matrix = 2.4, _matrix_size(len(shown.labels))
    most = max(_COLUMN_ROWS, int((matrix[1] - histogram - 1) / _ROW))
    bars = _bars_size(len(shown.labels), most)
    height = max(histogram + bars[1], matrix[1])
    figure = Figure(figsize=(bars[0] + matrix[0], height + 0.4), layout="constrained")
    figure.suptitle(
        f"{summary.address}: {summary.num_records:,} pictures, {len(summary.labels)} labels,"
        f" {summary.labels_per_picture:.2f} labels a picture\n{_tell_cut(summary)}".rstrip(),
        parse_math=False,
    )
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[bars[0], matrix[0]])[0]
    above, below = left.subfigures(2, 1, squeeze=False, height_ratios=[histogram, height - histogram])[:, 0]
    _draw_histogram(above, summary)
    _draw_bars(below, shown, most=most)
    _draw_matrix(right, shown)
    return figure


def _keep_most_frequent(summary: DataSummary) -> DataSummary:
    """The same with no more labels than fit on a sheet, in their own order."""
    if len(summary.labels) <= _MOST:
        return summary
    kept = np.sort(np.argsort(-summary.label_counts, kind="stable")[:_MOST])
    return replace(
        summary,
        labels=tuple(summary.labels[i] for i in kept),
        label_counts=summary.label_counts[kept],
        cooccurrence=summary.cooccurrence[np.ix_(kept, kept)],
    )


def _tell_cut(summary: DataSummary) -> str:
    count = len(summary.labels)
    return f"only the {_MOST} most frequent of {count:,} labels are drawn" if count > _MOST else ""


def _matrix_size(count: int) -> tuple[float, float]:
    side = max(count * _cell(count), 2.0)
    return side + 3.2, side + 2.2


def _cell(count: int) -> float:
    """Inches of one cell of the matrix: large for few labels, and never too small for its name."""
    return float(np.clip(6 / count, 0.105 if count > 120 else 0.15, 0.5))


def _bars_size(count: int, most: int) -> tuple[float, float]:
    """Inches of the bars of labels, at most `most` below each other."""
    columns = -(-count // most)
    return 3.6 * columns, _ROW * -(-count // columns) + 1.0


def _shorten(name: str) -> str:
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _draw_histogram(canvas: FigureBase, summary: DataSummary) -> None:
    axes = canvas.subplots()
    axes.bar(np.arange(len(summary.histogram)), summary.histogram, width=0.9, color=_BAR)
    axes.set_xlim(-0.6, max(len(summary.histogram) - 1, 1) + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("labels a picture")
    axes.set_ylabel("pictures")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    _clean(axes)


def _draw_bars(canvas: FigureBase, summary: DataSummary, *, most: int) -> None:
    order = np.argsort(-summary.label_counts, kind="stable")
    columns = -(-len(order) // most)
    rows = -(-len(order) // columns)
    highest = max(int(summary.label_counts.max()), 1)
    for axes, labels in zip(canvas.subplots(1, columns, squeeze=False)[0], _cut(order, rows), strict=True):
        bars = axes.barh(np.arange(len(labels)), summary.label_counts[labels], color=_BAR)
        axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=7)
        axes.set_yticks(
            np.arange(len(labels)), [_shorten(summary.labels[i]) for i in labels], fontsize=7, parse_math=False
        )
        # All columns have the same scale and the same height of a bar.
        axes.set(xlim=(0, 1.25 * highest), ylim=(rows - 0.5, -0.5), xlabel="pictures")
        axes.locator_params(axis="x", nbins=3)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.tick_params(axis="x", labelsize=7)
        _clean(axes)


def _cut(order: NDArray[np.int64], rows: int) -> list[NDArray[np.int64]]:
    return [order[start : start + rows] for start in range(0, len(order), rows)]


def _draw_matrix(canvas: FigureBase, summary: DataSummary) -> None:
    count = len(summary.labels)
    shares = np.ma.masked_invalid(np.where(np.eye(count, dtype=bool), np.nan, summary.cooccurrence))
    size = min(9.0, 0.8 * 72 * _cell(count))
    names = [_shorten(name) for name in summary.labels]
    axes = canvas.subplots()
    axes.set_facecolor(_NOTHING)
    image = axes.imshow(shares, cmap=_SHADES, vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks(np.arange(count), names, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(np.arange(count), names, fontsize=size, parse_math=False)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.xaxis.set_label_position("top")
    axes.set_ylabel("where this label is ...", labelpad=8)
    axes.set_xlabel("... this one is there too in this share of the pictures", labelpad=8)
    if count <= 12:
        for row, column in np.argwhere(~np.ma.getmaskarray(shares)):
            share = float(shares[row, column])
            ink = "white" if share > 0.6 else "black"
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=8, color=ink)
    bar = canvas.colorbar(image, ax=axes, shrink=0.6, aspect=30)
    bar.set_label("P(column | row)")
