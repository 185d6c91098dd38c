"""Thresholds fitted on validation scores, for each label its own: by F1, by precision or by cost."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pivotpatch.core.counterfactual import at_least_float32
from pivotpatch.core.metrics import check_scores
from pivotpatch.core.policies import PerLabel, check_probabilities
from pivotpatch.errors import InputError, choose_one_of, shorten

NEVER = 1.0
"""A threshold that no probability is above."""


class Cuts(NamedTuple):
    """Every way to cut N pictures by their scores for a label; row k gives it to the k highest, K = N + 1.

    Attributes:
        thresholds: (K,L), halfway between the last picture that is given the label and the first that is not.
        hits: (K,L) pictures that are given the label and show it.
        given: (K,L) pictures that are given the label.
        positives: (L,) pictures that show it.
        possible: (K,L), False where the cut would part equal scores.
    """

    thresholds: Tensor
    hits: Tensor
    given: Tensor
    positives: Tensor
    possible: Tensor

    @property
    def f1(self) -> Tensor:
        """F1 (K,L); 0 where the label is neither given nor shown."""
        return 2 * self.hits / (self.given + self.positives).clamp(min=1)


class Goal(Protocol):
    """What a threshold is to achieve."""

    @property
    def definition(self) -> str:
        """The goal in words, for tables."""
        ...

    def value(self, cuts: Cuts) -> Tensor:
        """Worth (K,L) of each cut, the more the better; -inf where it misses the goal."""
        ...


@dataclass(frozen=True)
class BestF1:
    """The highest F1."""

    @property
    def definition(self) -> str:
        """The goal in words."""
        return "best F1"

    def value(self, cuts: Cuts) -> Tensor:
        """F1 (K,L)."""
        return cuts.f1


@dataclass(frozen=True)
class PrecisionAtLeast:
    """The lowest threshold, and so the highest recall, whose precision is `precision` or more."""

    precision: float

    def __post_init__(self) -> None:
        if not 0 < self.precision <= 1:
            raise InputError("PrecisionAtLeast", f"precision is {self.precision!r}", "give a share above 0, up to 1")

    @property
    def definition(self) -> str:
        """The goal in words."""
        return f"precision of {self.precision:g} or more"

    def value(self, cuts: Cuts) -> Tensor:
        """Pictures given (K,L), where they are precise enough."""
        enough = (cuts.given > 0) & (cuts.hits / cuts.given.clamp(min=1) >= self.precision)
        return cuts.given.masked_fill(~enough, -torch.inf)


@dataclass(frozen=True)
class LeastCost:
    """The lowest cost of all mistakes.

    Attributes:
        false_positive: cost of a label that is given and not there.
        false_negative: cost of a label that is there and not given.
    """

    false_positive: float = 1.0
    false_negative: float = 1.0

    def __post_init__(self) -> None:
        if not all(0 < cost < float("inf") for cost in (self.false_positive, self.false_negative)):
            wrong = f"costs are {self.false_positive!r} and {self.false_negative!r}"
            raise InputError("LeastCost", wrong, "give two numbers above 0")

    @property
    def definition(self) -> str:
        """The goal in words."""
        return f"least cost ({self.false_positive:g} a false positive, {self.false_negative:g} a false negative)"

    def value(self, cuts: Cuts) -> Tensor:
        """The cost (K,L), below 0."""
        missed = cuts.positives - cuts.hits
        return -(self.false_positive * (cuts.given - cuts.hits) + self.false_negative * missed)


def parse_goal(text: str) -> Goal:
    """A goal as a person writes it: "f1", "precision:0.9", or "cost:1:5" (a false positive, a false negative).

    >>> parse_goal("cost:1:5").definition
    'least cost (1 a false positive, 5 a false negative)'
    """
    name, *rest = text.split(":")
    counts = {"f1": 0, "precision": 1, "cost": 2}
    if name not in counts:
        raise InputError("goal", f"unknown goal {name!r}", choose_one_of(name, counts))
    try:
        numbers = [float(part) for part in rest]
    except ValueError:
        numbers = []
    if len(numbers) != counts[name] or len(numbers) != len(rest):
        raise InputError("goal", f"{text!r} cannot be read", "write f1, precision:0.9 or cost:1:5")
    if name == "f1":
        return BestF1()
    return PrecisionAtLeast(*numbers) if name == "precision" else LeastCost(*numbers)


@dataclass(frozen=True)
class LabelThreshold:
    """The threshold of one label, and what it does to the pictures that it was fitted on.

    Attributes:
        label: its name.
        threshold: the label is given where its probability is above.
        precision: None where the label is given to no picture.
        recall: None where no picture shows it.
        f1: likewise.
        positives: pictures that show it.
        fell_back: there were too few of them, so that the threshold is that of all labels together.
        reached: False where no threshold reaches the goal; then the label is never given.
    """

    label: str
    threshold: float
    precision: float | None
    recall: float | None
    f1: float | None
    positives: int
    fell_back: bool
    reached: bool


@dataclass(frozen=True)
class FittedThresholds:
    """Thresholds of all labels.

    Attributes:
        goal: what they were fitted for, in words.
        pooled: the threshold of all labels together, which those with too few positives got.
        min_positives: how many positives are enough.
        rows: one a label, in order.
    """

    goal: str
    pooled: float
    min_positives: int
    rows: tuple[LabelThreshold, ...]

    @property
    def values(self) -> tuple[float, ...]:
        """L thresholds, as a checkpoint stores them."""
        return tuple(row.threshold for row in self.rows)

    @property
    def policy(self) -> PerLabel:
        """The rule to decide by."""
        return PerLabel(self.values)

    @property
    def fell_back(self) -> tuple[str, ...]:
        """Labels with too few positives."""
        return tuple(row.label for row in self.rows if row.fell_back)

    @property
    def unreached(self) -> tuple[str, ...]:
        """Labels for which no threshold reaches the goal."""
        return tuple(row.label for row in self.rows if not row.reached)

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        text = f"{len(self.rows)} thresholds for {self.goal}, {min(self.values):.3g} to {max(self.values):.3g}"
        if self.fell_back:
            few = f"fewer than {self.min_positives} positives, so the threshold of all labels, {self.pooled:.3g}"
            text += f"; {few}: {shorten(self.fell_back)}"
        return text + (f"; goal out of reach, so never given: {shorten(self.unreached)}" if self.unreached else "")


def fit_thresholds(
    probs: Tensor,
    target: Tensor,
    *,
    goal: Goal,
    min_positives: int = 10,
    labels: Sequence[str] | None = None,
) -> FittedThresholds:
    """Fit a threshold for each label on validation scores.

    Of thresholds that do equally well the highest is taken, and the middle of the gap in which decisions do not change.
    What the result says of precision and recall holds for these very pictures; on others both are a little lower.

    Args:
        probs: (N,L) in [0,1]; calibrated ones where the checkpoint is to hold a calibration too.
        target: (N,L), 1 present, 0 absent, NaN unknown.
        goal: `BestF1`, `PrecisionAtLeast` or `LeastCost`.
        min_positives: a label with fewer gets the threshold that is best for all labels together.
        labels: names of the L labels.
    """
    where = "fit_thresholds"
    target, names = check_scores(probs, target, labels=labels, where=where)
    check_probabilities(probs, where)
    if min_positives < 1:
        raise InputError(where, f"min_positives is {min_positives!r}", "give 1 or more")
    if not (target == 1).any():
        raise InputError(where, "no label has a positive image", "check the target")
    probs = at_least_float32(probs.detach())
    cuts = _cut(probs, target)
    own, reached = _choose(cuts, goal)
    pooled, pooled_reached = _choose(_cut(probs.reshape(-1, 1), target.reshape(-1, 1)), goal)
    fell_back = cuts.positives < min_positives
    values = torch.where(fell_back, pooled, own)
    reached = torch.where(fell_back, pooled_reached, reached)
    rows = _describe(probs, target, values=values, fell_back=fell_back, reached=reached, names=names)
    return FittedThresholds(goal.definition, pooled.item(), min_positives, rows)


class ThresholdCurve(NamedTuple):
    """What every threshold does for one label, from the highest threshold to the lowest; each (K,)."""

    thresholds: Tensor
    precision: Tensor
    recall: Tensor
    f1: Tensor


def threshold_curve(probs: Tensor, target: Tensor) -> ThresholdCurve:
    """Precision, recall and F1 of one label at every threshold that gives it to a picture.

    Args:
        probs: (N,) in [0,1].
        target: (N,), 1 present, 0 absent, NaN unknown.
    """
    target, _ = check_scores(probs[:, None], target[:, None], labels=None, where="threshold_curve")
    check_probabilities(probs, "threshold_curve")
    if not (target == 1).any():
        raise InputError("threshold_curve", "no image is positive", "choose another label")
    cuts = _cut(at_least_float32(probs.detach())[:, None], target)
    kept = (cuts.possible & (cuts.given > 0))[:, 0]
    thresholds, hits, given, f1 = (part[kept, 0] for part in (cuts.thresholds, cuts.hits, cuts.given, cuts.f1))
    return ThresholdCurve(thresholds, hits / given, hits / cuts.positives, f1)


def _cut(probs: Tensor, target: Tensor) -> Cuts:
    """All cuts of probabilities (N,L): one sort, then running sums."""
    known = ~torch.isnan(target)
    ranked, order = probs.masked_fill(~known, -1).sort(dim=0, descending=True)
    none = torch.zeros_like(ranked[:1])
    hits = torch.cat([none.double(), (target == 1).gather(0, order).double().cumsum(0)])
    given = torch.cat([none.double(), known.gather(0, order).double().cumsum(0)])
    above = torch.cat([torch.ones_like(none), ranked])
    below = torch.cat([ranked, none]).clamp(min=0)
    middle = (above + below) / 2
    # Between neighbouring floats the middle is one of the two: the lower parts them as well, for "above" is strict.
    thresholds = torch.where(middle < above, middle, below)
    possible = above > below
    possible[0] = True
    return Cuts(thresholds, hits, given, hits[-1], possible)


class _Choice(NamedTuple):
    """The best threshold (L,), and whether it reaches the goal (L,)."""

    thresholds: Tensor
    reached: Tensor


def _choose(cuts: Cuts, goal: Goal) -> _Choice:
    value, row = goal.value(cuts).masked_fill(~cuts.possible, -torch.inf).max(dim=0)  # the first of equal ones
    reached = value > -torch.inf
    return _Choice(cuts.thresholds.gather(0, row[None])[0].masked_fill(~reached, NEVER), reached)


def _describe(
    probs: Tensor, target: Tensor, *, values: Tensor, fell_back: Tensor, reached: Tensor, names: tuple[str, ...]
) -> tuple[LabelThreshold, ...]:
    """A row a label; values, fell_back and reached are (L,)."""
    decided = PerLabel(tuple(values.tolist())).decide(probs)
    present = target == 1
    hits = (decided & present).sum(0).tolist()
    given = (decided & ~torch.isnan(target)).sum(0).tolist()
    positives = present.sum(0).tolist()
    columns = zip(names, values.tolist(), hits, given, positives, fell_back.tolist(), reached.tolist(), strict=True)
    return tuple(
        LabelThreshold(
            label=name,
            threshold=value,
            precision=hit / gives if gives else None,
            recall=hit / there if there else None,
            f1=2 * hit / (gives + there) if there else None,
            positives=there,
            fell_back=fell,
            reached=reach,
        )
        for name, value, hit, gives, there, fell, reach in columns
    )
