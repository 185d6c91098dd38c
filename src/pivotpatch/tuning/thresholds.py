"""Thresholds per label, fitted on validation scores: by F1, by precision or by cost."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pivotpatch.core.counterfactual import at_least_float32
from pivotpatch.core.metrics import check_scores
from pivotpatch.core.policies import PerLabel, check_probabilities
from pivotpatch.errors import InputError, choose_one_of, shorten

NEVER = 1.0
"""A threshold that no probability is above."""


# A goal's `value` (K,L) says what ways to cut N images by their scores are worth, the highest best: `given` (K,L)
# images are given a label, `hits` (K,L) of these show it, and `positives` (L,) images show it in all.


@dataclass(frozen=True)
class BestF1:
    """The highest F1."""

    definition = "best F1"

    def value(self, hits: Tensor, given: Tensor, positives: Tensor) -> Tensor:
        """F1; 0 where the label is neither given nor shown."""
        return 2 * hits / (given + positives).clamp(min=1)


@dataclass(frozen=True)
class PrecisionAtLeast:
    """The lowest threshold, and so the highest recall, whose precision is `precision` or more."""

    precision: float

    @property
    def definition(self) -> str:
        """The goal in words."""
        return f"precision of {self.precision:g} or more"

    def value(self, hits: Tensor, given: Tensor, positives: Tensor) -> Tensor:  # noqa: ARG002  # one call for all goals
        """Images given, -inf where they are not precise enough."""
        enough = (given > 0) & (hits / given.clamp(min=1) >= self.precision)
        return given.masked_fill(~enough, -torch.inf)


@dataclass(frozen=True)
class LeastCost:
    """The lowest cost of all mistakes: of labels that are given and not there, and of those there and not given."""

    false_positive: float = 1.0
    false_negative: float = 1.0

    @property
    def definition(self) -> str:
        """The goal in words."""
        return f"least cost ({self.false_positive:g} a false positive, {self.false_negative:g} a false negative)"

    def value(self, hits: Tensor, given: Tensor, positives: Tensor) -> Tensor:
        """The cost, below 0."""
        return -(self.false_positive * (given - hits) + self.false_negative * (positives - hits))


Goal = BestF1 | PrecisionAtLeast | LeastCost
"""What a threshold is to achieve."""
_GOALS: dict[str, type[Goal]] = {"f1": BestF1, "precision": PrecisionAtLeast, "cost": LeastCost}


def parse_goal(text: str) -> Goal:
    """A goal as a person writes it: "f1", "precision:0.9", or "cost:1:5" (a false positive, a false negative).

    >>> parse_goal("cost:1:5").definition
    'least cost (1 a false positive, 5 a false negative)'
    """
    name, *rest = text.split(":")
    if name not in _GOALS:
        raise InputError("goal", f"unknown goal {name!r}", choose_one_of(name, _GOALS))
    highest = 1.0 if name == "precision" else sys.float_info.max
    with suppress(ValueError):
        numbers = [float(part) for part in rest]
        if len(rest) == len(fields(_GOALS[name])) and all(0 < number <= highest for number in numbers):
            return _GOALS[name](*numbers)
    todo = "write f1, precision:0.9 (a share above 0, up to 1) or cost:1:5 (two numbers above 0)"
    raise InputError("goal", f"{text!r} cannot be read", todo)


@dataclass(frozen=True)
class LabelThreshold:
    """The threshold of one label, and what it does to the images that it was fitted on.

    Precision is None where the label is given to no image, recall and F1 where no image shows it. A label with too few
    positives fell back to the threshold of all labels together; one whose goal is not reached is never given.
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
    """Thresholds of all labels for a goal, in words; those with fewer than `min_positives` have the `pooled` one."""

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
    own, reached = _choose(probs, target, goal)
    pooled, pooled_reached = _choose(probs.reshape(-1, 1), target.reshape(-1, 1), goal)
    present = target == 1
    fell_back = present.sum(0) < min_positives
    values, reached = torch.where(fell_back, pooled, own), torch.where(fell_back, pooled_reached, reached)
    decided = PerLabel(tuple(values.tolist())).decide(probs)
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


def _choose(probs: Tensor, target: Tensor, goal: Goal) -> tuple[Tensor, Tensor]:
    """The best threshold (L,) of probabilities (N,L), and whether it reaches the goal (L,).

    Row k of N + 1 cuts gives a label to the k highest images: one sort, then running sums.
    """
    known = ~torch.isnan(target)
    ranked, order = probs.masked_fill(~known, -1).sort(dim=0, descending=True)
    none = torch.zeros_like(ranked[:1])
    hits, given = (
        torch.cat([none.double(), chosen.gather(0, order).double().cumsum(0)]) for chosen in (target == 1, known)
    )
    above, below = torch.cat([torch.ones_like(none), ranked]), torch.cat([ranked, none]).clamp(min=0)
    middle = (above + below) / 2
    # Between neighbouring floats the middle is one of the two: the lower parts them as well, for "above" is strict.
    thresholds = torch.where(middle < above, middle, below)
    equal = above <= below
    equal[0] = False
    value, row = goal.value(hits, given, hits[-1]).masked_fill(equal, -torch.inf).max(dim=0)  # the first of equal ones
    reached = value > -torch.inf
    return thresholds.gather(0, row[None])[0].masked_fill(~reached, NEVER), reached
