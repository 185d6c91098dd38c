"""All that is usually reported of scores, each kind of logits beside the others, with intervals."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from pivotpatch.core.bootstrap import Interval, ResampledPrecision, resample_average_precision
from pivotpatch.core.calibration import Calibration
from pivotpatch.core.metrics import (
    DEFINITIONS,
    AveragePrecision,
    Definition,
    PrecisionRecall,
    average_precision,
    precision_recall,
)
from pivotpatch.core.policies import Fixed, PerLabel, ThresholdPolicy, TopK
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores

TOP = 3
_BASELINE = "baseline"


@dataclass(frozen=True)
class KindEvaluation:
    """What one kind of logits is worth.

    Attributes:
        precision: average precision of each label and its mean.
        interval: of the mAP, where there are resamples.
        label_intervals: of each label's average precision, likewise; None for a label without a positive.
        decided: precision, recall and F1 under the policy, where it speaks of this kind.
        top: the same for the highest labels of each image.
    """

    precision: AveragePrecision
    interval: Interval | None
    label_intervals: tuple[Interval | None, ...] | None
    decided: PrecisionRecall | None
    top: PrecisionRecall


@dataclass(frozen=True)
class Difference:
    """One mAP less another on the same images and resamples.

    Attributes:
        of: the kind of logits.
        minus: what is taken off: a kind, or "baseline" and its kind.
        per_label: the difference of each label's average precision; None for a label without a positive.
        label_intervals: of these; None, like `interval`, without resamples.
    """

    of: str
    minus: str
    value: float
    interval: Interval | None
    per_label: tuple[float | None, ...]
    label_intervals: tuple[Interval | None, ...] | None


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of scores.

    Attributes:
        pictures: how many were judged.
        ranking: the kind to rank by.
        resamples: of the intervals; 0 where there are none.
        kinds: by kind of logits.
        gain: the total direct effect less the image logits, where both are there.
        difference: the ranking less that of a baseline, where one was given.
    """

    pictures: int
    labels: tuple[str, ...]
    ranking: str
    resamples: int
    kinds: Mapping[str, KindEvaluation]
    gain: Difference | None
    difference: Difference | None

    @property
    def definition(self) -> Definition:
        """Of average precision."""
        return self.kinds[self.ranking].precision.definition

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        means = {kind: each.precision.mean for kind, each in self.kinds.items()}
        return {**asdict(self), "average_precision": DEFINITIONS[self.definition], "mAP": means}


def check_paired(one: Scores, other: Scores) -> None:
    """Refuse scores of other images or labels, or with another target: they cannot be compared row by row."""
    for what, differs in (
        ("labels", one.labels != other.labels),
        ("images", one.pictures != other.pictures),
        ("targets", not torch.equal(one.target.nan_to_num(-1), other.target.nan_to_num(-1))),
    ):
        if differs:
            todo = "score the same data with both models, and read the second with read_scores(like=...)"
            raise InputError("scores", f"{what} differ between the two files of scores", todo)


def evaluate_scores(
    scores: Scores,
    *,
    policies: Mapping[str, ThresholdPolicy] | None = None,
    calibration: Calibration | None = None,
    definition: Definition = "step",
    resamples: int = 1000,
    baseline: Scores | None = None,
    generator: torch.Generator,
) -> Evaluation:
    """Evaluate scores.

    Args:
        scores: of a model.
        policies: by kind of logits, how probabilities become decisions; 0.5 for all kinds by default.
        calibration: gives the probabilities of its kind.
        definition: of average precision.
        resamples: of the bootstrap; 0 for no intervals.
        baseline: other scores of the same images and labels in the same order, to be compared with.
        generator: draws the resamples.
    """
    if len(scores) == 0:
        raise InputError("evaluate", "there is no image", "give at least one that can be read")
    policies = dict.fromkeys(scores.logits, Fixed(0.5)) if policies is None else policies
    matrices = dict(scores.logits)
    if baseline is not None:
        check_paired(scores, baseline)
        matrices[_BASELINE] = baseline.get(baseline.ranking)
    found = {
        name: average_precision(logits, scores.target, definition=definition, labels=scores.labels)
        for name, logits in matrices.items()
    }
    drawn = None
    if resamples:
        drawn = resample_average_precision(
            matrices, scores.target, resamples=resamples, definition=definition, generator=generator
        )
    kinds = {}
    for kind in scores.logits:
        probs = scores.probs(kind).float()
        if calibration is not None and calibration.kind == kind:
            probs = calibration.apply(scores.scaled(kind))
        kinds[kind] = KindEvaluation(
            found[kind],
            interval=None if drawn is None else drawn.bound_mean(kind),
            label_intervals=None if drawn is None else tuple(drawn.bound_labels(kind)),
            decided=_decide(scores, kind, policies[kind], probs=probs) if kind in policies else None,
            top=_decide(scores, kind, TopK(min(TOP, len(scores.labels))), probs=probs),
        )
    ranking = scores.ranking
    named = f"{_BASELINE} {baseline.ranking}" if baseline is not None else ""
    return Evaluation(
        pictures=len(scores),
        labels=scores.labels,
        ranking=ranking,
        resamples=resamples,
        kinds=kinds,
        gain=_compare(found, drawn, "tde", "image", named="image") if {"tde", "image"} <= kinds.keys() else None,
        difference=_compare(found, drawn, ranking, _BASELINE, named=named) if baseline is not None else None,
    )


def _decide(scores: Scores, kind: str, policy: ThresholdPolicy, *, probs: Tensor) -> PrecisionRecall:
    """Precision and recall; policies that only rank see logits, for probabilities near 1 are all alike."""
    values = probs if isinstance(policy, Fixed | PerLabel) else scores.get(kind)
    return precision_recall(values, scores.target, policy=policy, labels=scores.labels)


def _compare(
    found: Mapping[str, AveragePrecision], drawn: ResampledPrecision | None, of: str, minus: str, *, named: str
) -> Difference:
    pairs = zip(found[of].per_label, found[minus].per_label, strict=True)
    return Difference(
        of,
        named,
        value=found[of].mean - found[minus].mean,
        interval=None if drawn is None else drawn.bound_mean(of, minus=minus),
        per_label=tuple(None if one is None or other is None else one - other for one, other in pairs),
        label_intervals=None if drawn is None else tuple(drawn.bound_labels(of, minus=minus)),
    )
