"""Conditional true and false positive rates: how the presence of one label moves decisions about another.

The paper writes {car; parking meter} for decisions about the car in images that show a parking meter. Here the first is
the `label` and the second its `context`; they co-occur where P(label | context) is above a limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pivotpatch.audit.evaluation import Policy, Rule, check_paired, find_rule
from pivotpatch.core.bootstrap import Interval, resample, wilson_interval
from pivotpatch.core.checks import check_shapes
from pivotpatch.core.policies import Given
from pivotpatch.errors import InputError, check_known
from pivotpatch.inference.scores import Scores

FEW = 20  # images behind a rate; with fewer its interval is wider than 0.3 at a rate of one half, and it is marked


class ConditionalRates(NamedTuple):
    """How often label i is given where label j is shown, all (L,L); float32 rates, NaN where no image tells."""

    tpr: Tensor  # [i, j] is the share, among images that show i and j, of those that are given i
    fpr: Tensor  # [i, j] is the share, among images that show j but not i, of those that are given i
    tpr_counts: Tensor  # images that show i and j
    fpr_counts: Tensor  # images that show j but not i


@dataclass(frozen=True, eq=False)
class PairRates:
    """Conditional rates of M ordered pairs of labels, for the decisions of one model."""

    definition: str  # the policy that decided, in words
    names: tuple[tuple[str, str], ...]  # M pairs of a label that is decided about and a context that is shown
    probability: Tensor  # (M,) P(label | context), from the target
    tpr: Tensor  # (M,) conditional TPR; NaN where no image shows both
    fpr: Tensor  # (M,) conditional FPR; NaN where no image shows the context alone
    tpr_counts: Tensor  # (M,) images behind `tpr`
    fpr_counts: Tensor  # (M,) images behind `fpr`
    overall_fpr: Tensor  # (M,) FPR of the label over all images

    def __len__(self) -> int:
        return len(self.names)

    def select(self, rows: Tensor) -> "PairRates":
        """The pairs that `rows` (K,) names, in that order."""
        kept = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return PairRates(self.definition, tuple(self.names[row] for row in rows.tolist()), **kept)

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain types, for JSON; None where no image tells."""
        columns: dict[str, Tensor] = {"probability": self.probability}
        for name, rate, counts in (("ctpr", self.tpr, self.tpr_counts), ("cfpr", self.fpr, self.fpr_counts)):
            low, high = wilson_interval(rate, counts)
            columns |= {name: rate, f"{name}_low": low, f"{name}_high": high, f"{name}_pictures": counts}
            columns[f"{name}_few"] = counts < FEW
        columns |= {"fpr": self.overall_fpr, "gap": self.fpr - self.overall_fpr}
        values = [[None if value != value else value for value in column.tolist()] for column in columns.values()]
        pairs = [
            {"label": label, "company": context} | dict(zip(columns, row, strict=True))
            for (label, context), *row in zip(self.names, *values, strict=True)
        ]
        return {"definition": self.definition, "few": FEW, "pairs": pairs}


@dataclass(frozen=True, eq=False)
class Curve:
    """One rate of the K pairs that have it, of a model beside a baseline, sorted by the baseline."""

    baseline: Tensor  # (K,) the baseline's rates, rising
    model: Tensor  # (K,) the model's rates of the same pairs
    improved: int  # pairs whose rate is better in the model: a lower FPR, a higher TPR
    worse: int  # pairs whose rate is worse
    tied: int  # pairs whose rates are equal
    undefined: int  # pairs that no image tells this rate of; they are in no other count

    @property
    def share_improved(self) -> float | None:
        """Part of the K pairs that improved; a tie is no improvement. None where there is no pair."""
        return self.improved / len(self.model) if len(self.model) else None

    def to_dict(self) -> dict[str, object]:
        """The counts in plain types, for JSON."""
        return {name: getattr(self, name) for name in ("share_improved", "improved", "worse", "tied", "undefined")}


@dataclass(frozen=True, eq=False)
class PairComparison:
    """A model beside a baseline on the same images and pairs; both rates as curves."""

    model: PairRates
    baseline: PairRates
    cfpr: Curve
    ctpr: Curve

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        return {name: getattr(self, name).to_dict() for name in ("cfpr", "ctpr", "model", "baseline")}


class RecallMatched(NamedTuple):
    """Decisions of two models that find as many positives of each label as the other, with the fewest tags."""

    model: Given
    baseline: Given
    recall: Tensor  # (L,) of each label; NaN for one that no image shows


class FalsePositive(NamedTuple):
    """An image that is given a label which it does not show: its name, its row in the scores, the probability."""

    picture: str
    row: int
    probability: float


def conditional_rates(decided: Tensor, target: Tensor) -> ConditionalRates:
    """Conditional true and false positive rates of all pairs of labels, as the paper defines them.

    An image of which i or j is unknown counts for no rate of that pair.

    Args:
        decided: (N,L) boolean, the labels that each image is given.
        target: (N,L), 1 present, 0 absent, NaN unknown.

    >>> decided = torch.tensor([[True, True], [False, True], [True, True]])
    >>> rates = conditional_rates(decided, torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]]))
    >>> rates.tpr[0, 1].item(), rates.tpr_counts[0, 1].item()
    (0.5, 2)
    >>> rates.fpr[0, 1].item(), rates.fpr_counts[0, 1].item()
    (1.0, 1)
    """
    check_shapes("conditional_rates", "NL NL", decided=decided, target=target)
    if decided.dtype != torch.bool:
        raise InputError("conditional_rates", f"decided is {decided.dtype}", "give booleans, such as probs >= 0.5")
    there, missing, decided = target == 1, target == 0, decided.to(target.device)
    # An image shows few of many labels: a sparse product takes steps for those alone. [j, i] of each, transposed at the
    # end. Sums of ones are exact in float32 up to 2^24 images.
    context = there.T.to_sparse().float()
    kinds = (there, there & decided, missing, missing & decided)
    both, both_given, alone, alone_given = (torch.sparse.mm(context, kind.float()) for kind in kinds)
    tpr, fpr = both_given.div_(both).T, alone_given.div_(alone).T
    return ConditionalRates(tpr, fpr, both.int().T, alone.int().T)


def rate_pairs(
    scores: Scores,
    *,
    policy: Policy = "target",
    min_probability: float = 0.2,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> PairRates:
    """Conditional rates of the pairs that co-occur, or of given pairs.

    Args:
        scores: what a model says, and what is true; of the logits to rank by, others by `scores.only(kind)`.
        policy: how probabilities become decisions; by default each label is given as often as the target has it.
        min_probability: take the pairs whose P(label | context) is above it.
        pairs: take these instead: names of label and context.
    """
    rule, target, labels = _find_rule(scores, policy), scores.target, scores.labels
    decided = rule.decide(target)
    if pairs is not None:
        # No other label matters then, so that a model which knows others can be compared.
        labels = tuple(dict.fromkeys(name for pair in pairs for name in pair))
        columns = [_find(scores, name) for name in labels]
        decided, target = decided[:, columns], target[:, columns]
    rates = conditional_rates(decided, target)
    if pairs is None:
        shares = rates.tpr_counts / (rates.tpr_counts + rates.fpr_counts)
        label, context = shares.fill_diagonal_(0).nan_to_num_(0.0).gt(min_probability).nonzero(as_tuple=True)
    else:
        found = [(labels.index(label), labels.index(context)) for label, context in pairs]
        label, context = torch.tensor(found, dtype=torch.int64).reshape(-1, 2).T
    tpr, fpr, both, alone = (column[label, context] for column in rates)
    missing = target == 0
    overall = (decided & missing).sum(0) / missing.sum(0)
    names = tuple((labels[i], labels[j]) for i, j in zip(label.tolist(), context.tolist(), strict=True))
    return PairRates(rule.policy.definition, names, both / (both + alone), tpr, fpr, both, alone, overall[label])


def decide(scores: Scores, *, policy: Policy = "target") -> Tensor:
    """Decisions (N,L) of a policy about scores; by default each label is given as often as the target has it."""
    return _find_rule(scores, policy).decide(scores.target)


def _find_rule(scores: Scores, policy: Policy) -> Rule:
    rule = find_rule(scores, policy, scores.ranking)
    assert rule is not None, "every policy decides about the logits to rank by"
    return rule


def rank_pairs(rates: PairRates, *, by: Literal["rate", "gap"] = "rate") -> PairRates:
    """All pairs, the worst first: by conditional FPR ("rate"), or by its rise above the label's FPR overall ("gap").

    The lower end of the interval decides, so that a pair with one unlucky image is listed, but does not lead. Those
    that have no conditional FPR, for no image shows the context alone, come last.
    """
    least = wilson_interval(rates.fpr, rates.fpr_counts)[0] - (rates.overall_fpr if by == "gap" else 0.0)
    least = least.masked_fill(rates.fpr_counts == 0, -torch.inf)
    return rates.select(least.argsort(descending=True, stable=True))


def find_false_positives(
    scores: Scores, label: str, *, context: str, decided: Tensor | None = None
) -> list[FalsePositive]:
    """The images that show the context but not the label and are given the label, the most confident first.

    Args:
        scores: what a model says, and what is true.
        label: name of the label that is decided about.
        context: name of the label that is shown.
        decided: (N,L) from `decide`; by default each label is given as often as the target has it.
    """
    i, j = _find(scores, label), _find(scores, context)
    decided = decide(scores) if decided is None else decided
    (rows,) = (decided[:, i] & (scores.target[:, i] == 0) & (scores.target[:, j] == 1)).nonzero(as_tuple=True)
    rows = rows[scores.get(scores.ranking)[rows, i].argsort(descending=True, stable=True)]
    probs = scores.select(rows).probs(scores.ranking)[:, i].tolist()
    return [FalsePositive(scores.pictures[row], row, prob) for row, prob in zip(rows.tolist(), probs, strict=True)]


def match_recall(model: Scores, baseline: Scores, *, policy: Policy = "target") -> RecallMatched:
    """Decisions of a model and of a baseline that find the same number of positives of each label.

    The baseline's recall by `policy` is the one of both. Each gives a label to its highest images down to the last of
    these positives and no further, so that none of them has false positives which its recall does not need.

    Args:
        model: scores of the same images and labels as those of the baseline.
        baseline: of the model to compare with.
        policy: how the baseline decides.
    """
    check_paired(model, baseline)
    present = model.target == 1
    recall = (decide(baseline, policy=policy) & present).sum(0) / present.sum(0)
    ranked = (_Ranked.make(scores) for scores in (model, baseline))
    once = torch.ones(len(model))
    first, second = (Given(each.decide(once, recall), "thresholds of equal recall") for each in ranked)
    return RecallMatched(first, second, recall)


def bound_lower(
    model: Scores,
    baseline: Scores,
    pairs: Sequence[tuple[str, str]],
    *,
    recall: Tensor,
    resamples: int,
    generator: torch.Generator,
) -> Interval:
    """The share of pairs with a lower conditional FPR among those that moved, of two models at equal recall (L,).

    Each resample of the images has thresholds of its own, for the same recall.
    """
    place = {name: number for number, name in enumerate(model.labels)}
    label, context = torch.tensor([[place[name] for name in pair] for pair in pairs]).reshape(-1, 2).T
    missing, ranked = model.target == 0, [_Ranked.make(scores) for scores in (model, baseline)]
    shown = (model.target == 1).T.to_sparse().float()

    def measure(counts: Tensor) -> Tensor:
        shares = []
        for drawn in counts.T:
            given = [torch.sparse.mm(shown, drawn[:, None] * (each.decide(drawn, recall) & missing)) for each in ranked]
            moved = (given[0] - given[1])[context, label].sign()  # the same images are behind both rates
            shares.append((moved < 0).sum() / (moved != 0).sum())
        return torch.stack(shares)[:, None].double()

    return resample({"lower": measure}, len(model), resamples, generator).bound_mean("lower")


class _Ranked(NamedTuple):
    """What no resample changes, all (N,L): the images of each label, from the highest score on, and which show it.

    Images of equal scores stand in an order that has nothing to do with what they show.
    """

    order: Tensor
    present: Tensor
    place: Tensor  # of each image in that order
    known: Tensor

    @classmethod
    def make(cls, scores: Scores) -> "_Ranked":
        """Rank by the logits to rank by."""
        logits = scores.get(scores.ranking)
        drawn = torch.randperm(len(logits), generator=torch.Generator().manual_seed(0))
        order = drawn[logits[drawn].argsort(dim=0, descending=True, stable=True)]
        return cls(order, (scores.target == 1).gather(0, order), order.argsort(dim=0), ~scores.target.isnan())

    def decide(self, drawn: Tensor, recall: Tensor) -> Tensor:
        """Decisions (N,L) that find a share `recall` (L,) of the positives where each image was drawn (N,) times."""
        found = (drawn[self.order] * self.present).cumsum(0)
        wanted = (recall.nan_to_num(0.0) * found[-1]).round()
        last = (found < wanted).sum(0)
        return (self.place <= last) & (wanted > 0) & self.known


def compare_pairs(model: PairRates, baseline: PairRates) -> PairComparison:
    """Set the pairs of a model beside those of a baseline, such as PAT-T beside ASL, or DeT beside InT."""
    same = (torch.equal(getattr(model, what), getattr(baseline, what)) for what in ("tpr_counts", "fpr_counts"))
    if model.names != baseline.names or not all(same):
        wrong = "the two models were not judged on the same images and pairs"
        raise InputError("compare_pairs", wrong, "score the same data with both and take the same pairs")
    return PairComparison(
        model, baseline, cfpr=_make_curve(model.fpr, baseline.fpr, -1), ctpr=_make_curve(model.tpr, baseline.tpr, 1)
    )


def _make_curve(model: Tensor, baseline: Tensor, better: int) -> Curve:
    """The curve of rates (M,), NaN for pairs that have none; `better` is 1 where a higher rate is, else -1."""
    (pairs,) = (~baseline.isnan()).nonzero(as_tuple=True)
    pairs = pairs[baseline[pairs].argsort(stable=True)]
    signs = (better * (model - baseline)[pairs]).sign()
    improved, worse, tied = (int((signs == sign).sum()) for sign in (1, -1, 0))
    return Curve(baseline[pairs], model[pairs], improved, worse, tied, undefined=len(baseline) - len(pairs))


def _find(scores: Scores, name: str) -> int:
    check_known(name, scores.labels, where="scores", what="label")
    return scores.labels.index(name)
