"""What a report tells of a model, as numbers: measured here, drawn and written elsewhere."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pivotpatch.audit import (
    compare_pairs,
    decide,
    evaluate_scores,
    find_cases,
    find_false_positives,
    find_label_errors,
    rank_pairs,
    rate_pairs,
)
from pivotpatch.audit.cases import CaseStudy
from pivotpatch.audit.cooccurrence import FalsePositive, PairComparison
from pivotpatch.audit.evaluation import Difference, Evaluation, Policy, find_rule
from pivotpatch.audit.label_errors import LabelError
from pivotpatch.core.metrics import Definition, EmptyRule
from pivotpatch.core.policies import Fixed, PerLabel
from pivotpatch.inference.scores import Scores
from pivotpatch.tuning.calibration import (
    CalibrationQuality,
    Reliability,
    calibrate_out_of_fold,
    judge_calibration,
    reliability,
)

BASELINE = "baseline"
PAIRS_PER_LABEL = 3  # of the worst, so that one label does not hide all others
_EXAMPLES = 3  # images of each pair
_ENOUGH = 50  # images that a calibration is fitted on


@dataclass(frozen=True, eq=False)
class Subject:
    """A model to report on."""

    name: str  # for headings
    # What it says of the images, and what is true; they decide by their own thresholds where they have them.
    scores: Scores
    facts: Mapping[str, str] = field(default_factory=dict)  # what else is known of it, in words, by name
    # Whether what decides may have been fitted on these very images, which the report then says.
    fitted_here: bool = False


class WorstPair(NamedTuple):
    """A pair's rates as in `PairRates.to_dict`, the reference's conditional FPR, and images behind it."""

    rates: Mapping[str, Any]
    reference: float | None
    examples: Sequence[FalsePositive]


@dataclass(frozen=True, eq=False)
class Findings:
    """All that a report tells."""

    subject: Subject  # the model
    baseline: Subject | None  # the one that it was compared with
    evaluation: Evaluation  # of each kind of logits, and of the baseline
    # L numbers that decide about the kind to rank by; None where the policy is of another kind.
    thresholds: tuple[float, ...] | None
    reference: str | None  # what the model is compared with, in words; None where there is nothing
    comparison: PairComparison | None  # pairs of labels beside the reference
    worst: Sequence[WorstPair]  # the worst pairs
    # Where the model is nearer to the truth than the reference by most, and where farther from it by most.
    cases: Sequence[CaseStudy]
    errors: Sequence[LabelError]  # likely label errors
    # Of probabilities beside what came true, "before" and "after" calibration; none of too few images.
    curves: Mapping[str, Reliability]
    calibration: Mapping[str, CalibrationQuality]  # how good these are, likewise

    @property
    def difference(self) -> Difference | None:
        """The mAP less that of the reference."""
        return self.evaluation.difference or self.evaluation.gain


def gather_findings(
    subject: Subject,
    *,
    baseline: Subject | None = None,
    policy: Policy | None = None,
    definition: Definition = "step",
    empty: EmptyRule = "zero",
    images: int = 60,
    resamples: int = 1000,
    generator: torch.Generator,
) -> Findings:
    """Measure all that a report tells.

    Without a baseline, TDE logits are compared with the image logits of the same model.

    Args:
        subject: the model.
        baseline: another one, on the same images.
        policy: as in `evaluate_scores`, like the next two.
        definition: of average precision.
        empty: what a label that is given to no image does in CP.
        images: how many will be shown: cases, pairs and label errors get their shares, and six each without any.
        resamples: of the bootstrap.
        generator: draws them.
    """
    scores, reference = subject.scores, None if baseline is None else baseline.scores
    evaluation = evaluate_scores(
        scores,
        policy=policy,
        definition=definition,
        empty=empty,
        resamples=resamples,
        baseline=reference,
        generator=generator,
    )
    if baseline is None and evaluation.gain is not None:
        reference = scores.only("image")
    comparison, worst = _audit(scores, reference, max(images // 6, 6))
    cases: list[CaseStudy] = []
    if reference is not None and scores.weights is not None and "tde" in scores.logits:
        cases = find_cases(scores, reference, count=max(images // 5, 6))
    probs: dict[str, Tensor] = {}
    errors: list[LabelError] = []
    if len(scores) >= _ENOUGH and bool((scores.target == 0).any()):
        calibrated = calibrate_out_of_fold(scores.scaled(scores.ranking), scores.target)
        errors = find_label_errors(scores, probs=calibrated, count=max(3 * images // 10, 6))
        probs = {"before": scores.probs(scores.ranking).float(), "after": calibrated.float()}
    rule, thresholds = find_rule(scores, policy, scores.ranking, empty=empty), None
    if rule is not None and isinstance(rule.policy, PerLabel):
        thresholds = rule.policy.thresholds
    elif rule is not None and isinstance(rule.policy, Fixed):
        thresholds = (rule.policy.threshold,) * len(scores.labels)
    named = "the image logits of the same model" if baseline is None else f"the baseline {baseline.name}"
    return Findings(
        subject,
        baseline,
        evaluation,
        thresholds=thresholds,
        reference=named if reference is not None else None,
        comparison=comparison,
        worst=worst,
        cases=cases,
        errors=errors,
        curves={name: reliability(each, scores.target) for name, each in probs.items()},
        calibration={name: judge_calibration(each, scores.target) for name, each in probs.items()},
    )


def _audit(scores: Scores, reference: Scores | None, count: int) -> tuple[PairComparison | None, list[WorstPair]]:
    """Pairs under decisions that models can be compared by: each label is given to as many images as show it."""
    rates, worst, seen = rate_pairs(scores), list[WorstPair](), Counter[str]()
    if not len(rates):
        return None, worst
    comparison = None if reference is None else compare_pairs(rates, rate_pairs(reference))
    theirs = dict(zip(rates.names, comparison.baseline.fpr.tolist(), strict=True)) if comparison else {}
    decided = decide(scores)
    for row in rank_pairs(rates, by="gap").to_dict()["pairs"]:
        label, context = row["label"], row["company"]
        if row["cfpr"] and seen[label] < PAIRS_PER_LABEL and len(worst) < count:
            seen[label] += 1
            found = find_false_positives(scores, label, context=context, decided=decided)[:_EXAMPLES]
            worst.append(WorstPair(row, theirs.get((label, context)), found))
    return comparison, worst
