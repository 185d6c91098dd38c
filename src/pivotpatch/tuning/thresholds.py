"""Thresholds per label, fitted on validation scores: by F1, by precision, by recall or by cost."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from pivotpatch.core.counterfactual import at_least_float32
from pivotpatch.core.metrics import check_scores
from pivotpatch.core.policies import PerLabel, check_probabilities
from pivotpatch.errors import InputError, check_known, shorten

NEVER = 1.0
"""A threshold that no probability is above."""
LEAST = 10
"""Positive images that a label needs for a threshold of its own."""
_NUMBERS = {"f1": 0, "precision": 1, "recall": 1, "cost": 2}  # that stand behind the name of each goal


@dataclass(frozen=True)
class Goal:
    """What a threshold is to achieve, in words and as what ways to cut N images by their scores are worth.

    `value(hits, given, positives)` (K,L) is the highest for the best of K ways: `given` (K,L) images are given a label,
    `hits` (K,L) of these show it, and `positives` (L,) images show it in all. It is -inf for what will not do.
    """

    definition: str
    value: Callable[[Tensor, Tensor, Tensor], Tensor]


def parse_goal(text: str) -> Goal:
    """A goal as a person writes it: "f1", "precision:0.9", "recall:0.8" or "cost:1:5" (a false positive, a negative).

    "f1" has the highest F1, "precision" the highest recall at so much precision or more, "recall" the other way round,
    "cost" the least cost of all labels that are given and not there, or there and not given.

    >>> parse_goal("cost:1:5").definition
    'least cost (1 a false positive, 5 a false negative)'
    """
    name, *rest = text.split(":")
    check_known(name, _NUMBERS, where="goal", what="goal")
    numbers = []
    with suppress(ValueError):
        numbers = [float(part) for part in rest]
    sound = all(0 < number <= 1 if _NUMBERS[name] == 1 else 0 < number < math.inf for number in numbers)
    if not sound or not len(numbers) == len(rest) == _NUMBERS[name]:
        todo = "write f1, precision:0.9 or recall:0.8 (a share above 0, up to 1), or cost:1:5 (two numbers above 0)"
        raise InputError("goal", f"{text!r} cannot be read", todo)

    def value(hits: Tensor, given: Tensor, positives: Tensor) -> Tensor:
        if name == "f1":  # 0 where the label is neither given nor shown
            return 2 * hits / (given + positives).clamp(min=1)
        if name == "precision":  # the lowest threshold of those that are precise enough
            enough = (given > 0) & (hits / given.clamp(min=1) >= numbers[0])
            return given.masked_fill(~enough, -torch.inf)
        if name == "recall":  # the highest threshold of those that find enough
            return -given.masked_fill((hits / positives.clamp(min=1) < numbers[0]) & (positives > 0), torch.inf)
        return -(numbers[0] * (given - hits) + numbers[1] * (positives - hits))

    words = {"f1": "best F1", "precision": "precision of {:g} or more", "recall": "recall of {:g} or more"}
    cost = "least cost ({:g} a false positive, {:g} a false negative)"
    return Goal(words.get(name, cost).format(*numbers), value)


BEST_F1 = parse_goal("f1")
PREFERRED = {
    "precision": parse_goal("precision:0.86"),  # so that 85 % are right on other images
    "balance": BEST_F1,
    "recall": parse_goal("recall:0.8"),
}
"""What one threshold for all labels is to achieve over all tags, for each of `PREFERENCES`."""


@dataclass(frozen=True)
class FittedThresholds:
    """Thresholds of L labels for a goal, in words."""

    goal: str
    labels: tuple[str, ...]
    values: tuple[float, ...]  # L, as a checkpoint stores them
    pooled: float  # the one that is best for all labels together
    few: tuple[str, ...]  # labels with fewer positives than `LEAST`, which have the pooled one
    unreached: tuple[str, ...]  # labels for which the goal is out of reach; they are never given
    shared: bool = False  # whether all have the pooled one

    @property
    def policy(self) -> PerLabel:
        """The rule to decide by."""
        return PerLabel(self.values)

    def __str__(self) -> str:
        if self.shared:
            return f"{self.pooled:.3g} for all labels, for {self.goal} over all of them"
        text = f"{len(self.values)} thresholds for {self.goal}, {min(self.values):.3g} to {max(self.values):.3g}"
        if self.few:
            rule = f"fewer than {LEAST} positives, so the threshold of all labels, {self.pooled:.3g}"
            text += f"; {rule}: {shorten(self.few)}"
        return text + (f"; goal out of reach, so never given: {shorten(self.unreached)}" if self.unreached else "")


def fit_thresholds(
    probs: Tensor,
    target: Tensor,
    *,
    goal: Goal,
    shared: bool = False,
    labels: Sequence[str] | None = None,
) -> FittedThresholds:
    """Fit a threshold per label on validation scores.

    Of thresholds that do equally well the highest is taken, and the middle of the gap in which decisions do not change.

    Args:
        probs: (N,L) in [0,1]; calibrated ones where the checkpoint is to hold a calibration too.
        target: (N,L), 1 present, 0 absent, NaN unknown.
        goal: from `parse_goal`.
        shared: every label gets the threshold that is best for all labels together, and not only one with few
            positives. Where probabilities are calibrated per label, no others give more right tags with a share of so
            many right ones.
        labels: names of the L labels.
    """
    target, names = check_scores(probs, target, labels=labels, where="fit_thresholds")
    check_probabilities(probs, "fit_thresholds")
    if not (target == 1).any():
        raise InputError("fit_thresholds", "no label has a positive image", "check the target")
    probs = at_least_float32(probs.detach())
    own, reached = _choose(probs, target, goal)
    pooled, pooled_reached = _choose(probs.reshape(-1, 1), target.reshape(-1, 1), goal)
    few = ((target == 1).sum(0) < LEAST) & (not shared)
    common = few | shared
    values, reached = torch.where(common, pooled, own), torch.where(common, pooled_reached, reached)
    return FittedThresholds(
        goal.definition,
        labels=names,
        values=tuple(values.tolist()),
        pooled=pooled.item(),
        few=tuple(compress(names, few)),
        unreached=tuple(compress(names, ~reached)),
        shared=shared,
    )


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
