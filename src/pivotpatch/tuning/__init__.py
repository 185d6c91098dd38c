"""Everything that is fitted after training: lam, calibration, thresholds, effort. Figures are in `tuning.plots`."""

from pivotpatch.tuning.calibration import (
    calibrate_out_of_fold,
    draw_folds,
    fit_calibration,
    judge_calibration,
    reliability,
)
from pivotpatch.tuning.mixing import fit_mixing
from pivotpatch.tuning.thresholds import Goal, fit_thresholds, parse_goal
from pivotpatch.tuning.tune import Tuning, effort_curve, fit_adaptive, tune_scores

__all__ = [
    "Goal",
    "Tuning",
    "calibrate_out_of_fold",
    "draw_folds",
    "effort_curve",
    "fit_adaptive",
    "fit_calibration",
    "fit_mixing",
    "fit_thresholds",
    "judge_calibration",
    "parse_goal",
    "reliability",
    "tune_scores",
]
