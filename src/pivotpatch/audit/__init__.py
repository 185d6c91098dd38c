"""Everything that judges scores: metrics with intervals, co-occurrence, the paper's figures, likely label errors.

Figures are in `pivotpatch.audit.plots`.
"""

from pivotpatch.audit.cases import find_cases as find_cases
from pivotpatch.audit.cooccurrence import compare_pairs as compare_pairs
from pivotpatch.audit.cooccurrence import conditional_rates as conditional_rates
from pivotpatch.audit.cooccurrence import decide as decide
from pivotpatch.audit.cooccurrence import find_false_positives as find_false_positives
from pivotpatch.audit.cooccurrence import match_recall as match_recall
from pivotpatch.audit.cooccurrence import rank_pairs as rank_pairs
from pivotpatch.audit.cooccurrence import rate_pairs as rate_pairs
from pivotpatch.audit.evaluation import evaluate_scores as evaluate_scores
from pivotpatch.audit.evaluation import evaluate_steps as evaluate_steps
from pivotpatch.audit.evaluation import study_scale as study_scale
from pivotpatch.audit.label_errors import find_label_errors as find_label_errors
