"""Figures show the numbers that they are given, names are no formulas, and pyplot never hears of them."""

from io import BytesIO

import numpy as np
from made_scores import make_scores
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pivotpatch.audit.cooccurrence import compare_pairs, rate_pairs
from pivotpatch.audit.plots import plot_pair_curves
from pivotpatch.training.plots import plot_curves
from pivotpatch.tuning.plots import plot_effort
from pivotpatch.tuning.tune import EffortCurve, EffortPoint

LABELS = ("cat", "$\\frac$ cash", "a label with a very long name & more", "hat")
COMPARISON = compare_pairs(*(rate_pairs(make_scores(LABELS, patches=False, seed=seed)) for seed in (1, 2)))


def draw(figure: Figure) -> list[Axes]:
    figure.savefig(BytesIO(), format="png")
    assert plt.get_fignums() == []
    return figure.axes


def test_curves_are_the_rates_of_both_models_and_titles_the_shares() -> None:
    figure = plot_pair_curves(COMPARISON, names=LABELS[:2])
    for axes, curve in zip(draw(figure), (COMPARISON.cfpr, COMPARISON.ctpr), strict=True):
        ours, theirs = (np.asarray(line.get_ydata()) for line in axes.lines)
        np.testing.assert_array_equal(ours, curve.model.numpy())
        np.testing.assert_array_equal(theirs, curve.baseline.numpy())
        assert f"better in {100 * (curve.share_improved or 0):.0f} %" in axes.get_title()


def test_effort_shows_cost_and_mean_and_marks_most_of_the_gain() -> None:
    points = tuple(EffortPoint(step / 3, step / 3, 1 + step, mean) for step, mean in enumerate((0.6, 0.65, 0.695, 0.7)))
    (axes,) = draw(plot_effort(EffortCurve(points)))
    line, level, mark = axes.lines
    np.testing.assert_allclose(np.asarray(line.get_xydata()), np.array([[1, 60], [2, 65], [3, 69.5], [4, 70]]))
    np.testing.assert_allclose(np.asarray(level.get_ydata()), [69, 69])
    np.testing.assert_allclose(np.asarray(mark.get_xydata()), [[3, 69.5]])
    assert len(draw(plot_effort(EffortCurve(points[::-1])))[0].lines) == 1  # patches that harm have no gain to keep


def test_curves_of_training_are_the_log() -> None:
    log = [
        {"step": 5, "epoch": 0.5, "loss": 6.0, "loss_image": 4.0, "loss_patch": 2.0},
        {"step": 10, "epoch": 1, "val_mAP_image": 0.4, "val_mAP_tde": 0.6},
        {"step": 20, "epoch": 2.0, "loss": 2.0, "loss_image": 1.5, "loss_patch": 0.5},
        {"step": 20, "epoch": 2, "val_mAP_image": 0.5, "val_mAP_tde": 0.7},
    ]
    lines = [line for axes in draw(plot_curves({"run": log})) for line in axes.lines]
    assert [(str(line.get_label()), np.asarray(line.get_xydata(), dtype=float).tolist()) for line in lines] == [
        ("run, image", [[0.5, 4], [2, 1.5]]),
        ("run, patch", [[0.5, 2], [2, 0.5]]),
        ("run, image", [[1, 40], [2, 50]]),
        ("run, tde", [[1, 60], [2, 70]]),
    ]
    _, scores = plot_curves({"a": log, "b": log}).axes
    looks = {(line.get_color(), line.get_linestyle()) for line in scores.lines}
    assert len(looks) == len(scores.lines) == 4  # runs differ in colour and logits in style
