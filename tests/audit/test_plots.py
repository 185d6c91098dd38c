"""Figures of an audit show the numbers that they are given."""

from io import BytesIO

import numpy as np
import pytest
import torch
from made_scores import make_scores
from matplotlib import pyplot as plt
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from pivotpatch.audit.cooccurrence import compare_pairs, rank_pairs, rate_pairs
from pivotpatch.audit.plots import plot_pair_curves, plot_pairs

LABELS = ("cat", "$\\frac$ cash", "a label with a very long name indeed", "hat")  # no formulas


def render(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    assert plt.get_fignums() == []  # pyplot never hears of it
    return buffer.getvalue()


COMPARISON = compare_pairs(*(rate_pairs(make_scores(LABELS, patches=False, seed=seed)) for seed in (1, 2)))


def test_curves_are_the_rates_of_both_models_and_titles_the_shares() -> None:
    figure = plot_pair_curves(COMPARISON, names=LABELS[:2])
    for axes, curve in zip(figure.axes, (COMPARISON.cfpr, COMPARISON.ctpr), strict=True):
        ours, theirs = (np.asarray(line.get_ydata()) for line in axes.lines)
        np.testing.assert_array_equal(ours, curve.model.numpy())
        np.testing.assert_array_equal(theirs, curve.baseline.numpy())
        assert f"better in {100 * (curve.share_improved or 0):.0f} %" in axes.get_title()
    assert render(figure).startswith(b"\x89PNG")


def test_pairs_are_bars_of_both_models_beside_the_rate_overall() -> None:
    ranked = rank_pairs(COMPARISON.model).select(torch.arange(3))
    figure = plot_pairs(ranked, baseline=COMPARISON.baseline, names=LABELS[:2])
    theirs = {pair: row for row, pair in enumerate(COMPARISON.baseline.names)}
    beside = COMPARISON.baseline.select(torch.tensor([theirs[pair] for pair in ranked.names]))
    for place, name in enumerate(("fpr", "tpr")):
        drawn = [part for part in figure.axes[place].containers if isinstance(part, BarContainer)]
        for bars, rates in zip(drawn, (ranked, beside), strict=True):
            assert [bar.get_width() for bar in bars] == pytest.approx(getattr(rates, name).tolist())
    (overall,) = (line for line in figure.axes[0].lines if line.get_marker() == "D")
    assert np.asarray(overall.get_xdata()).tolist() == pytest.approx(ranked.overall_fpr.tolist())
    assert render(figure)
