"""Threshold policies by name: precision and recall mean nothing without the rule that decides."""

import math
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from pivotpatch.core.checks import check_shapes
from pivotpatch.core.counterfactual import at_least_float32
from pivotpatch.errors import InputError

SWEPT = tuple(percent / 100 for percent in range(50, 100, 5))
"""Fixed thresholds that the best is chosen from, those that PAT's authors log."""


class ThresholdPolicy(Protocol):
    """A rule that turns scores (B,L) into decisions (B,L)."""

    @property
    def definition(self) -> str:
        """The rule in words, for tables."""
        ...

    def decide(self, scores: Tensor, *, known: Tensor | None = None) -> Tensor:
        """Decisions (B,L), boolean, for scores (B,L); `known` (B,L) marks the labels that somebody looked for."""
        ...


@dataclass(frozen=True)
class Fixed:
    """A label is given where its probability is above one threshold.

    >>> Fixed(0.5).decide(torch.tensor([[0.4, 0.6]])).tolist()
    [[False, True]]
    """

    threshold: float = 0.5
    best: bool = False  # whether it was chosen on the images that are judged, see `find_best_fixed`

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise InputError("Fixed", f"threshold is {self.threshold}", "give a probability in [0, 1]")

    @property
    def definition(self) -> str:
        """The rule in words."""
        plain = f"fixed threshold {self.threshold:g}"
        return f"best {plain} (by CF1, of 0.5, 0.55 .. 0.95)" if self.best else plain

    def decide(self, scores: Tensor, *, known: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Decisions (B,L) for probabilities (B,L)."""
        scores = at_least_float32(scores)
        check_probabilities(scores, "Fixed")
        return scores > self.threshold


@dataclass(frozen=True)
class PerLabel:
    """A label is given where its probability is above its own threshold.

    >>> PerLabel((0.3, 0.7)).decide(torch.tensor([[0.4, 0.6]])).tolist()
    [[True, False]]
    """

    thresholds: tuple[float, ...]

    def __post_init__(self) -> None:
        if missing := [place for place, threshold in enumerate(self.thresholds) if math.isnan(threshold)]:
            raise InputError("PerLabel", f"the threshold of label {missing[0]} is nan", "give a number for each label")

    @property
    def definition(self) -> str:
        """The rule in words."""
        return f"per-label thresholds ({min(self.thresholds):g} to {max(self.thresholds):g})"

    def decide(self, scores: Tensor, *, known: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Decisions (B,L) for probabilities (B,L)."""
        scores = at_least_float32(scores)  # half precision would round thresholds, too
        check_probabilities(scores, "PerLabel")
        thresholds = torch.tensor(self.thresholds, dtype=scores.dtype, device=scores.device)
        check_shapes("PerLabel", "BL L", scores=scores, thresholds=thresholds)
        return scores > thresholds


@dataclass(frozen=True)
class PriorMatched:
    """Each label is given to its highest-scored images, as many as its share in training says.

    A label of prior r, known in N images, is given to the round(r * N) of them that score highest
    for it; images that tie with the last of them are given it too.

    >>> PriorMatched((0.5,)).decide(torch.tensor([[3.0], [1.0], [2.0], [0.0]])).flatten().tolist()
    [True, False, True, False]
    """

    priors: tuple[float, ...]
    definition: str = "class-prior matched thresholds"  # the rule in words

    def __post_init__(self) -> None:
        if not all(0 <= prior <= 1 for prior in self.priors):
            raise InputError("PriorMatched", f"priors are {self.priors}", "give shares in [0, 1]")

    @classmethod
    def from_target(cls, target: Tensor) -> Self:
        """The shares of a target (N,L); unknown labels are left out of their mean."""
        return cls(tuple(torch.nanmean(torch.as_tensor(target).double(), dim=0).nan_to_num(0.0).tolist()))

    def decide(self, scores: Tensor, *, known: Tensor | None = None) -> Tensor:
        """Decisions (B,L) for scores (B,L) of any scale; `known` (B,L) marks the images that count."""
        known = torch.ones_like(scores, dtype=torch.bool) if known is None else known
        priors = torch.tensor(self.priors, dtype=torch.float64, device=scores.device)
        check_shapes("PriorMatched", "BL L", scores=scores, priors=priors)
        wanted = (priors * known.sum(0)).round().long()
        ranked = scores.masked_fill(~known, -torch.inf).sort(dim=0, descending=True).values
        last = ranked.gather(0, (wanted - 1).clamp(min=0)[None])
        return (scores >= last) & (wanted > 0) & known


@dataclass(frozen=True, eq=False)
class Given:
    """Decisions (B,L) that were made elsewhere, such as the tags in a file.

    >>> Given(torch.tensor([[True, False]])).decide(torch.zeros(1, 2)).tolist()
    [[True, False]]
    """

    decisions: Tensor
    definition: str = "the tags in the file"  # the rule in words

    def decide(self, scores: Tensor, *, known: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """The decisions (B,L), whatever the scores (B,L)."""
        return self.decisions.to(scores.device)


@dataclass(frozen=True)
class TopK:
    """Each image is given its k highest labels.

    >>> TopK(1).decide(torch.tensor([[0.1, 0.3, 0.2]])).tolist()
    [[False, True, False]]
    """

    k: int = 3

    @property
    def definition(self) -> str:
        """The rule in words."""
        return f"top-{self.k} labels of each image"

    def decide(self, scores: Tensor, *, known: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Decisions (B,L) for scores (B,L) of any scale; exactly k are given, ties or not."""
        if not isinstance(self.k, int) or not 1 <= self.k <= scores.shape[1]:
            raise InputError("TopK", f"k is {self.k} for {scores.shape[1]} labels", "give 1 to the number of labels")
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        return chosen.scatter_(1, scores.topk(self.k, dim=1).indices, value=True)


def check_probabilities(scores: Tensor, where: str) -> None:
    """Refuse scores (B,L) outside [0,1].

    >>> check_probabilities(torch.tensor([[0.5]]), "here")
    """
    low, high = scores.aminmax() if scores.numel() else (scores.new_zeros(()),) * 2
    if low < 0 or high > 1:
        wrong = f"scores from {low.item():.3g} to {high.item():.3g} are no probabilities"
        raise InputError(where, wrong, "apply torch.sigmoid to logits first")
