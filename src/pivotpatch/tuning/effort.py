"""Adaptive inference fitted on validation scores; what each effort costs, and how much of the gain it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pivotpatch.core.adaptive import Adaptive, measure_uncertainty
from pivotpatch.core.metrics import average_precision
from pivotpatch.inference.scores import Scores
from pivotpatch.tuning.calibration import Method, fit_calibration
from pivotpatch.tuning.folds import FOLDS, draw_folds, rank_among

EFFORTS = tuple(step / 20 for step in range(21))
"""The efforts that are tried."""
_STEPS = 100  # of the quantiles


def fit_adaptive(scores: Scores, *, closer: Scores | None = None, method: Method | None = None) -> Adaptive:
    """Fit the calibration of the image logits and the quantiles of their uncertainty, which turn an effort to a cutoff.

    Args:
        scores: of validation images; only targets and image logits count.
        closer: of a closer look at the same images, where there is one; its TDE logits are calibrated, too.
        method: how; None where TDE logits are not calibrated.
    """
    logits = scores.get("image")
    calibration = fit_calibration(logits, scores.target, kind="image")
    again = None
    if closer is not None and method is not None:
        again = fit_calibration(closer.scaled("tde"), closer.target, kind="tde", method=method)
    return Adaptive(calibration, find_cutoffs(calibration.apply(logits)), again)


def find_cutoffs(probs: Tensor) -> tuple[float, ...]:
    """Quantiles of the uncertainty of images, from probs (N,L): those of `Adaptive`."""
    uncertainty = measure_uncertainty(probs).double()
    cutoffs = uncertainty.quantile(torch.linspace(0, 1, _STEPS + 1, dtype=torch.float64))
    return tuple(cutoffs.cummax(0).values.tolist())  # rounding may make a step back


class CloserLook(NamedTuple):
    """What a model says of images that it sees once more, larger: `PatchClassifier.look_closer`.

    Attributes:
        size: rows and columns at which it sees them.
        cost: of that look, in passes over an image.
        scores: of the same images as those of the first look, in their order.
    """

    size: int
    cost: float
    scores: Scores


class EffortPoint(NamedTuple):
    """What an effort costs and gives.

    Attributes:
        effort: as asked for.
        share: of the images that got a second look, which the effort aims at.
        passes: mean cost per image, in passes over an image.
        mean: mAP (step-wise AP).
    """

    effort: float
    share: float
    passes: float
    mean: float


@dataclass(frozen=True)
class EffortCurve:
    """mAP against cost.

    Attributes:
        points: of rising effort; the first is 0, the image alone, and the last 1, the patches of every image.
        closer: whether the others take a closer look, and not one at the patches.
    """

    points: tuple[EffortPoint, ...]
    closer: bool = False

    @property
    def gain(self) -> float:
        """What the patches of every image add to mAP."""
        return self.points[-1].mean - self.points[0].mean

    def find(self, kept: float) -> EffortPoint | None:
        """The cheapest point that keeps a share of the gain; None where patches gain nothing."""
        if self.gain <= 0:
            return None
        enough = (point for point in self.points if point.mean - self.points[0].mean >= kept * self.gain)
        return min(enough, key=lambda point: point.passes)  # not the first: a closer look may cost more than patches

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        return {"gain": self.gain, "points": [point._asdict() for point in self.points]}


def effort_curve(
    scores: Scores,
    efforts: Sequence[float] = EFFORTS,
    *,
    patch_cost: float,
    closer: CloserLook | None = None,
    method: Method | None = "platt_per_label",
) -> EffortCurve:
    """MAP and cost of efforts, as if the images were new; no forward pass is made.

    Both calibrations and the cutoffs are fitted without a fold and rank all images. An image of that fold keeps its
    rank there, and the ranks of all folds together are judged: fits differ in scale, their ranks do not.

    Args:
        scores: of validation images, with image and TDE logits.
        efforts: to try, besides 0 and 1.
        patch_cost: of all patches of an image, in passes over an image, see `PatchClassifier.patch_cost`.
        closer: the second look of efforts between 0 and 1, where it is not at the patches.
        method: how TDE logits of the second look are calibrated; None where they are not, being right as they are.
    """
    image, tde = scores.get("image"), scores.scaled("tde")
    look, cost = (scores, patch_cost) if closer is None else (closer.scores, closer.cost)
    assert look.pictures == scores.pictures
    again = look.scaled("tde")
    inner = sorted(set(efforts) - {0, 1})
    fold = draw_folds(len(scores))
    ranks = torch.empty(len(inner), *image.shape, dtype=torch.int64)
    looked = torch.empty(len(inner), len(scores), dtype=torch.bool)
    for number in range(FOLDS):
        inside, others = fold == number, (fold != number).nonzero()[:, 0]
        adaptive, rest = fit_adaptive(scores.select(others)), look.select(others)
        alone, both = adaptive.calibration.apply(image), torch.sigmoid(again)
        if method is not None:
            both = fit_calibration(rest.scaled("tde"), rest.target, kind="tde", method=method).apply(again)
        for row, effort in enumerate(inner):
            chosen = adaptive.choose(alone, effort)
            probs = torch.where(chosen[:, None], both, alone)
            ranks[row, inside], looked[row, inside] = rank_among(probs, inside), chosen[inside]
    shares = looked.double().mean(1).tolist()
    points = [
        EffortPoint(effort, share, 1 + share * cost, average_precision(order.double(), scores.target).mean)
        for effort, share, order in zip(inner, shares, ranks, strict=True)
    ]
    first = EffortPoint(0.0, 0.0, 1.0, average_precision(image, scores.target).mean)
    last = EffortPoint(1.0, 1.0, 1 + patch_cost, average_precision(tde, scores.target).mean)
    return EffortCurve((first, *points, last), closer=closer is not None)
