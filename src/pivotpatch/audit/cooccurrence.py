"""Conditional true and false positive rates: how the presence of one label moves decisions about another.

The paper writes {car; parking meter} for decisions about the car in pictures that show a parking meter. Here the
first is the `label` and the second its `company`; they keep company where P(label | company) is above a limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pivotpatch.core.policies import Fixed, PerLabel, PriorMatched, ThresholdPolicy
from pivotpatch.errors import InputError, choose_one_of
from pivotpatch.inference.scores import Scores

MIN_PROBABILITY = 0.2
FEW = 20  # pictures behind a rate; with fewer its interval is wider than 0.3 at a rate of one half, and it is marked
Order = Literal["rate", "gap"]
_CHUNK = 1 << 25  # labels times pictures that are counted at once: bounds memory, not results


class ConditionalRates(NamedTuple):
    """How often label i is given where label j is there; float32 rates, NaN where no picture tells.

    The paper writes {i; j}. On the diagonal stand the ordinary true positive rates, and no false positive rate.

    Attributes:
        tpr: (L,L); [i, j] is the share, among pictures that show i and j, of those that are given i.
        fpr: (L,L); [i, j] is the share, among pictures that show j but not i, of those that are given i.
        tpr_counts: (L,L) pictures that show i and j.
        fpr_counts: (L,L) pictures that show j but not i.
    """

    tpr: Tensor
    fpr: Tensor
    tpr_counts: Tensor
    fpr_counts: Tensor


class Limits(NamedTuple):
    """Both ends of intervals, each of the shape of what they are of."""

    low: Tensor
    high: Tensor


@dataclass(frozen=True, eq=False)
class PairRates:
    """Conditional rates of M ordered pairs of labels, for the decisions of one model.

    Attributes:
        labels: names of all labels, or of those that given pairs are made of.
        definition: the policy that decided, in words.
        label: (M,) index of the label that is decided about.
        company: (M,) index of the label that is there.
        probability: (M,) P(label | company), from the target.
        tpr: (M,) conditional TPR; NaN where no picture shows both.
        fpr: (M,) conditional FPR; NaN where no picture shows the company alone.
        tpr_counts: (M,) pictures behind `tpr`.
        fpr_counts: (M,) pictures behind `fpr`.
        overall_fpr: (M,) FPR of the label over all pictures, whatever their company.
    """

    labels: tuple[str, ...]
    definition: str
    label: Tensor
    company: Tensor
    probability: Tensor
    tpr: Tensor
    fpr: Tensor
    tpr_counts: Tensor
    fpr_counts: Tensor
    overall_fpr: Tensor

    def __len__(self) -> int:
        return len(self.label)

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """Label and company of each pair."""
        pairs = zip(self.label.tolist(), self.company.tolist(), strict=True)
        return tuple((self.labels[label], self.labels[company]) for label, company in pairs)

    @property
    def gap(self) -> Tensor:
        """(M,) how much higher the FPR of the label is in this company than overall."""
        return self.fpr - self.overall_fpr

    @property
    def tpr_interval(self) -> Limits:
        """Wilson intervals of `tpr`."""
        return wilson_interval(self.tpr, self.tpr_counts)

    @property
    def fpr_interval(self) -> Limits:
        """Wilson intervals of `fpr`."""
        return wilson_interval(self.fpr, self.fpr_counts)

    def select(self, rows: Tensor) -> "PairRates":
        """The pairs that `rows` (K,) names, in that order."""
        kept = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return PairRates(self.labels, self.definition, **kept)

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain types, for JSON; None where no picture tells."""
        columns: dict[str, Tensor] = {"probability": self.probability}
        for name, rate, interval, counts in (
            ("ctpr", self.tpr, self.tpr_interval, self.tpr_counts),
            ("cfpr", self.fpr, self.fpr_interval, self.fpr_counts),
        ):
            low, high = interval
            columns |= {name: rate, f"{name}_low": low, f"{name}_high": high, f"{name}_pictures": counts}
            columns[f"{name}_few"] = counts < FEW
        columns |= {"fpr": self.overall_fpr, "gap": self.gap}
        values = zip(*(_to_plain(column) for column in columns.values()), strict=True)
        pairs = [
            {"label": label, "company": company} | dict(zip(columns, row, strict=True))
            for (label, company), row in zip(self.names, values, strict=True)
        ]
        return {"definition": self.definition, "few": FEW, "pairs": pairs}


class FalsePositive(NamedTuple):
    """A picture that is given a label which it does not show.

    Attributes:
        picture: its name.
        row: its position among the scores.
        probability: of the label.
    """

    picture: str
    row: int
    probability: float


def wilson_interval(rates: Tensor, counts: Tensor, *, level: float = 0.95) -> Limits:
    """Wilson score intervals of shares; from 0 to 1 where nothing was counted.

    Args:
        rates: shares of any shape.
        counts: how many each is a share of.
        level: probability that an interval covers the true share.

    >>> low, high = wilson_interval(torch.tensor(1.0), torch.tensor(3))
    >>> round(low.item(), 2), high.item()
    (0.44, 1.0)
    """
    square = torch.special.ndtri(torch.tensor(0.5 + level / 2, dtype=torch.float64)) ** 2
    rates, counts = rates.double(), counts.double()
    centre = (rates + square / (2 * counts)) / (1 + square / counts)
    spread = (square * (rates * (1 - rates) / counts + square / (4 * counts**2))).sqrt() / (1 + square / counts)
    nothing = counts == 0
    low = (centre - spread).clamp(min=0).masked_fill(nothing, 0.0)
    return Limits(low, (centre + spread).clamp(max=1).masked_fill(nothing, 1.0))


def conditional_rates(decided: Tensor, target: Tensor) -> ConditionalRates:
    """Conditional true and false positive rates of all pairs of labels, as the paper defines them.

    A picture of which i or j is unknown counts for no rate of that pair.

    Args:
        decided: (N,L) boolean, the labels that each picture is given.
        target: (N,L), 1 present, 0 absent, NaN unknown.

    >>> decided = torch.tensor([[True, True], [False, True], [True, True]])
    >>> rates = conditional_rates(decided, torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]]))
    >>> rates.tpr[0, 1].item(), rates.tpr_counts[0, 1].item()
    (0.5, 2)
    >>> rates.fpr[0, 1].item(), rates.fpr_counts[0, 1].item()
    (1.0, 1)
    """
    _check(decided, target)
    labels = target.shape[1]
    chunk = max(_CHUNK // max(labels, 1), 1)
    # [j, i] of each, turned round at the end. Sums of ones are exact in float32 up to 2^24 pictures.
    both, both_given, alone, alone_given = (torch.zeros(labels, labels, device=target.device) for _ in range(4))
    for given, truth in zip(decided.to(target.device).split(chunk), target.split(chunk), strict=True):
        there, missing = truth == 1, truth == 0
        # A picture shows few of many labels: a sparse product takes steps for those alone.
        company = there.T.to_sparse().float()
        kinds = {both: there, both_given: there & given, alone: missing, alone_given: missing & given}
        for counts, kind in kinds.items():
            counts += torch.sparse.mm(company, kind.float())
    tpr, fpr = both_given.div_(both).T, alone_given.div_(alone).T
    return ConditionalRates(tpr, fpr, both.int().T, alone.int().T)


def rate_pairs(
    scores: Scores,
    *,
    policy: ThresholdPolicy | None = None,
    kind: str | None = None,
    min_probability: float = MIN_PROBABILITY,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> PairRates:
    """Conditional rates of the pairs that keep company, or of given pairs.

    Args:
        scores: what a model says, and what is true.
        policy: how probabilities become decisions; by default each label is given as often as the target has it.
        kind: which logits; those to rank by, by default.
        min_probability: take the pairs whose P(label | company) is above it.
        pairs: take these instead: names of label and company.
    """
    if not 0 <= min_probability < 1:
        raise InputError("rate_pairs", f"min_probability is {min_probability}", "give a share in [0, 1)")
    policy = policy or PriorMatched.from_target(scores.target)
    decided, target, labels = decide(scores, policy=policy, kind=kind), scores.target, scores.labels
    if pairs is not None:
        # No other label matters then, so that a model which knows others can be compared.
        labels = tuple(dict.fromkeys(name for pair in pairs for name in pair))
        columns = [_find(scores, name) for name in labels]
        decided, target = decided[:, columns], target[:, columns]
    rates = conditional_rates(decided, target)
    if pairs is None:
        shares = rates.tpr_counts / (rates.tpr_counts + rates.fpr_counts)
        label, company = shares.fill_diagonal_(0).nan_to_num_(0.0).gt(min_probability).nonzero(as_tuple=True)
    else:
        found = [(labels.index(label), labels.index(company)) for label, company in pairs]
        label, company = torch.tensor(found, dtype=torch.int64).reshape(-1, 2).T
    tpr, fpr, both, alone = (column[label, company] for column in rates)
    missing = target == 0
    overall = (decided & missing).sum(0) / missing.sum(0)
    return PairRates(
        labels=labels,
        definition=policy.definition,
        label=label,
        company=company,
        probability=both / (both + alone),
        tpr=tpr,
        fpr=fpr,
        tpr_counts=both,
        fpr_counts=alone,
        overall_fpr=overall[label],
    )


def decide(scores: Scores, *, policy: ThresholdPolicy | None = None, kind: str | None = None) -> Tensor:
    """Decisions (N,L) of a policy about scores of a kind, the one to rank by where None.

    Policies that only rank see logits, for probabilities near 1 are all alike. Without a policy each label is given as
    often as the target has it.
    """
    kind, policy = kind or scores.ranking, policy or PriorMatched.from_target(scores.target)
    values = scores.probs(kind) if isinstance(policy, Fixed | PerLabel) else scores.get(kind)
    return policy.decide(values, known=~torch.isnan(scores.target))


def rank_pairs(rates: PairRates, *, by: Order = "rate") -> PairRates:
    """The pairs that can be hallucinated, the worst first.

    The lower end of the interval decides, so that a pair with one unlucky picture is listed, but does not lead.

    Args:
        rates: of all pairs; those without a conditional FPR are left out.
        by: "rate", the conditional FPR, or "gap", how much higher it is than the label's FPR overall.
    """
    if by not in get_args(Order):
        raise InputError("rank_pairs", f"unknown order {by!r}", choose_one_of(by, get_args(Order)))
    known = rates.select((rates.fpr_counts > 0).nonzero()[:, 0])
    least = known.fpr_interval.low - (known.overall_fpr if by == "gap" else 0.0)
    return known.select(least.argsort(descending=True, stable=True))


def find_false_positives(
    scores: Scores,
    label: str,
    *,
    company: str,
    policy: ThresholdPolicy | None = None,
    kind: str | None = None,
    decided: Tensor | None = None,
) -> list[FalsePositive]:
    """The pictures that show the company but not the label and are given the label, the most confident first.

    Args:
        scores: what a model says, and what is true.
        label: name of the label that is decided about.
        company: name of the label that is there.
        policy: how probabilities become decisions; by default each label is given as often as the target has it.
        kind: which logits; those to rank by, by default.
        decided: (N,L) what `decide` says, where it is at hand.
    """
    i, j = _find(scores, label), _find(scores, company)
    decided = decide(scores, policy=policy, kind=kind) if decided is None else decided
    (rows,) = (decided[:, i] & (scores.target[:, i] == 0) & (scores.target[:, j] == 1)).nonzero(as_tuple=True)
    rows = rows[scores.get(kind or scores.ranking)[rows, i].argsort(descending=True, stable=True)]
    chances = scores.select(rows).probs(kind or scores.ranking)[:, i].tolist()
    return [
        FalsePositive(scores.pictures[row], row, chance) for row, chance in zip(rows.tolist(), chances, strict=True)
    ]


def _find(scores: Scores, name: str) -> int:
    if name not in scores.labels:
        raise InputError("scores", f"unknown label {name!r}", choose_one_of(name, scores.labels))
    return scores.labels.index(name)


def _to_plain(column: Tensor) -> list[float | None]:
    return [None if value != value else value for value in column.tolist()]


def _check(decided: Tensor, target: Tensor) -> None:
    where = "conditional_rates"
    if decided.ndim != 2 or decided.shape != target.shape:
        wrong = f"decided has shape {tuple(decided.shape)} and target {tuple(target.shape)}"
        raise InputError(where, wrong, "give both as (N, L)")
    if decided.dtype != torch.bool:
        raise InputError(where, f"decided is {decided.dtype}", "give decisions, for example Fixed(0.5).decide(probs)")
    wrong_values = target[~(torch.isnan(target) | (target == 0) | (target == 1))]
    if len(wrong_values):
        raise InputError(where, f"target holds {wrong_values[0].item():g}", "write 1, 0, or NaN for unknown")
