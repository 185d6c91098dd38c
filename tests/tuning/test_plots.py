from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from pivotpatch.inference.plots import BASELINE
from pivotpatch.inference.scores import Scores
from pivotpatch.tuning.calibration import Reliability, reliability
from pivotpatch.tuning.effort import EffortCurve, EffortPoint
from pivotpatch.tuning.mixing import MixingStudy, fit_mixing
from pivotpatch.tuning.plots import plot_effort, plot_lam, plot_precision_recall, plot_reliability
from pivotpatch.tuning.thresholds import threshold_curve


def render(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def texts(figure: Figure, axes: int = 0) -> list[str]:
    legend = figure.axes[axes].get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


@pytest.fixture
def curve() -> Reliability:
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(500, generator=generator)
    return reliability(probs, (torch.rand(500, generator=generator) < probs).float(), bins=5)


def test_reliability_shows_shares_intervals_and_counts(curve: Reliability) -> None:
    figure = plot_reliability({"before": curve, "after": curve})
    above, below = figure.axes
    drawn = above.containers[0].lines[0]  # type: ignore[attr-defined]
    np.testing.assert_allclose(drawn.get_xydata(), torch.stack([curve.mean_prob, curve.share], 1))
    bars = above.containers[0].lines[2][0].get_segments()  # type: ignore[attr-defined]
    np.testing.assert_allclose([[b[0, 1], b[1, 1]] for b in bars], torch.stack([curve.low, curve.high], 1))
    np.testing.assert_allclose(np.asarray(below.lines[0].get_ydata()), curve.counts)
    assert texts(figure)[1:] == [f"{name}: ECE {100 * curve.ece:.2f} %" for name in ("before", "after")]
    assert render(figure).startswith(b"\x89PNG")


@pytest.fixture
def study() -> MixingStudy:
    generator = torch.Generator().manual_seed(0)
    image, parts = torch.randn(60, 3, generator=generator), torch.randn(60, 4, 3, generator=generator)
    weights = torch.softmax(parts, dim=1)
    pooled = (weights * parts).sum(1)
    target = (image + pooled + torch.randn(60, 3, generator=generator) > 1).float()
    logits = {"image": image, "patch": pooled, "tde": image + pooled}
    scores = Scores(tuple("abc"), tuple(map(str, range(60))), target, logits, parts, weights)
    return fit_mixing(scores, resamples=10, generator=generator)


def test_lam_shows_a_line_a_temperature_and_marks_the_fitted_pair(study: MixingStudy) -> None:
    figure = plot_lam(study)
    lines = figure.axes[0].lines[: len(study.temperatures)]
    for line, means in zip(lines, study.means, strict=True):
        np.testing.assert_allclose(np.asarray(line.get_ydata()), 100 * means)
        shares = np.asarray(line.get_xdata(), dtype=float)
        np.testing.assert_allclose(shares / (1 - shares), study.lams)
        assert all(a < b for a, b in pairwise(shares))
    assert set(texts(figure)) == {
        "other temperatures",
        f"temperature {study.shared.temperature:g}",
        f"as scored: {100 * study.before.mean:.1f}",
        f"fitted lam {study.shared.lam:.2g}: {100 * study.shared.mean:.1f} out of fold",
    }
    assert render(figure).startswith(b"\x89PNG")
    assert plt.get_fignums() == []


def test_effort_shows_cost_and_mean_and_marks_most_of_the_gain() -> None:
    means = (0.6, 0.65, 0.695, 0.7)
    points = tuple(EffortPoint(step / 3, step / 3, 1 + step, mean) for step, mean in enumerate(means))
    figure = plot_effort(EffortCurve(points))
    line, level, mark = figure.axes[0].lines
    np.testing.assert_allclose(
        np.asarray(line.get_xydata()), [[1 + step, 100 * mean] for step, mean in enumerate(means)]
    )
    np.testing.assert_allclose(np.asarray(level.get_ydata()), [69, 69])
    np.testing.assert_allclose(np.asarray(mark.get_xydata()), [[3, 69.5]])
    assert texts(figure) == ["90 % of the gain", "effort 0.67: 3.00 passes"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["image alone: 60.0", "all patches: 70.0"]
    assert render(figure).startswith(b"\x89PNG")
    apart, last = plot_effort(EffortCurve(points, closer=True)).axes[0].lines[:2]
    assert np.asarray(apart.get_xdata()).tolist() == [1, 2, 3]
    assert np.asarray(last.get_xdata()).tolist() == [4]
    nothing = plot_effort(EffortCurve(points[::-1]))  # patches that harm have no gain to keep
    assert len(nothing.axes[0].lines) == 1
    assert render(nothing).startswith(b"\x89PNG")


def test_lines_are_the_curves_and_few_points_tell_them() -> None:
    generator = torch.Generator().manual_seed(0)
    target = (torch.rand(5000, generator=generator) < 0.02).float()
    curves = {
        name: threshold_curve((torch.randn(5000, generator=generator) + skill * target).sigmoid(), target)
        for name, skill in (("image", 1.0), ("tde", 3.0), ("baseline", 0.5))
    }
    axes = plot_precision_recall(curves).axes[0]
    assert [line.get_label() for line in axes.lines] == ["image", "TDE", "baseline"]
    assert len({line.get_linestyle() for line in axes.lines}) == len({line.get_color() for line in axes.lines}) == 3
    assert axes.lines[2].get_color() == BASELINE
    for line, curve in zip(axes.lines, curves.values(), strict=True):
        x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        assert len(x) == min(120, int(target.sum()))
        pairs = set(zip(curve.recall.tolist(), curve.precision.tolist(), strict=True))
        assert set(zip(x.tolist(), y.tolist(), strict=True)) <= pairs
        assert np.diff(x).max() < 0.03  # also where images are few and thresholds many
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("recall", "precision")
