"""Figures show the numbers that they are given."""

from io import BytesIO

import numpy as np
import torch
from made_scores import make_scores
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pivotpatch.tuning.calibration import reliability
from pivotpatch.tuning.mixing import fit_mixing
from pivotpatch.tuning.plots import plot_effort, plot_lam, plot_reliability
from pivotpatch.tuning.tune import EffortCurve, EffortPoint


def draw(figure: Figure) -> list[Axes]:
    figure.savefig(BytesIO())
    assert plt.get_fignums() == []  # pyplot never hears of it
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


def test_lam_shows_a_line_per_temperature_and_marks_the_fitted_pair() -> None:
    study = fit_mixing(make_scores(tuple("abc"), count=60), resamples=10, generator=torch.Generator())
    (axes,) = draw(plot_lam(study))
    for line, means in zip(axes.lines, study.means, strict=False):
        np.testing.assert_allclose(np.asarray(line.get_ydata()), 100 * means)
        shares = np.asarray(line.get_xdata(), dtype=float)
        np.testing.assert_allclose(shares / (1 - shares), study.lams)


def test_effort_shows_cost_and_mean_and_marks_most_of_the_gain() -> None:
    points = tuple(EffortPoint(step / 3, step / 3, 1 + step, mean) for step, mean in enumerate((0.6, 0.65, 0.695, 0.7)))
    (axes,) = draw(plot_effort(EffortCurve(points)))
    line, level, mark = axes.lines
    np.testing.assert_allclose(np.asarray(line.get_xydata()), np.array([[1, 60], [2, 65], [3, 69.5], [4, 70]]))
    np.testing.assert_allclose(np.asarray(level.get_ydata()), [69, 69])
    np.testing.assert_allclose(np.asarray(mark.get_xydata()), [[3, 69.5]])
    assert len(draw(plot_effort(EffortCurve(points[::-1])))[0].lines) == 1  # patches that harm have no gain to keep
