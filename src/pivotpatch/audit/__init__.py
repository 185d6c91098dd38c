"""Everything that judges scores: metrics with intervals, co-occurrence, the paper's figures, likely label errors.

Figures are in `pivotpatch.audit.plots`.
"""

from pivotpatch.audit.cases import find_cases
from pivotpatch.audit.cooccurrence import (
    compare_pairs,
    conditional_rates,
    decide,
    find_false_positives,
    rank_pairs,
    rate_pairs,
)
from pivotpatch.audit.evaluation import evaluate_scores, evaluate_steps, study_scale
from pivotpatch.audit.label_errors import find_label_errors

__all__ = [
    "compare_pairs",
    "conditional_rates",
    "decide",
    "evaluate_scores",
    "evaluate_steps",
    "find_cases",
    "find_false_positives",
    "find_label_errors",
    "rank_pairs",
    "rate_pairs",
    "study_scale",
]
