import numpy as np
import torch

from pivotpatch.inference.colours import BASELINE
from pivotpatch.inference.thresholds import threshold_curve
from pivotpatch.report.curve_plots import plot_precision_recall


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
        assert np.diff(x).max() < 0.03  # also where pictures are few and thresholds many
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("recall", "precision")
