"""What a report tells of a model, as numbers: measured here, drawn and written elsewhere."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pivotpatch.audit.cases import CaseStudy, study_case
from pivotpatch.audit.cooccurrence import (
    FEW,
    FalsePositive,
    PairRates,
    decide,
    find_false_positives,
    rank_pairs,
    rate_pairs,
)
from pivotpatch.audit.evaluation import Difference, Evaluation, evaluate_scores
from pivotpatch.audit.label_errors import LabelError, find_label_errors
from pivotpatch.audit.pair_comparison import PairComparison, compare_pairs
from pivotpatch.audit.stepwise import check_same_pictures
from pivotpatch.core.bootstrap import Interval
from pivotpatch.core.metrics import Definition
from pivotpatch.core.policies import Fixed, PriorMatched
from pivotpatch.inference.scores import Scores
from pivotpatch.report.subject import Subject
from pivotpatch.tuning.calibration import (
    CalibrationQuality,
    Reliability,
    calibrate_out_of_fold,
    judge_calibration,
    reliability,
)
from pivotpatch.tuning.thresholds import ThresholdCurve, threshold_curve

BASELINE = "baseline"
PANELS = 6  # labels whose curves are drawn
PAIRS_PER_LABEL = 3  # of the worst, so that one label does not hide all others
_ENOUGH = 50  # pictures that a calibration is fitted on
_STAGES = 5


class Counts(NamedTuple):
    """How much a report lists: cases, pairs of labels, pictures of each pair, likely label errors."""

    cases: int = 12
    pairs: int = 10
    examples: int = 3
    errors: int = 18


COUNTS = Counts()


@dataclass(frozen=True)
class WorstPair:
    """A label that is given where its company is, and is not there.

    Attributes:
        label: the label that is decided about.
        company: the label that is there.
        rate: the conditional FPR with its interval.
        pictures: how many it is a share of.
        few: they are so few that the rate says little.
        overall: FPR of the label over all pictures.
        reference: the reference's conditional FPR, where there is one.
        examples: pictures behind it, the most confident first.
    """

    label: str
    company: str
    rate: Interval
    pictures: int
    few: bool
    overall: float
    reference: float | None
    examples: tuple[FalsePositive, ...]


class Calibrated(NamedTuple):
    """Probabilities of one make beside what came true."""

    curve: Reliability
    quality: CalibrationQuality


@dataclass(frozen=True, eq=False)
class Findings:
    """All that a report tells.

    Attributes:
        evaluation: of each kind of logits.
        baseline: the evaluation of the baseline, where there is one.
        reference: what the model is compared with, in words; None where there is nothing.
        panels: precision and recall of chosen labels, by label and kind; their thresholds are ranks of logits.
        comparison: pairs of labels beside the reference.
        worst: the worst pairs.
        cases: where the model is nearer to the truth than the reference by most, and where farther from it by most.
        errors: likely label errors.
        calibration: by "before" and "after"; empty where there are too few pictures.
    """

    evaluation: Evaluation
    baseline: Evaluation | None
    reference: str | None
    panels: Mapping[str, Mapping[str, ThresholdCurve]]
    comparison: PairComparison | None
    worst: tuple[WorstPair, ...]
    cases: tuple[CaseStudy, ...]
    errors: tuple[LabelError, ...]
    calibration: Mapping[str, Calibrated]

    @property
    def difference(self) -> Difference | None:
        """The mAP less that of the reference."""
        return self.evaluation.difference or self.evaluation.gain


class _Reference(NamedTuple):
    """What a model is compared with: a baseline, or its own image logits."""

    text: str
    scores: Scores


def gather_findings(
    subject: Subject,
    *,
    baseline: Subject | None = None,
    counts: Counts = COUNTS,
    definition: Definition = "step",
    resamples: int = 1000,
    generator: torch.Generator,
    progress: Callable[[str, int, int | None], None] = lambda *_: None,
) -> Findings:
    """Measure all that a report tells.

    Without a baseline, TDE logits are compared with the image logits of the same network.

    Args:
        subject: the model.
        baseline: another one, on the same pictures.
        counts: how much to list.
        definition: of average precision.
        resamples: of the bootstrap.
        generator: draws them.
        progress: told what is done.
    """
    scores = subject.scores
    if baseline is not None:
        check_same_pictures(scores, baseline.scores)
    reference = _find_reference(subject, baseline)

    def tell(done: int) -> None:
        progress("measure", done, _STAGES)

    tell(0)
    evaluation = _evaluate(
        subject,
        definition=definition,
        resamples=resamples,
        baseline=None if baseline is None else baseline.scores,
        generator=generator,
    )
    tell(1)
    audited = _audit(scores, reference, counts)
    tell(2)
    cases = _find_cases(scores, reference, counts.cases, named=baseline is not None)
    tell(3)
    fits = len(scores) >= _ENOUGH and bool((scores.target == 0).any())
    calibrated = calibrate_out_of_fold(scores.scaled(scores.ranking), scores.target) if fits else None
    calibration = {} if calibrated is None else _compare_calibration(scores, calibrated)
    tell(4)
    errors = [] if calibrated is None else find_label_errors(scores, probs=calibrated, count=counts.errors)
    tell(5)
    return Findings(
        evaluation=evaluation,
        baseline=None
        if baseline is None
        else _evaluate(baseline, definition=definition, resamples=resamples, baseline=None, generator=generator),
        reference=None if reference is None else reference.text,
        panels=_make_panels(subject, baseline, _choose_labels(evaluation)),
        comparison=audited.comparison,
        worst=audited.worst,
        cases=cases,
        errors=tuple(errors),
        calibration=calibration,
    )


def _evaluate(
    subject: Subject,
    *,
    definition: Definition,
    resamples: int,
    baseline: Scores | None,
    generator: torch.Generator,
) -> Evaluation:
    scores = subject.scores
    kinds = list(scores.logits) if isinstance(subject.policy, Fixed) else [scores.ranking]
    return evaluate_scores(
        scores,
        policies=dict.fromkeys(kinds, subject.policy),
        calibration=subject.calibration,
        definition=definition,
        resamples=resamples,
        baseline=baseline,
        generator=generator,
    )


def _find_reference(subject: Subject, baseline: Subject | None) -> _Reference | None:
    scores = subject.scores
    if baseline is not None:
        return _Reference(f"the baseline {baseline.name}", baseline.scores)
    if scores.ranking == "image" or "image" not in scores.logits:
        return None
    alone = replace(scores, logits={"image": scores.get("image")}, patch_logits=None, weights=None)
    return _Reference("the image logits of the same network", alone)


def _choose_labels(evaluation: Evaluation) -> list[int]:
    """Labels from the best to the worst, evenly between: by gain over the reference, or by average precision."""
    precision = evaluation.kinds[evaluation.ranking].precision
    difference = evaluation.difference or evaluation.gain
    values = precision.per_label if difference is None else difference.per_label
    known = [(value, label) for label, value in enumerate(values) if value is not None]
    frequent = [(value, label) for value, label in known if precision.positives[label] >= FEW]
    ranked = sorted(frequent if len(frequent) >= PANELS else known, reverse=True)
    places = torch.linspace(0, len(ranked) - 1, min(PANELS, len(ranked))).round().int().tolist()
    return [ranked[place][1] for place in places]


def _make_panels(subject: Subject, baseline: Subject | None, labels: list[int]) -> dict[str, dict[str, ThresholdCurve]]:
    scores = subject.scores
    sources = dict(scores.logits)
    if baseline is not None:
        sources[BASELINE] = baseline.scores.get(baseline.scores.ranking)
    return {
        scores.labels[label]: {
            name: threshold_curve(_rank(logits[:, label]), scores.target[:, label]) for name, logits in sources.items()
        }
        for label in labels
    }


def _rank(logits: Tensor) -> Tensor:
    """Numbers (N,) between 0 and 1 in the order of logits (N,), where probabilities near 1 would be all alike."""
    levels, place = logits.unique(return_inverse=True)
    ranks: Tensor = (place + 1).double() / (len(levels) + 1)
    return ranks


class _Audited(NamedTuple):
    comparison: PairComparison | None
    worst: tuple[WorstPair, ...]


def _audit(scores: Scores, reference: _Reference | None, counts: Counts) -> _Audited:
    """Pairs under decisions that models can be compared by: each label is given to as many pictures as show it."""
    policy = PriorMatched.from_target(scores.target)
    rates = rate_pairs(scores, policy=policy)
    if not len(rates):
        return _Audited(None, ())
    other = None if reference is None else rate_pairs(reference.scores, policy=policy)
    ranked = _choose_pairs(rank_pairs(rates, by="gap"), counts.pairs)
    decided, (low, high) = decide(scores, policy=policy), ranked.fpr_interval
    worst, shown = [], set[int]()
    for place, (label, company) in enumerate(ranked.names):
        found = find_false_positives(scores, label, company=company, decided=decided)
        found = sorted(found, key=lambda each: each.row in shown)[: counts.examples]  # new ones first
        shown |= {each.row for each in found}
        pictures = int(ranked.fpr_counts[place])
        worst.append(
            WorstPair(
                label,
                company,
                Interval(ranked.fpr[place].item(), low[place].item(), high[place].item()),
                pictures,
                few=pictures < FEW,
                overall=ranked.overall_fpr[place].item(),
                reference=None if other is None else other.fpr[_find_pair(other, ranked, place)].item(),
                examples=tuple(found),
            )
        )
    return _Audited(None if other is None else compare_pairs(rates, other), tuple(worst))


def _find_pair(rates: PairRates, ranked: PairRates, place: int) -> int:
    """Where a pair of one list stands in another."""
    return int(((rates.label == ranked.label[place]) & (rates.company == ranked.company[place])).nonzero())


def _choose_pairs(ranked: PairRates, count: int) -> PairRates:
    """The first pairs that a picture was misjudged for, with no more than a few of one label."""
    chosen: list[int] = []
    seen: Counter[int] = Counter()
    for place, (label, rate) in enumerate(zip(ranked.label.tolist(), ranked.fpr.tolist(), strict=True)):
        seen[label] += rate > 0
        if rate > 0 and seen[label] <= PAIRS_PER_LABEL:
            chosen.append(place)
        if len(chosen) == count:
            break
    return ranked.select(torch.tensor(chosen, dtype=torch.int64))


def _find_cases(scores: Scores, reference: _Reference | None, count: int, *, named: bool) -> tuple[CaseStudy, ...]:
    """The greatest gains and the greatest losses over a reference, half of each, no label twice among either."""
    if reference is None or scores.weights is None:
        return ()
    target = scores.target
    rise = scores.probs(scores.ranking) - reference.scores.probs(reference.scores.ranking)
    gain = torch.where(target == 1, rise, -rise).masked_fill(target.isnan(), 0.0)
    best, worst = gain.max(dim=0), gain.min(dim=0)
    gained = [label for label in best.values.argsort(descending=True).tolist() if best.values[label] > 0]
    lost = [label for label in worst.values.argsort().tolist() if worst.values[label] < 0]
    chosen = [(int(best.indices[label]), label) for label in gained[: count - count // 2]]
    chosen += [(int(worst.indices[label]), label) for label in lost[: count // 2]]
    rival = reference.scores if named else None
    return tuple(study_case(scores, row, label=scores.labels[label], baseline=rival) for row, label in chosen)


def _compare_calibration(scores: Scores, calibrated: Tensor) -> dict[str, Calibrated]:
    """Probabilities as they are, and (N,L) as a calibration fitted to other pictures makes them."""
    probs = {"before": scores.probs(scores.ranking).float(), "after": calibrated.float()}
    return {
        name: Calibrated(
            reliability(values, scores.target), judge_calibration(values, scores.target, labels=scores.labels)
        )
        for name, values in probs.items()
    }
