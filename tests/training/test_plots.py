"""What the curves show is what the log says."""

import numpy as np
from matplotlib.axes import Axes

from pivotpatch.training.plots import plot_curves

LOG = [
    {"step": 5, "epoch": 0.5, "loss": 6.0, "loss_image": 4.0, "loss_patch": 2.0},
    {"step": 10, "epoch": 1.0, "loss": 3.0, "loss_image": 2.0, "loss_patch": 1.0},
    {"step": 10, "epoch": 1, "val_mAP_image": 0.4, "val_mAP_patch": 0.5, "val_mAP_tde": 0.6},
    {"step": 20, "epoch": 2.0, "loss": 2.0, "loss_image": 1.5, "loss_patch": 0.5},
    {"step": 20, "epoch": 2, "val_mAP_image": 0.5, "val_mAP_patch": 0.6, "val_mAP_tde": 0.7},
]


def points(axes: Axes) -> dict[str, list[list[float]]]:
    """What is drawn, by its name in the legend."""
    return {str(line.get_label()): np.asarray(line.get_xydata(), dtype=float).tolist() for line in axes.lines}


def test_every_number_of_the_log_is_drawn_once() -> None:
    losses, scores = plot_curves({"PAT-T": LOG}).axes
    assert points(losses) == {
        "PAT-T, image": [[0.5, 4], [1, 2], [2, 1.5]],
        "PAT-T, patch": [[0.5, 2], [1, 1], [2, 0.5]],
    }
    assert points(scores)["PAT-T, tde"] == [[1, 60], [2, 70]]
    assert points(scores)["PAT-T, image"] == [[1, 40], [2, 50]]
    _, scores = plot_curves({"a": LOG, "b": LOG}).axes
    looks = {(line.get_color(), line.get_linestyle()) for line in scores.lines}
    assert len(looks) == len(scores.lines) == 6  # runs differ in colour and logits in style
