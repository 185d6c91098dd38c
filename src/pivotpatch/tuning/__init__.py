"""Everything that is fitted after training: lam, calibration, thresholds, effort. Figures are in `tuning.plots`."""

from pivotpatch.tuning.calibration import calibrate_out_of_fold as calibrate_out_of_fold
from pivotpatch.tuning.calibration import draw_folds as draw_folds
from pivotpatch.tuning.calibration import fit_calibration as fit_calibration
from pivotpatch.tuning.calibration import judge_calibration as judge_calibration
from pivotpatch.tuning.calibration import reliability as reliability
from pivotpatch.tuning.mixing import fit_mixing as fit_mixing
from pivotpatch.tuning.thresholds import Goal as Goal
from pivotpatch.tuning.thresholds import fit_thresholds as fit_thresholds
from pivotpatch.tuning.thresholds import parse_goal as parse_goal
from pivotpatch.tuning.tune import Tuning as Tuning
from pivotpatch.tuning.tune import effort_curve as effort_curve
from pivotpatch.tuning.tune import fit_adaptive as fit_adaptive
from pivotpatch.tuning.tune import tune_scores as tune_scores
