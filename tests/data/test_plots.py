import io
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from pivotpatch.data.check import DataSummary
from pivotpatch.data.plots import plot_cooccurrence, plot_label_counts, plot_overview

Plot = Callable[[DataSummary], Figure]
PLOTS = [plot_cooccurrence, plot_label_counts, plot_overview]


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


def matrix_axes(figure: Figure) -> Axes:
    (axes,) = [axes for axes in figure.axes if axes.images]
    return axes


def bar_axes(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_xlabel() == "pictures"]


def written(texts: list[Text]) -> list[str]:
    return [text.get_text() for text in texts]


@pytest.mark.parametrize("plot", [plot_cooccurrence, plot_overview])
def test_matrix_shows_each_share_and_nothing_on_the_diagonal(plot: Plot) -> None:
    summary = make_summary(30)
    axes = matrix_axes(plot(summary))
    drawn = cast("np.ma.MaskedArray[tuple[int, int], np.dtype[np.float64]]", axes.images[0].get_array())
    hidden = np.isnan(summary.cooccurrence) | np.eye(30, dtype=bool)
    assert np.array_equal(np.ma.getmaskarray(drawn), hidden)
    assert np.array_equal(drawn.data[~hidden], summary.cooccurrence[~hidden])
    assert axes.images[0].get_clim() == (0, 1)
    assert written(axes.get_xticklabels()) == written(axes.get_yticklabels()) == list(summary.labels)


@pytest.mark.parametrize("plot", [plot_label_counts, plot_overview])
@pytest.mark.parametrize("count", [1, 10, 80, 256])
def test_bars_fall_and_share_one_scale(plot: Plot, count: int) -> None:
    summary = make_summary(count)
    columns = bar_axes(plot(summary))
    names = [name for axes in columns for name in written(axes.get_yticklabels())]
    lengths = [bar.get_width() for axes in columns for bar in axes.patches]  # type: ignore[attr-defined]
    assert sorted(names) == sorted(summary.labels)
    assert lengths == sorted(summary.label_counts.tolist(), reverse=True)
    assert lengths == [summary.label_counts[summary.labels.index(name)] for name in names]
    assert len({axes.get_xlim() for axes in columns}) == len({axes.get_ylim() for axes in columns}) == 1


def test_overview_has_the_histogram() -> None:
    summary = make_summary(10)
    (axes,) = [axes for axes in plot_overview(summary).axes if axes.get_xlabel() == "labels a picture"]
    assert [bar.get_height() for bar in axes.patches] == list(summary.histogram)  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [10, 80, 256])
def test_names_are_legible_and_do_not_overlap(count: int) -> None:
    figure = plot_overview(make_summary(count))
    figure.draw_without_rendering()
    matrix = matrix_axes(figure)
    for axis in [matrix.yaxis, *(axes.yaxis for axes in bar_axes(figure))]:
        boxes = [label.get_window_extent() for label in axis.get_ticklabels()]
        assert all(above.y0 >= below.y1 - 0.5 for above, below in pairwise(boxes))
    boxes = [label.get_window_extent() for label in matrix.get_xticklabels()]
    assert all(left.x1 <= right.x0 + 0.5 for left, right in pairwise(boxes))
    assert min(float(label.get_fontsize()) for label in matrix.get_yticklabels()) >= 6


@pytest.mark.parametrize("plot", PLOTS)
def test_more_labels_than_a_sheet_holds_are_cut_to_the_most_frequent(plot: Plot) -> None:
    summary = make_summary(450)
    figure = plot(summary)
    assert figure.get_suptitle().splitlines()[-1] == "only the 400 most frequent of 450 labels are drawn"
    kept = set(np.argsort(-summary.label_counts, kind="stable")[:400].tolist())
    names = [name for i, name in enumerate(summary.labels) if i in kept]
    for axes in figure.axes:
        if axes.images:
            assert written(axes.get_yticklabels()) == names
            chosen = [summary.labels.index(name) for name in names]
            drawn = cast("np.ma.MaskedArray[tuple[int, int], np.dtype[np.float64]]", axes.images[0].get_array())
            assert drawn[3, 5] == summary.cooccurrence[chosen[3], chosen[5]]
    bars = [name for axes in bar_axes(figure) for name in written(axes.get_yticklabels())]
    assert not bars or sorted(bars) == sorted(names)
    assert max(figure.get_size_inches()) * 150 < 2**15
    assert "only" not in plot(make_summary(10)).get_suptitle()


def test_few_labels_have_their_shares_written_readably() -> None:
    axes = matrix_axes(plot_cooccurrence(make_summary(4)))
    assert len(axes.texts) == 4 * 3 - 3  # no diagonal, and a first row of which nothing is known
    assert not matrix_axes(plot_cooccurrence(make_summary(13))).texts


@pytest.mark.parametrize("plot", PLOTS)
def test_odd_names_are_drawn_as_they_are(plot: Plot) -> None:
    names = ("$\\frac{", "a very long name that goes on and on and on", "50 % _off_", "Größe")
    figure = plot(make_summary(4, names=names))
    figure.draw_without_rendering()
    labels = {name for axes in figure.axes for name in written(axes.get_yticklabels())}
    assert {"$\\frac{", "a very long name that g…", "50 % _off_", "Größe"} <= labels


@pytest.mark.parametrize("plot", PLOTS)
def test_png_and_svg_can_be_saved(plot: Plot, tmp_path: Path) -> None:
    figure = plot(make_summary(5))
    figure.savefig(tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    file = io.BytesIO()
    figure.savefig(file, format="png")
    colours = np.asarray(Image.open(file).convert("RGB")).reshape(-1, 3)
    assert len(np.unique(colours, axis=0)) > 50


def test_pyplot_and_its_global_state_stay_out() -> None:
    script = (
        "import sys\n"
        "import numpy as np\n"
        "from pivotpatch.data.check import DataSummary\n"
        "from pivotpatch.data.plots import plot_overview\n"
        "s = DataSummary('x', 2, ('a',), np.array([1]), 0.0, (1, 1), np.ones((1, 1)), 'files', 'labels')\n"
        "plot_overview(s).canvas.draw()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
