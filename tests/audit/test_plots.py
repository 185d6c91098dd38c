"""Figures of an audit show the numbers that they are given."""

from io import BytesIO

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from pivotpatch.audit.cooccurrence import PairComparison, PairRates, compare_pairs, rank_pairs, rate_pairs
from pivotpatch.audit.plots import plot_pair_curves, plot_pairs
from pivotpatch.inference.scores import Scores

LABELS = ("cat", "$\\frac$ cash", "a label with a very long name indeed", "hat")  # no formulas


def render(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    assert plt.get_fignums() == []  # pyplot never hears of it
    return buffer.getvalue()


def rate(seed: int) -> PairRates:
    target = (torch.rand(120, 4, generator=torch.Generator().manual_seed(0)) < 0.5).float()
    logits = 2 * target - 1 + torch.randn(120, 4, generator=torch.Generator().manual_seed(seed))
    return rate_pairs(Scores(LABELS, tuple(map(str, range(120))), target, {"image": logits}))


@pytest.fixture
def comparison() -> PairComparison:
    return compare_pairs(rate(1), rate(2))


def test_curves_are_the_rates_of_both_models_and_titles_the_shares(comparison: PairComparison) -> None:
    figure = plot_pair_curves(comparison, names=LABELS[:2])
    for axes, curve in zip(figure.axes, (comparison.cfpr, comparison.ctpr), strict=True):
        ours, theirs = (np.asarray(line.get_ydata()) for line in axes.lines)
        np.testing.assert_array_equal(ours, curve.model.numpy())
        np.testing.assert_array_equal(theirs, curve.baseline.numpy())
        assert f"better in {100 * (curve.share_improved or 0):.0f} %" in axes.get_title()
    assert render(figure).startswith(b"\x89PNG")


def test_pairs_are_bars_of_both_models_beside_the_rate_overall(comparison: PairComparison) -> None:
    ranked = rank_pairs(comparison.model).select(torch.arange(3))
    figure = plot_pairs(ranked, baseline=comparison.baseline, names=LABELS[:2])
    theirs = {pair: row for row, pair in enumerate(comparison.baseline.names)}
    beside = comparison.baseline.select(torch.tensor([theirs[pair] for pair in ranked.names]))
    for place, name in enumerate(("fpr", "tpr")):
        drawn = [part for part in figure.axes[place].containers if isinstance(part, BarContainer)]
        for bars, rates in zip(drawn, (ranked, beside), strict=True):
            assert [bar.get_width() for bar in bars] == pytest.approx(getattr(rates, name).tolist())
    (overall,) = (line for line in figure.axes[0].lines if line.get_marker() == "D")
    assert np.asarray(overall.get_xdata()).tolist() == pytest.approx(ranked.overall_fpr.tolist())
    assert render(figure)
