"""Adaptive inference fitted on validation scores; what each effort costs, and what it keeps of the patches' gain."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pivotpatch.core.adaptive import Adaptive, check_effort, measure_uncertainty
from pivotpatch.core.metrics import average_precision
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores
from pivotpatch.tuning.calibration import Method, fit_calibration
from pivotpatch.tuning.folds import draw_folds

EFFORTS = tuple(step / 20 for step in range(21))
"""The efforts that are tried."""
_STEPS = 100  # of the quantiles


def fit_adaptive(scores: Scores, *, closer: Scores | None = None, method: Method | None = None) -> Adaptive:
    """Fit the image's own calibration and the quantiles of its uncertainty, by which an effort finds its cutoff.

    Args:
        scores: of validation pictures; only targets and image logits count.
        closer: of a closer look at the same pictures, where there is one; its TDE logits are calibrated, too.
        method: how; None where TDE logits are not calibrated.
    """
    logits = scores.get("image")
    calibration = fit_calibration(logits, scores.target, kind="image")
    again = None
    if closer is not None and method is not None:
        again = fit_calibration(closer.scaled("tde"), closer.target, kind="tde", method=method)
    return Adaptive(calibration, find_cutoffs(calibration.apply(logits)), again)


def find_cutoffs(probs: Tensor) -> tuple[float, ...]:
    """Quantiles of the uncertainty of pictures, from probs (N,L): those of `Adaptive`."""
    uncertainty = measure_uncertainty(probs).double()
    cutoffs = uncertainty.quantile(torch.linspace(0, 1, _STEPS + 1, dtype=torch.float64))
    return tuple(cutoffs.cummax(0).values.tolist())  # rounding may make a step back


class CloserLook(NamedTuple):
    """What a network says of pictures that it sees once more, larger: `PatchClassifier.look_closer`.

    Attributes:
        size: rows and columns at which it sees them.
        cost: of that look, in passes over an image.
        scores: of the same pictures as those of the first look, in their order.
    """

    size: int
    cost: float
    scores: Scores


class EffortPoint(NamedTuple):
    """What an effort costs and gives.

    Attributes:
        effort: as asked for.
        share: of the pictures that got a second look, which the effort aims at.
        passes: mean cost of a picture, in passes over an image.
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
        points: of rising effort; the first is 0, the image alone, and the last 1, the patches of every picture.
        closer: whether the others take a closer look, and not one at the patches.
    """

    points: tuple[EffortPoint, ...]
    closer: bool = False

    @property
    def gain(self) -> float:
        """What the patches of every picture add to mAP."""
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
    folds: int = 5,
    generator: torch.Generator | None = None,
) -> EffortCurve:
    """MAP and cost of efforts, as if the pictures were new; no network is asked.

    Both calibrations and the cutoffs are fitted without a fold and put all pictures in order. A picture of that fold
    keeps its place there, and the places of all folds together are judged: fits differ in scale, their places do not.

    Args:
        scores: of validation pictures, with image and TDE logits.
        efforts: to try, besides 0 and 1.
        patch_cost: of all patches of a picture, in passes over an image, see `PatchClassifier.patch_cost`.
        closer: the second look of efforts between 0 and 1, where it is not at the patches.
        method: how TDE logits of the second look are calibrated; None where they are not, being right as they are.
        folds: into which pictures are parted.
        generator: draws the folds; by default one of seed 0.
    """
    for effort in efforts:
        check_effort(effort, "effort_curve")
    if not 0 <= patch_cost < float("inf"):
        raise InputError("effort_curve", f"patch_cost is {patch_cost!r}", "give a number of passes")
    image, tde = scores.get("image"), scores.scaled("tde")
    look, cost = (scores, patch_cost) if closer is None else (_check_closer(closer, scores).scores, closer.cost)
    again = look.scaled("tde")
    inner = sorted(set(efforts) - {0, 1})
    fold = draw_folds(len(scores), folds=folds, generator=generator)
    places = torch.empty(len(inner), *image.shape, dtype=torch.int64)
    looked = torch.empty(len(inner), len(scores), dtype=torch.bool)
    for number in range(folds):
        inside = fold == number
        others = (~inside).nonzero()[:, 0]
        adaptive, rest = fit_adaptive(scores.select(others)), look.select(others)
        alone, both = adaptive.calibration.apply(image), torch.sigmoid(again)
        if method is not None:
            both = fit_calibration(rest.scaled("tde"), rest.target, kind="tde", method=method).apply(again)
        for row, effort in enumerate(inner):
            chosen = adaptive.choose(alone, effort)
            probs = torch.where(chosen[:, None], both, alone)
            places[row, inside], looked[row, inside] = _rank(probs, inside), chosen[inside]
    shares = looked.double().mean(1).tolist()
    ranked = [(0.0, 0.0, image), *zip(inner, shares, places, strict=True), (1.0, 1.0, tde)]
    points = (
        EffortPoint(
            effort,
            share,
            1 + share * (patch_cost if effort == 1 else cost),
            average_precision(order.double(), scores.target).mean,
        )
        for effort, share, order in ranked
    )
    return EffortCurve(tuple(points), closer=closer is not None)


def _check_closer(closer: CloserLook, scores: Scores) -> CloserLook:
    if closer.scores.pictures != scores.pictures or closer.scores.labels != scores.labels:
        raise InputError("effort_curve", "the closer look is at other pictures or labels", "score the same ones")
    return closer


def _rank(probs: Tensor, rows: Tensor) -> Tensor:
    """Places (M,L) of some rows of probs (N,L) among all, label by label; equal ones share theirs."""
    ordered = torch.from_numpy(np.sort(probs.T.contiguous().numpy()))  # torch would sort indices along, slower
    return torch.searchsorted(ordered, probs[rows].T.contiguous()).T
