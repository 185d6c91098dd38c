"""Figures show the numbers that they are given."""

from collections.abc import Iterator
from io import BytesIO

import numpy as np
import pytest
import torch
from made_scores import make_scores
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pivotpatch.inference.plots import BASELINE
from pivotpatch.tuning.calibration import reliability
from pivotpatch.tuning.effort import EffortCurve, EffortPoint
from pivotpatch.tuning.mixing import fit_mixing
from pivotpatch.tuning.plots import plot_effort, plot_lam, plot_precision_recall, plot_reliability
from pivotpatch.tuning.thresholds import threshold_curve


@pytest.fixture(autouse=True)
def no_state() -> Iterator[None]:
    """No figure is left to pyplot."""
    yield
    assert plt.get_fignums() == []


def texts(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def draw(figure: Figure) -> list[Axes]:
    figure.savefig(BytesIO())
    return figure.axes


def test_reliability_shows_shares_intervals_and_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(500, generator=generator)
    curve = reliability(probs, (torch.rand(500, generator=generator) < probs).float(), bins=5)
    above, below = draw(plot_reliability({"before": curve, "after": curve}))
    drawn, _, (bars,) = above.containers[0].lines  # type: ignore[attr-defined]
    np.testing.assert_allclose(drawn.get_xydata(), torch.stack([curve.mean_prob, curve.share], 1))
    ends = [[bar[0, 1], bar[1, 1]] for bar in bars.get_segments()]
    np.testing.assert_allclose(ends, torch.stack([curve.low, curve.high], 1))
    np.testing.assert_allclose(np.asarray(below.lines[0].get_ydata()), curve.counts)
    assert texts(above)[1:] == [f"{name}: ECE {100 * curve.ece:.2f} %" for name in ("before", "after")]


def test_lam_shows_a_line_per_temperature_and_marks_the_fitted_pair() -> None:
    study = fit_mixing(make_scores(tuple("abc"), count=60), resamples=10, generator=torch.Generator())
    (axes,) = draw(plot_lam(study))
    for line, means in zip(axes.lines, study.means, strict=False):
        np.testing.assert_allclose(np.asarray(line.get_ydata()), 100 * means)
        shares = np.asarray(line.get_xdata(), dtype=float)
        np.testing.assert_allclose(shares / (1 - shares), study.lams)
    assert set(texts(axes)) == {
        "other temperatures",
        f"temperature {study.shared.temperature:g}",
        f"as scored: {100 * study.before.mean:.1f}",
        f"fitted lam {study.shared.lam:.2g}: {100 * study.shared.mean:.1f} out of fold",
    }


def test_effort_shows_cost_and_mean_and_marks_most_of_the_gain() -> None:
    means = (0.6, 0.65, 0.695, 0.7)
    points = tuple(EffortPoint(step / 3, step / 3, 1 + step, mean) for step, mean in enumerate(means))
    (axes,) = draw(plot_effort(EffortCurve(points)))
    line, level, mark = axes.lines
    np.testing.assert_allclose(
        np.asarray(line.get_xydata()), [[1 + step, 100 * mean] for step, mean in enumerate(means)]
    )
    np.testing.assert_allclose(np.asarray(level.get_ydata()), [69, 69])
    np.testing.assert_allclose(np.asarray(mark.get_xydata()), [[3, 69.5]])
    assert texts(axes) == ["90 % of the gain", "effort 0.67: 3.00 passes"]
    apart, last = plot_effort(EffortCurve(points, closer=True)).axes[0].lines[:2]
    assert np.asarray(apart.get_xdata()).tolist() == [1, 2, 3]
    assert np.asarray(last.get_xdata()).tolist() == [4]
    assert len(draw(plot_effort(EffortCurve(points[::-1])))[0].lines) == 1  # patches that harm have no gain to keep


def test_precision_and_recall_are_the_curves_in_few_points() -> None:
    generator = torch.Generator().manual_seed(0)
    target = (torch.rand(5000, generator=generator) < 0.02).float()
    curves = {
        name: threshold_curve(torch.randn(5000, generator=generator) + skill * target, target)
        for name, skill in (("image", 1.0), ("tde", 3.0), ("baseline", 0.5))
    }
    (axes,) = draw(plot_precision_recall(curves))
    assert [line.get_label() for line in axes.lines] == ["image", "TDE", "baseline"]
    assert len({line.get_linestyle() for line in axes.lines}) == len({line.get_color() for line in axes.lines}) == 3
    assert axes.lines[2].get_color() == BASELINE
    for line, curve in zip(axes.lines, curves.values(), strict=True):
        x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        assert len(x) == min(120, int(target.sum()))
        pairs = set(zip(curve.recall.tolist(), curve.precision.tolist(), strict=True))
        assert set(zip(x.tolist(), y.tolist(), strict=True)) <= pairs
        assert np.diff(x).max() < 0.03  # also where images are few and thresholds many
