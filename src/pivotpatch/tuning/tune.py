"""All that is fitted after training, in order: lam and temperature, calibration, thresholds, effort."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from pivotpatch.core.metrics import PrecisionRecall, average_precision, precision_recall
from pivotpatch.inference.scores import Scores
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.values import Adaptive, Calibration, measure_uncertainty
from pivotpatch.tuning.calibration import (
    METHODS,
    CalibrationQuality,
    Method,
    Reliability,
    calibrate_out_of_fold,
    fit_calibration,
    judge_calibration,
    reliability,
    split_folds,
)
from pivotpatch.tuning.mixing import MixingStudy, fit_mixing, rank_among
from pivotpatch.tuning.thresholds import BestF1, FittedThresholds, Goal, fit_thresholds

Mixing = Literal["auto", "keep", "global"]
"""Lam and temperature: "auto" fits them and keeps what was scored with where the gain is within noise."""
Scaling = Literal["auto", "none"] | Method
"""Calibration: "auto" takes the method of the least log loss out of fold."""
NONE: Final = "none"
EFFORTS = tuple(step / 20 for step in range(21))
"""The efforts that are tried."""
_BEST_F1 = BestF1()
_QUANTILES = 100  # steps of the cutoffs


class CloserLook(NamedTuple):
    """What a model says of images that it sees once more, larger: `PatchClassifier.look_closer`."""

    size: int  # rows and columns at which it sees them
    cost: float  # of that look, in passes over an image
    scores: Scores  # of the same images as those of the first look, in their order


class EffortPoint(NamedTuple):
    """An effort, the share of images with a second look, the mean cost in passes over an image, and the mAP."""

    effort: float
    share: float
    passes: float
    mean: float


@dataclass(frozen=True)
class EffortCurve:
    """mAP against cost."""

    points: tuple[EffortPoint, ...]  # from effort 0, the image alone, to 1, the patches of every image
    closer: bool = False  # whether the others take a closer look, and not one at the patches

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

    def __str__(self) -> str:
        found, gain = self.find(0.9), f"{100 * self.gain:+.2f} mAP"
        if found is not None:
            cost = f"{found.passes:.2f} passes over an image instead of {self.points[-1].passes:.2f}"
            return f"{found.effort:.2f} keeps 90 % of the patches' gain ({gain}) at {cost}"
        return f"the patches gain nothing ({gain}), so that 0 does as well as 1"

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        return {"gain": self.gain, "points": [point._asdict() for point in self.points]}


@dataclass(frozen=True, eq=False)
class Tuning:
    """What was fitted, and what it is worth on images that had no part in the fit."""

    pictures: int  # number of images that it was fitted to
    labels: tuple[str, ...]
    kind: str  # of the logits that decide
    lam: float  # weight of the patches from now on
    temperature: float  # of the patch weights from now on
    mixing: MixingStudy | None  # what was tried of these two; None where they were kept unasked
    calibration: Calibration | None  # from now on; None for none
    qualities: Mapping[str, CalibrationQuality]  # of each method's probabilities, out of fold; "before" as it was
    curves: Mapping[str, Reliability]  # "before" and "after", the latter out of fold
    thresholds: FittedThresholds  # from now on
    before: PrecisionRecall  # decisions as they were, at 0.5
    after: PrecisionRecall  # decisions by calibration and thresholds that were fitted without the image's fold
    # When one look is enough, and what that costs and keeps, out of fold. None without patches or calibration, where
    # images with and without a second look could not be compared.
    adaptive: Adaptive | None
    closer_size: int | None  # of the second look of efforts between 0 and 1; None where it is at the patches
    effort: EffortCurve | None

    @property
    def method(self) -> str:
        """The name of the calibration."""
        return NONE if self.calibration is None else self.calibration.method

    def store(self, model: Classifier) -> None:
        """Give a model all that was fitted; what was fitted to it before is forgotten."""
        if isinstance(model, PatchClassifier):
            model.set_mixing(lam=self.lam, temperature=self.temperature)
            if self.adaptive is not None:  # else no effort was fitted, and the model's own stays
                model.closer_size = self.closer_size
        model.calibration, model.thresholds, model.adaptive = self.calibration, self.thresholds.values, self.adaptive

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        decisions = {"before": asdict(self.before), "after": asdict(self.after)}
        return {
            **{name: getattr(self, name) for name in ("pictures", "labels", "kind", "lam", "temperature")},
            "mixing": self.mixing and self.mixing.to_dict(),
            "calibration": {
                "chosen": self.method,
                "fitted": self.calibration and self.calibration.to_dict(),
                "qualities": {name: asdict(quality) for name, quality in self.qualities.items()},
            },
            "thresholds": {**asdict(self.thresholds), "decisions": decisions},
            "adaptive": self.adaptive and self.adaptive.to_dict(),
            "closer_size": self.closer_size,
            "effort": self.effort and self.effort.to_dict(),
        }


def tune_scores(
    scores: Scores,
    *,
    mixing: Mixing = "auto",
    calibration: Scaling = "auto",
    goal: Goal = _BEST_F1,
    patch_cost: float = 4.0,
    closer: CloserLook | None = None,
    resamples: int = 1000,
    generator: torch.Generator,
) -> Tuning:
    """Fit all that can be fitted without a forward pass.

    The folds are the same for all parts, so that what is told of an image owes nothing to its own target.

    Args:
        scores: of validation images. Without patches there is no lam to fit.
        mixing: what to do about lam and temperature.
        calibration: how to calibrate.
        goal: of the thresholds.
        patch_cost: of an image's patches in passes over an image, see `PatchClassifier.patch_cost`; only told.
        closer: the second look of efforts between 0 and 1, in place of the patches. Its logits are mixed as those of
            the patches, out of fold too; its own patches must have been kept.
        resamples: of the interval of lam's gain.
        generator: draws them.
    """
    kind, target, labels = scores.ranking, scores.target, scores.labels
    study, final, honest = None, scores, scores.scaled(kind)
    if kind == "tde" and mixing != "keep":
        study = fit_mixing(scores, resamples=resamples, generator=generator)
        if mixing == "global":
            study = replace(study, chosen=study.shared)
        if study.chosen is study.shared:
            temperature = None if scores.patch_logits is None else study.shared.temperature
            final, honest = scores.remix(lam=study.shared.lam, temperature=temperature), study.shared.logits
    probs = {"before": scores.probs(kind).float(), NONE: torch.sigmoid(honest).float()}
    for method in METHODS:
        if calibration in ("auto", method):
            probs[method] = calibrate_out_of_fold(honest, target, method=method).float()
    qualities = {name: judge_calibration(each, target, labels=labels) for name, each in probs.items()}
    chosen: Method | None = None
    if calibration == "auto":
        chosen = min((None, *METHODS), key=lambda method: qualities[method or NONE].overall.log_loss)
    elif calibration != NONE:
        chosen = calibration

    def fit_rule(logits: Tensor, truth: Tensor) -> _Rule:
        fitted = None if chosen is None else fit_calibration(logits, truth, kind=kind, method=chosen)
        return _Rule(fitted, fit_thresholds(_make_probs(logits, fitted), truth, goal=goal, labels=labels))

    rule, decided = fit_rule(final.scaled(kind), target), torch.zeros_like(target)
    for inside, others in split_folds(len(scores)):
        fitted, thresholds = fit_rule(honest[others], target[others])
        decided[inside] = thresholds.policy.decide(_make_probs(honest[inside], fitted)).float()
    adaptive = effort = None
    if kind == "tde" and calibration != NONE:
        again = None
        if closer is not None:
            again = closer.scores.remix(lam=final.lam, temperature=final.temperature)
            mixed = again.scaled(kind) if study is None else study.chosen.mix(closer.scores)
            closer = closer._replace(scores=_put_logits(again, mixed))
        adaptive = fit_adaptive(final, closer=again, method=chosen)
        effort = effort_curve(_put_logits(final, honest), patch_cost=patch_cost, closer=closer, method=chosen)
    return Tuning(
        pictures=len(scores),
        labels=labels,
        kind=kind,
        lam=float(final.lam),
        temperature=float(final.temperature),
        mixing=study,
        calibration=rule.calibration,
        qualities=qualities,
        curves={"before": reliability(probs["before"], target), "after": reliability(probs[chosen or NONE], target)},
        thresholds=rule.thresholds,
        before=precision_recall(probs["before"], target, labels=labels),
        after=precision_recall(decided, target, labels=labels),
        adaptive=adaptive,
        closer_size=None if closer is None else closer.size,
        effort=effort,
    )


class _Rule(NamedTuple):
    """From logits to decisions."""

    calibration: Calibration | None
    thresholds: FittedThresholds


def _make_probs(logits: Tensor, calibration: Calibration | None) -> Tensor:
    return torch.sigmoid(logits) if calibration is None else calibration.apply(logits)


def _put_logits(scores: Scores, mixed: Tensor) -> Scores:
    """Scores whose TDE logits are others (N,L), given in the normalised form."""
    return replace(scores, logits={**scores.logits, "tde": mixed * (1 + scores.lam)})


def fit_adaptive(scores: Scores, *, closer: Scores | None = None, method: Method | None = None) -> Adaptive:
    """Fit the calibration of the image logits and the quantiles of their uncertainty, which turn an effort to a cutoff.

    Args:
        scores: of validation images; only targets and image logits count.
        closer: of a closer look at the same images, where there is one; its TDE logits are calibrated, too.
        method: how; None where TDE logits are not calibrated.
    """
    logits = scores.get("image")
    calibration, again = fit_calibration(logits, scores.target, kind="image"), None
    if closer is not None and method is not None:
        again = fit_calibration(closer.scaled("tde"), closer.target, kind="tde", method=method)
    return Adaptive(calibration, find_cutoffs(calibration.apply(logits)), again)


def find_cutoffs(probs: Tensor) -> tuple[float, ...]:
    """Quantiles of the uncertainty of images, from probs (N,L): those of `Adaptive`."""
    uncertainty = measure_uncertainty(probs).double()
    cutoffs = uncertainty.quantile(torch.linspace(0, 1, _QUANTILES + 1, dtype=torch.float64))
    return tuple(cutoffs.cummax(0).values.tolist())  # rounding may make a step back


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
    image, tde, target = scores.get("image"), scores.scaled("tde"), scores.target
    look, cost = (scores, patch_cost) if closer is None else (closer.scores, closer.cost)
    assert look.pictures == scores.pictures
    again, inner = look.scaled("tde"), sorted(set(efforts) - {0, 1})
    ranks = torch.empty(len(inner), *image.shape, dtype=torch.int64)
    looked = torch.empty(len(inner), len(scores), dtype=torch.bool)
    for inside, others in split_folds(len(scores)):
        adaptive = fit_adaptive(scores.select(others))
        fitted = None
        if method is not None:
            fitted = fit_calibration(again[others], look.target[others], kind="tde", method=method)
        alone, both = adaptive.calibration.apply(image), _make_probs(again, fitted)
        for row, effort in enumerate(inner):
            chosen = adaptive.choose(alone, effort)
            probs = torch.where(chosen[:, None], both, alone)
            ranks[row, inside], looked[row, inside] = rank_among(probs, inside), chosen[inside]
    shares = looked.double().mean(1).tolist()
    points = [
        EffortPoint(effort, share, 1 + share * cost, average_precision(order.double(), target).mean)
        for effort, share, order in zip(inner, shares, ranks, strict=True)
    ]
    first = EffortPoint(0.0, 0.0, 1.0, average_precision(image, target).mean)
    last = EffortPoint(1.0, 1.0, 1 + patch_cost, average_precision(tde, target).mean)
    return EffortCurve((first, *points, last), closer=closer is not None)
