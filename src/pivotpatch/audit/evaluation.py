"""What scores are worth: the usual measures with intervals, and the steps from image logits to TDE."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pivotpatch.core.bootstrap import F1_MEASURES, Interval, resample_average_precision, resample_f1
from pivotpatch.core.metrics import (
    DEFINITIONS,
    AveragePrecision,
    Definition,
    EmptyRule,
    PrecisionRecall,
    average_precision,
    find_best_fixed,
    precision_recall,
)
from pivotpatch.core.policies import Fixed, Given, PerLabel, PriorMatched, ThresholdPolicy, TopK
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores

Policy = ThresholdPolicy | Literal["fitted", "target", "best-fixed"]
"""A rule, or one that depends on the scores: the model's own thresholds; as often as the target has each label; the
best fixed threshold."""
TOP = 3
_BASELINE = "baseline"


class Rule(NamedTuple):
    """A policy that is ready to decide, and the values (N,L) that it decides about."""

    policy: ThresholdPolicy
    values: Tensor

    def decide(self, target: Tensor) -> Tensor:
        """Decisions (N,L), boolean; what is unknown in the target (N,L) is not given."""
        known = ~torch.isnan(target)
        return self.policy.decide(self.values, known=known) & known


def find_rule(scores: Scores, policy: Policy | None, kind: str, *, empty: EmptyRule = "zero") -> Rule | None:
    """How a policy decides about scores of a kind; None where it says nothing of that kind.

    Policies that only rank see logits, for probabilities near 1 are all alike.

    Args:
        scores: the scores.
        policy: by default the decisions that came with the scores, else the model's own thresholds, on calibrated
            probabilities where it has a calibration, else 0.5. The first two are of the kind to rank by alone.
        kind: of the logits.
        empty: as in `precision_recall`, for the choice of the best fixed threshold.
    """
    if policy is None and scores.given is not None:
        return Rule(Given(scores.given), scores.get(kind))
    if policy == "fitted" or (policy is None and scores.thresholds is not None):
        if scores.thresholds is None:
            raise InputError("--policy", "no thresholds were fitted", "choose fixed:0.5, top:3 or prior:DATA")
        return Rule(PerLabel(scores.thresholds), scores.own_probs().float()) if kind == scores.ranking else None
    if policy == "target":
        # The shares of the images that are judged: two models are compared at equal counts.
        policy = replace(PriorMatched.from_target(scores.target), definition="target-matched thresholds")
    elif policy == "best-fixed":
        policy = find_best_fixed(scores.probs(kind).float(), scores.target, empty=empty)
    policy = policy or Fixed(0.5)
    if isinstance(policy, str):
        todo = "give 'target', 'fitted' or 'best-fixed', or a policy such as Fixed(0.5) or TopK(3)"
        raise InputError("policy", f"it is {policy!r}", todo)
    return Rule(policy, scores.probs(kind).float() if isinstance(policy, Fixed | PerLabel) else scores.get(kind))


@dataclass(frozen=True)
class KindEvaluation:
    """What one kind of logits is worth."""

    precision: AveragePrecision  # average precision of each label and its mean
    interval: Interval | None  # of the mAP, where there are resamples
    # Of each label's average precision, likewise; None for a label without a positive.
    label_intervals: tuple[Interval | None, ...] | None
    decided: PrecisionRecall | None  # precision, recall and F1 under the policy, where it speaks of this kind
    top: PrecisionRecall  # the same for the highest labels of each image


@dataclass(frozen=True)
class Change:
    """How much higher a measure is, with its interval where there are resamples."""

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class Difference:
    """One mAP less another on the same images and resamples."""

    of: str  # the kind of logits
    minus: str  # what is taken off: a kind, or "baseline" and its kind
    value: float
    interval: Interval | None
    # The difference of each label's average precision; None for a label without a positive.
    per_label: tuple[float | None, ...]
    label_intervals: tuple[Interval | None, ...] | None  # of these; None, like `interval`, without resamples
    # The differences of CF1 and OF1, each side by its own rule; empty where one has none.
    decided: Mapping[str, Change] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of scores."""

    pictures: int  # how many were judged
    labels: tuple[str, ...]
    ranking: str  # the kind to rank by
    resamples: int  # of the intervals; 0 where there are none
    kinds: Mapping[str, KindEvaluation]  # by kind of logits
    gain: Difference | None  # the total direct effect less the image logits, where both are there
    difference: Difference | None  # the ranking less that of a baseline, where one was given
    baseline: KindEvaluation | None = None  # what the baseline's own ranking is worth, likewise

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
    policy: Policy | None = None,
    definition: Definition = "step",
    empty: EmptyRule = "zero",
    resamples: int = 1000,
    baseline: Scores | None = None,
    generator: torch.Generator,
) -> Evaluation:
    """Evaluate scores.

    Args:
        scores: of a model.
        policy: how scores become decisions, see `find_rule`; by default each side decides by its own thresholds.
        definition: of average precision.
        empty: what the precision of a label that is never given counts in CP: "zero", or "skip" to leave it out.
        resamples: of the bootstrap; 0 for no intervals.
        baseline: other scores of the same images and labels in the same order, to be compared with.
        generator: draws the resamples.
    """
    sides = {kind: (scores, kind) for kind in scores.logits}
    if baseline is not None:
        check_paired(scores, baseline)
        sides[_BASELINE] = baseline, baseline.ranking
    target, labels, top = scores.target, scores.labels, TopK(min(TOP, len(scores.labels)))
    matrices = {name: side.get(kind) for name, (side, kind) in sides.items()}
    rules = {name: find_rule(side, policy, kind, empty=empty) for name, (side, kind) in sides.items()}
    drawn = drawn_f1 = None
    if resamples:
        drawn = resample_average_precision(
            matrices, target, resamples=resamples, definition=definition, generator=generator
        )
        given = {name: rule.decide(target) for name, rule in rules.items() if rule is not None}
        drawn_f1 = resample_f1(given, target, resamples=resamples, empty=empty, generator=generator)
    found = {
        name: KindEvaluation(
            average_precision(logits, target, definition=definition, labels=labels),
            interval=drawn and drawn.bound_mean(name),
            label_intervals=drawn and tuple(drawn.bound_each(name)),
            decided=rule and precision_recall(rule.values, target, policy=rule.policy, empty=empty, labels=labels),
            top=precision_recall(logits, target, policy=top, empty=empty, labels=labels),
        )
        for (name, logits), rule in zip(matrices.items(), rules.values(), strict=True)
    }

    def compare(of: str, minus: str) -> Difference | None:
        if not {of, minus} <= found.keys():
            return None
        one, other = found[of], found[minus]
        pairs = zip(one.precision.per_label, other.precision.per_label, strict=True)
        decided = {}
        if one.decided is not None and other.decided is not None:
            intervals = drawn_f1.bound_each(of, minus=minus) if drawn_f1 else [None] * len(F1_MEASURES)
            for measure, interval in zip(F1_MEASURES, intervals, strict=True):
                decided[measure] = Change(getattr(one.decided, measure) - getattr(other.decided, measure), interval)
        return Difference(
            of,
            minus if minus in scores.logits else f"{minus} {sides[minus][1]}",
            value=one.precision.mean - other.precision.mean,
            interval=drawn and drawn.bound_mean(of, minus=minus),
            per_label=tuple(None if a is None or b is None else a - b for a, b in pairs),
            label_intervals=drawn and tuple(drawn.bound_each(of, minus=minus)),
            decided=decided,
        )

    gain, difference = compare("tde", "image"), compare(scores.ranking, _BASELINE)
    beside = found.pop(_BASELINE, None)
    return Evaluation(len(scores), labels, scores.ranking, resamples, found, gain, difference, beside)


class LabelSteps(NamedTuple):
    """Average precision of a label by image logits p, patch logits q and p + lam q; `gain` over the better part."""

    label: str
    positives: int
    image: float
    patch: float
    tde: float
    gain: float


@dataclass(frozen=True)
class StepwiseEvaluation:
    """The paper's step-wise evaluation; labels without a positive image are skipped."""

    definition: Definition
    steps: tuple[LabelSteps, ...]
    skipped: tuple[str, ...]

    @property
    def mean(self) -> dict[str, float]:
        """MAP of each kind of logits, and the mean gain."""
        kinds = ("image", "patch", "tde", "gain")
        return {kind: sum(getattr(step, kind) for step in self.steps) / len(self.steps) for kind in kinds}

    @property
    def share_gained(self) -> float:
        """Part of the labels whose gain is above 0."""
        return sum(step.gain > 0 for step in self.steps) / len(self.steps)

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        summary = {"definition": self.definition, "mean": self.mean, "share_gained": self.share_gained}
        return {**summary, "skipped": self.skipped, "labels": [step._asdict() for step in self.steps]}


@dataclass(frozen=True)
class ScaleStudy:
    """A row of the paper's study of image scale: do larger views alone explain the gain?"""

    definition: Definition
    patch: float  # mAP of the patch logits of a model that was trained on patches alone
    tde: float  # mAP of the TDE logits of PAT-T
    difference: Interval  # TDE less patch, with the interval of a paired bootstrap over the images


def evaluate_steps(scores: Scores, *, definition: Definition = "step") -> StepwiseEvaluation:
    """Average precision of image, patch and TDE logits, label by label."""
    image, patch, tde = (
        average_precision(scores.get(kind), scores.target, definition=definition, labels=scores.labels)
        for kind in ("image", "patch", "tde")
    )
    rows = zip(scores.labels, tde.positives, image.per_label, patch.per_label, tde.per_label, strict=True)
    steps = tuple(
        LabelSteps(label, count, p, q, both, gain=both - max(p, q))
        for label, count, p, q, both in rows
        if p is not None and q is not None and both is not None
    )
    return StepwiseEvaluation(tde.definition, steps, tde.skipped)


def study_scale(
    scores: Scores,
    patch_only: Scores,
    *,
    definition: Definition = "step",
    generator: torch.Generator,
) -> ScaleStudy:
    """TDE logits of PAT-T beside the patch logits of a model that never saw a whole image.

    Args:
        scores: of PAT-T, with "tde" logits.
        patch_only: of the other model (task `patch_only`), with "patch" logits of the same images.
        definition: of average precision.
        generator: draws the resamples of the bootstrap.
    """
    check_paired(scores, patch_only)
    logits = {"tde": scores.get("tde"), "patch": patch_only.get("patch")}
    drawn = resample_average_precision(logits, scores.target, definition=definition, generator=generator)
    patch, tde = (drawn.bound_mean(kind).value for kind in ("patch", "tde"))
    return ScaleStudy(definition, patch, tde, drawn.bound_mean("tde", minus="patch"))
