"""Precision against recall of one label, for several opinions about it."""

from collections.abc import Mapping

import torch
from matplotlib.figure import Figure

from pivotpatch.inference.colours import BASELINE, KINDS
from pivotpatch.inference.thresholds import ThresholdCurve

COLOURS = {**KINDS, "baseline": BASELINE}
_STYLES = {"image": "-.", "patch": "--", "tde": "-", "baseline": ":"}
_POINTS = 120  # of a curve, where recall rises, so that thousands of pictures do not make thousands of points


def plot_precision_recall(curves: Mapping[str, ThresholdCurve]) -> Figure:
    """Draw precision against recall.

    Args:
        curves: by kind of logits, or "baseline".
    """
    figure = Figure(figsize=(3.2, 2.7), dpi=150, layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        (rises,) = (curve.recall.diff(prepend=curve.recall.new_zeros(1)) > 0).nonzero(as_tuple=True)
        places = rises[torch.linspace(0, len(rises) - 1, min(_POINTS, len(rises))).round().long()]
        axes.plot(
            curve.recall[places].numpy(),
            curve.precision[places].numpy(),
            _STYLES[name],
            color=COLOURS[name],
            linewidth=1.8,
            label="TDE" if name == "tde" else name,
        )
    axes.set(xlabel="recall", ylabel="precision", xlim=(-0.02, 1.02), ylim=(0, 1.03))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="best", framealpha=0.7)
    return figure
