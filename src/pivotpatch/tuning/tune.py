"""All that is fitted after training, in order: lam and temperature, calibration, thresholds, effort."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pivotpatch.core.metrics import PrecisionRecall, average_precision, precision_recall
from pivotpatch.errors import InputError, check_known
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
    draw_folds,
    fit_calibration,
    judge_calibration,
    reliability,
)
from pivotpatch.tuning.mixing import MixingStudy, count_below, fit_mixing
from pivotpatch.tuning.thresholds import BEST_F1, PREFERRED, FittedThresholds, Goal, fit_thresholds

Mixing = Literal["auto", "keep"]
"""Lam and temperature: "auto" fits them and keeps what was scored with where the gain is within noise."""
Scaling = Literal["auto"] | Method
"""Calibration: "auto" takes the method of the least log loss out of fold."""
EFFORTS = tuple(step / 20 for step in range(21))
"""The efforts that are tried."""
_QUANTILES = 100  # steps of the cutoffs


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
    preferences: Mapping[str, FittedThresholds]  # that `predict --prefer` takes
    before: PrecisionRecall  # decisions as they were, at 0.5
    after: PrecisionRecall  # decisions by calibration and thresholds that were fitted without the image's fold
    preferred: Mapping[str, PrecisionRecall]  # the same of each preference
    # When one look is enough, and what that costs and keeps, out of fold. None without patches or calibration, where
    # images with and without a second look could not be compared.
    adaptive: Adaptive | None
    closer_size: int | None  # of the second look of efforts between 0 and 1; None where it is at the patches
    effort: EffortCurve | None

    @property
    def method(self) -> str:
        """The name of the calibration."""
        return "none" if self.calibration is None else self.calibration.method

    def store(self, model: Classifier) -> None:
        """Give a model all that was fitted; what was fitted to it before is forgotten.

        Where only some of its labels were tuned, the others keep what they have, and so do lam, temperature and the
        cutoffs of efforts, which are common to all: these must be what was tuned with (`mixing="keep"`).
        """
        if self.labels != model.labels:
            for name in self.labels:
                check_known(name, model.labels, where="store", what="label")
            mixing = model.patching if isinstance(model, PatchClassifier) else None
            if mixing is not None and (mixing.lam, mixing.temperature) != (self.lam, self.temperature):
                wrong = f"lam {self.lam:g} and temperature {self.temperature:g} are not those of the model's labels"
                todo = f"tune with the model's, {mixing.lam:g} and {mixing.temperature:g}, by mixing='keep'"
                raise InputError("store", wrong, todo)
            self._store_some(model)
            return
        if isinstance(model, PatchClassifier):
            model.set_mixing(lam=self.lam, temperature=self.temperature)
            if self.adaptive is not None:  # else no effort was fitted, and the model's own stays
                model.patching = replace(model.patching, closer_size=self.closer_size)
        model.calibration, model.thresholds, model.adaptive = self.calibration, self.thresholds.values, self.adaptive
        model.preferences = {name: fitted.values for name, fitted in self.preferences.items()}

    def _store_some(self, model: Classifier) -> None:
        places, adaptive = [model.labels.index(name) for name in self.labels], model.adaptive
        held = model.preferences

        def lay_over(values: Sequence[float], fitted: FittedThresholds) -> tuple[float, ...]:
            numbers = np.array(values)
            numbers[places] = fitted.values
            return tuple(numbers.tolist())

        model.thresholds = lay_over(model.thresholds or (0.5,) * len(model.labels), self.thresholds)
        model.preferences = {name: lay_over(values, self.preferences[name]) for name, values in held.items()}
        model.adaptive = None
        old, new = (  # one that changes nothing, where there is none
            fitted or Calibration(self.kind, "none", (1.0,) * count, (0.0,) * count)
            for fitted, count in ((model.calibration, len(model.labels)), (self.calibration, len(places)))
        )
        model.calibration = _lay_over(old, new, places=places)
        if adaptive is not None and self.adaptive is not None:
            first = _lay_over(adaptive.calibration, self.adaptive.calibration, places=places)
            again = adaptive.again and _lay_over(adaptive.again, self.adaptive.again or new, places=places)
            model.adaptive = replace(adaptive, calibration=first, again=again)

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        decisions = {"before": asdict(self.before), "after": asdict(self.after)}
        return {
            **{name: getattr(self, name) for name in ("pictures", "labels", "kind", "lam", "temperature")},
            "mixing": self.mixing and self.mixing.to_dict(),
            "calibration": {
                "chosen": self.method,
                "fitted": self.calibration and asdict(self.calibration),
                "qualities": {name: asdict(quality) for name, quality in self.qualities.items()},
            },
            "thresholds": {**asdict(self.thresholds), "decisions": decisions},
            "preferences": {
                name: {**asdict(fitted), "decisions": asdict(self.preferred[name])}
                for name, fitted in self.preferences.items()
            },
            "adaptive": self.adaptive and asdict(self.adaptive),
            "closer_size": self.closer_size,
            "effort": self.effort and self.effort.to_dict(),
        }


def tune_scores(
    scores: Scores,
    *,
    mixing: Mixing = "auto",
    calibration: Scaling = "auto",
    goal: Goal | str = BEST_F1,
    model: Classifier | None = None,
    closer: Scores | None = None,
    effort: float = 1.0,
    resamples: int = 1000,
    generator: torch.Generator,
) -> Tuning:
    """Fit all that can be fitted without a forward pass.

    The folds are the same for all parts, so that what is told of an image owes nothing to its own target.

    Args:
        scores: of validation images. Without patches there is no lam to fit.
        mixing: what to do about lam and temperature.
        calibration: how to calibrate.
        goal: of the thresholds; the name of a preference for its own.
        model: that they are of; it says what a second look costs, 4 passes over an image where it is not given.
        closer: of its closer look at the same images (`PatchClassifier.project_closer`), which then is the second
            look of efforts between 0 and 1. It is mixed as the patches are, out of fold too; its own must have been
            kept.
        effort: of the model where none is asked for.
        resamples: of the interval of lam's gain.
        generator: draws them.
    """
    kind, target, labels = scores.ranking, scores.target, scores.labels
    study, final, honest = None, scores, scores
    if kind == "tde" and mixing == "auto":
        study = fit_mixing(scores, resamples=resamples, generator=generator)
        if study.pays:
            final, honest = scores.remix(**study.fitted._asdict()), study.scores
    logits = honest.scaled(kind)
    probs = {"before": scores.probs(kind).float(), "none": honest.probs(kind).float()}
    for method in METHODS[1:]:
        if calibration in ("auto", method):
            probs[method] = calibrate_out_of_fold(logits, target, method=method).float()
    qualities = {name: judge_calibration(each, target) for name, each in probs.items()}
    tried = METHODS if calibration == "auto" else (calibration,)
    chosen = min(tried, key=lambda method: qualities[method].log_loss)

    def fit_rules(logits: Tensor, truth: Tensor) -> tuple[Calibration, dict[str, FittedThresholds]]:
        fitted = fit_calibration(logits, truth, kind=kind, method=chosen)
        fit = partial(fit_thresholds, fitted.apply(logits), truth, labels=labels)
        rules = {name: fit(goal=wanted, shared=True) for name, wanted in PREFERRED.items()}
        return fitted, rules | {"own": rules[goal] if isinstance(goal, str) else fit(goal=goal)}

    fitted, rules = fit_rules(final.scaled(kind), target)
    decided = {name: torch.zeros_like(target) for name in rules}
    for inside in draw_folds(len(scores)):
        calibrated, others = fit_rules(logits[~inside], target[~inside])
        for name, each in others.items():
            decided[name][inside] = each.policy.decide(calibrated.apply(logits[inside])).float()
    judged = {}
    for name, given in decided.items():
        counted = precision_recall(given, target, labels=labels)
        judged[name] = replace(counted, definition="fitted thresholds, out of fold")
    adaptive = curve = None
    if kind == "tde" and calibration != "none":
        adaptive = replace(fit_adaptive(final.get("image"), target), effort=effort)
        if closer is not None:
            again = closer.remix(lam=final.lam, temperature=final.temperature)
            closer = study.mix(closer) if study is not None and study.pays else again
            if chosen != "none":
                own = fit_calibration(again.scaled(kind), target, kind=kind, method=chosen)
                adaptive = replace(adaptive, again=own)
        costs = {"patch_cost": 4.0}
        if isinstance(model, PatchClassifier):
            costs["patch_cost"] = model.patch_cost
            if closer is not None and closer.closer_size is not None:
                costs["closer_cost"] = model.closer_cost(closer.closer_size)
        curve = effort_curve(honest, closer=closer, method=chosen, **costs)
    return Tuning(
        pictures=len(scores),
        labels=labels,
        kind=kind,
        lam=final.lam,
        temperature=final.temperature,
        mixing=study,
        calibration=None if chosen == "none" else fitted,
        qualities=qualities,
        curves={"before": reliability(probs["before"], target), "after": reliability(probs[chosen], target)},
        thresholds=rules.pop("own"),
        preferences=rules,
        before=precision_recall(probs["before"], target, labels=labels),
        after=judged.pop("own"),
        preferred=judged,
        adaptive=adaptive,
        closer_size=None if closer is None else closer.closer_size,
        effort=curve,
    )


def _lay_over(old: Calibration, new: Calibration, *, places: list[int]) -> Calibration:
    """The calibration `old` with that of some labels, `new`, at their places."""
    slope, offset = np.array(old.slope), np.array(old.offset)
    slope[places], offset[places] = new.slope, new.offset
    return replace(new, slope=tuple(slope.tolist()), offset=tuple(offset.tolist()))


def fit_adaptive(logits: Tensor, target: Tensor) -> Adaptive:
    """Fit the calibration of image logits (N,L) and the quantiles of their uncertainty: an effort becomes a cutoff."""
    calibration = fit_calibration(logits, target, kind="image")
    return Adaptive(calibration, find_cutoffs(calibration.apply(logits)))


def find_cutoffs(probs: Tensor) -> tuple[float, ...]:
    """Quantiles of the uncertainty of images, from probs (N,L): those of `Adaptive`."""
    uncertainty = measure_uncertainty(probs).double()
    cutoffs = uncertainty.quantile(torch.linspace(0, 1, _QUANTILES + 1, dtype=torch.float64))
    return tuple(cutoffs.cummax(0).values.tolist())  # rounding may make a step back


def effort_curve(
    scores: Scores,
    *,
    patch_cost: float,
    closer: Scores | None = None,
    closer_cost: float = 0.0,
    method: Method = "platt_per_label",
) -> EffortCurve:
    """MAP and cost of `EFFORTS`, as if the images were new; no forward pass is made.

    Both calibrations and the cutoffs are fitted without a fold and rank all images. An image of that fold keeps its
    rank there, and the ranks of all folds together are judged: fits differ in scale, their ranks do not.

    Args:
        scores: of validation images, with image and TDE logits.
        patch_cost: of all patches of an image, in passes over an image, see `PatchClassifier.patch_cost`.
        closer: the second look of efforts between 0 and 1, where it is not at the patches.
        closer_cost: of that look.
        method: how TDE logits of the second look are calibrated.
    """
    image, tde, target = scores.get("image"), scores.scaled("tde"), scores.target
    again, cost = (tde, patch_cost) if closer is None else (closer.scaled("tde"), closer_cost)
    inner = EFFORTS[1:-1]
    ranks = torch.empty(len(inner), *image.shape, dtype=torch.int64)
    looked = torch.empty(len(inner), len(scores), dtype=torch.bool)
    for inside in draw_folds(len(scores)):
        adaptive = fit_adaptive(image[~inside], target[~inside])
        fitted = fit_calibration(again[~inside], target[~inside], kind="tde", method=method)
        alone, both = adaptive.calibration.apply(image), fitted.apply(again)
        for row, effort in enumerate(inner):
            chosen = adaptive.choose(alone, effort)
            probs = torch.where(chosen[:, None], both, alone).T
            ranks[row, inside], looked[row, inside] = count_below(probs[:, inside], probs).T, chosen[inside]
    shares = looked.double().mean(1).tolist()
    points = [
        EffortPoint(effort, share, 1 + share * cost, average_precision(order.double(), target).mean)
        for effort, share, order in zip(inner, shares, ranks, strict=True)
    ]
    first = EffortPoint(0.0, 0.0, 1.0, average_precision(image, target).mean)
    last = EffortPoint(1.0, 1.0, 1 + patch_cost, average_precision(tde, target).mean)
    return EffortCurve((first, *points, last), closer=closer is not None)
