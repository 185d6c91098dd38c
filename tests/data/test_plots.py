from pathlib import Path
from typing import cast

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from pivotpatch.data.check import DataSummary
from pivotpatch.data.plots import plot_overview


def make_summary(count: int, *, names: tuple[str, ...] | None = None) -> DataSummary:
    """A data set whose first label never occurs."""
    shown = np.random.default_rng(0).random((500, count)) < np.random.default_rng(1).random(count) / 3
    shown[:, 0] = False
    together = shown.T.astype(float) @ shown
    counts = shown.sum(axis=0)
    shares = np.full((count, count), np.nan)
    shares[counts > 0] = together[counts > 0] / counts[counts > 0, None]
    return DataSummary(
        address="table:photos.csv@train",
        num_records=500,
        labels=names or tuple(f"label number {i}" for i in range(count)),
        label_counts=counts,
        unknown_share=0.0,
        histogram=tuple(np.bincount(shown.sum(axis=1)).tolist()),
        cooccurrence=shares,
        pictures="files",
        checked="labels",
    )


def find_axes(figure: Figure, xlabel: str) -> Axes:
    (axes,) = [axes for axes in figure.axes if axes.get_xlabel().startswith(xlabel)]
    return axes


def written(texts: list[Text]) -> list[str]:
    return [text.get_text() for text in texts]


@pytest.mark.parametrize("count", [1, 130])
def test_the_overview_shows_what_the_summary_holds(count: int) -> None:
    summary = make_summary(count)
    figure = plot_overview(summary)
    bars, matrix = (find_axes(figure, label) for label in ("images", "... this one"))
    order = np.argsort(-summary.label_counts, kind="stable")[:100]
    assert written(bars.get_yticklabels()) == [summary.labels[i] for i in order]
    assert [bar.get_width() for bar in bars.patches] == summary.label_counts[order].tolist()  # type: ignore[attr-defined]
    kept = np.sort(order)
    assert written(matrix.get_xticklabels()) == written(matrix.get_yticklabels()) == [summary.labels[i] for i in kept]
    drawn = cast("np.ma.MaskedArray[tuple[int, int], np.dtype[np.float64]]", matrix.images[0].get_array())
    shares = summary.cooccurrence[np.ix_(kept, kept)]
    hidden = np.isnan(shares) | np.eye(len(kept), dtype=bool)
    assert np.array_equal(np.ma.getmaskarray(drawn), hidden)
    assert np.array_equal(drawn.data[~hidden], shares[~hidden])
    histogram = find_axes(figure, "labels per image")
    assert [bar.get_height() for bar in histogram.patches] == list(summary.histogram)  # type: ignore[attr-defined]
    assert ("only the 100 most frequent labels are drawn" in figure.get_suptitle()) == (count > 100)


def test_odd_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    names = ("$\\frac{", "a very long name that goes on and on and on", "50 % _off_", "Größe")
    figure = plot_overview(make_summary(4, names=names))
    figure.savefig(tmp_path / "plot.svg")
    labels = {name for axes in figure.axes for name in written(axes.get_yticklabels())}
    assert {"$\\frac{", "50 % _off_", "Größe"} <= labels
    assert max(map(len, labels)) <= 24
