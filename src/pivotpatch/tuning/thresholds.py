"""Thresholds per label, fitted on validation scores: by F1, by precision or by cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pivotpatch.core.counterfactual import at_least_float32
from pivotpatch.core.metrics import check_scores
from pivotpatch.core.policies import PerLabel, check_probabilities
from pivotpatch.errors import InputError, choose_one_of, shorten

NEVER = 1.0
"""A threshold that no probability is above."""


class Cuts(NamedTuple):
    """Every way to cut N images by their scores for a label; row k gives it to the k highest, K = N + 1.

    Attributes:
        thresholds: (K,L), halfway between the last image that is given the label and the first that is not.
        hits: (K,L) images that are given the label and show it.
        given: (K,L) images that are given the label.
        positives: (L,) images that show it.
        possible: (K,L), False where the cut would part equal scores.
    """

    thresholds: Tensor
    hits: Tensor
    given: Tensor
    positives: Tensor
    possible: Tensor


@dataclass(frozen=True)
class BestF1:
    """The highest F1."""

    @property
    def definition(self) -> str:
        """The goal in words."""
        return "best F1"

    def value(self, cuts: Cuts) -> Tensor:
        """F1 (K,L) of each cut; 0 where the label is neither given nor shown."""
        return 2 * cuts.hits / (cuts.given + cuts.positives).clamp(min=1)


@dataclass(frozen=True)
class PrecisionAtLeast:
    """The lowest threshold, and so the highest recall, whose precision is `precision` or more."""

    precision: float

    @property
    def definition(self) -> str:
        """The goal in words."""
        return f"precision of {self.precision:g} or more"

    def value(self, cuts: Cuts) -> Tensor:
        """Images given (K,L) by each cut, -inf where they are not precise enough."""
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

    @property
    def definition(self) -> str:
        """The goal in words."""
        return f"least cost ({self.false_positive:g} a false positive, {self.false_negative:g} a false negative)"

    def value(self, cuts: Cuts) -> Tensor:
        """The cost (K,L) of each cut, below 0."""
        missed = cuts.positives - cuts.hits
        return -(self.false_positive * (cuts.given - cuts.hits) + self.false_negative * missed)


Goal = BestF1 | PrecisionAtLeast | LeastCost
"""What a threshold is to achieve."""


def parse_goal(text: str) -> Goal:
    """A goal as a person writes it: "f1", "precision:0.9", or "cost:1:5" (a false positive, a false negative).

    >>> parse_goal("cost:1:5").definition
    'least cost (1 a false positive, 5 a false negative)'
    """
    name, *rest = text.split(":")
    goals: dict[str, type[Goal]] = {"f1": BestF1, "precision": PrecisionAtLeast, "cost": LeastCost}
    counts = {"f1": 0, "precision": 1, "cost": 2}
    if name not in goals:
        raise InputError("goal", f"unknown goal {name!r}", choose_one_of(name, goals))
    try:
        numbers = [float(part) for part in rest]
    except ValueError:
        numbers = [-1.0]
    highest = 1 if name == "precision" else torch.finfo(torch.float64).max
    if len(rest) != counts[name] or not all(0 < number <= highest for number in numbers):
        todo = "write f1, precision:0.9 (a share above 0, up to 1) or cost:1:5 (two numbers above 0)"
        raise InputError("goal", f"{text!r} cannot be read", todo)
    return goals[name](*numbers)


@dataclass(frozen=True)
class LabelThreshold:
    """The threshold of one label, and what it does to the images that it was fitted on.

    Attributes:
        label: its name.
        threshold: the label is given where its probability is above.
        precision: None where the label is given to no image.
        recall: None where no image shows it.
        f1: likewise.
        positives: images that show it.
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
        rows: one per label, in order.
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

    def __str__(self) -> str:
        text = f"{len(self.rows)} thresholds for {self.goal}, {min(self.values):.3g} to {max(self.values):.3g}"
        few = [row.label for row in self.rows if row.fell_back]
        unreached = [row.label for row in self.rows if not row.reached]
        if few:
            rule = f"fewer than {self.min_positives} positives, so the threshold of all labels, {self.pooled:.3g}"
            text += f"; {rule}: {shorten(few)}"
        return text + (f"; goal out of reach, so never given: {shorten(unreached)}" if unreached else "")


def fit_thresholds(
    probs: Tensor,
    target: Tensor,
    *,
    goal: Goal,
    min_positives: int = 10,
    labels: Sequence[str] | None = None,
) -> FittedThresholds:
    """Fit a threshold per label on validation scores.

    Of thresholds that do equally well the highest is taken, and the middle of the gap in which decisions do not change.
    What the result says of precision and recall holds for these very images; on others both are a little lower.

    Args:
        probs: (N,L) in [0,1]; calibrated ones where the checkpoint is to hold a calibration too.
        target: (N,L), 1 present, 0 absent, NaN unknown.
        goal: `BestF1`, `PrecisionAtLeast` or `LeastCost`.
        min_positives: a label with fewer gets the threshold that is best for all labels together.
        labels: names of the L labels.
    """
    target, names = check_scores(probs, target, labels=labels, where="fit_thresholds")
    check_probabilities(probs, "fit_thresholds")
    if not (target == 1).any():
        raise InputError("fit_thresholds", "no label has a positive image", "check the target")
    probs = at_least_float32(probs.detach())
    cuts = _cut(probs, target)
    own, reached = _choose(cuts, goal)
    pooled, pooled_reached = _choose(_cut(probs.reshape(-1, 1), target.reshape(-1, 1)), goal)
    fell_back = cuts.positives < min_positives
    values = torch.where(fell_back, pooled, own)
    reached = torch.where(fell_back, pooled_reached, reached)
    decided, present = PerLabel(tuple(values.tolist())).decide(probs), target == 1
    counts = (decided & present).sum(0), (decided & ~torch.isnan(target)).sum(0), present.sum(0)
    columns = (each.tolist() for each in (values, *counts, fell_back, reached))
    rows = tuple(
        LabelThreshold(
            label=name,
            threshold=value,
            precision=hits / given if given else None,
            recall=hits / positives if positives else None,
            f1=2 * hits / (given + positives) if positives else None,
            positives=positives,
            fell_back=fell,
            reached=reach,
        )
        for name, value, hits, given, positives, fell, reach in zip(names, *columns, strict=True)
    )
    return FittedThresholds(goal.definition, pooled.item(), min_positives, rows)


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


class ThresholdCurve(NamedTuple):
    """Precision and recall of one label at every threshold, from the highest threshold to the lowest; each (K,)."""

    precision: Tensor
    recall: Tensor


def threshold_curve(probs: Tensor, target: Tensor) -> ThresholdCurve:
    """Precision and recall of one label at every threshold that gives it to an image.

    Args:
        probs: (N,), of any scale.
        target: (N,), 1 present, 0 absent, NaN unknown.
    """
    from sklearn.metrics import precision_recall_curve

    known = ~torch.isnan(target)
    precision, recall, _ = precision_recall_curve(target[known].numpy(), probs.detach()[known].numpy())
    return ThresholdCurve(*(torch.from_numpy(values[-2::-1].copy()) for values in (precision, recall)))
