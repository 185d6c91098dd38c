"""What is fitted after training: lam and temperature, calibration, thresholds, effort; all judged out of fold."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pivotpatch.core.adaptive import Adaptive
from pivotpatch.core.bootstrap import Interval, resample_average_precision
from pivotpatch.core.calibration import Calibration
from pivotpatch.core.metrics import PrecisionRecall, precision_recall
from pivotpatch.errors import InputError, choose_one_of
from pivotpatch.inference.scores import Scores
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.tuning.calibration import (
    CalibrationQuality,
    Method,
    Reliability,
    calibrate_out_of_fold,
    fit_calibration,
    judge_calibration,
    reliability,
)
from pivotpatch.tuning.effort import CloserLook, EffortCurve, effort_curve, fit_adaptive
from pivotpatch.tuning.folds import draw_folds
from pivotpatch.tuning.mixing import MixingStudy, Mixture, choose_mixture, fit_mixing
from pivotpatch.tuning.thresholds import BestF1, FittedThresholds, Goal, fit_thresholds

Mixing = Literal["auto", "keep", "global", "per-label"]
"""Lam and temperature: "auto" fits them and keeps what was scored with where the gain is within noise."""
Scaling = Literal["auto", "none"] | Method
"""Calibration: "auto" takes the method of the least log loss out of fold."""
METHODS: tuple[Method, ...] = get_args(Method)
NONE: Final = "none"
_FOLDS = 5
_BEST_F1 = BestF1()


class MixingChoice(NamedTuple):
    """What was tried of lam and temperature, and what was taken.

    Attributes:
        study: all of it.
        gains: mAP over that of "as scored" out of fold, with its interval, by name of the mixture.
        chosen: the mixture that was taken.
    """

    study: MixingStudy
    gains: Mapping[str, Interval]
    chosen: Mixture

    @property
    def tried(self) -> tuple[Mixture, ...]:
        """The plainest first."""
        return self.study.before, self.study.shared, self.study.per_label

    def to_dict(self) -> dict[str, object]:
        """In plain types, for JSON."""
        study = self.study
        return {
            "chosen": self.chosen.name,
            "tried": {
                each.name: {
                    "lam": _to_plain(each.lam),
                    "temperature": _to_plain(each.temperature),
                    "mAP": each.mean,
                    "gain": asdict(self.gains[each.name]) if each.name in self.gains else None,
                }
                for each in self.tried
            },
            "curve": {"lam": study.lams, "temperature": study.temperatures, "mAP": study.means.tolist()},
        }


@dataclass(frozen=True, eq=False)
class Tuning:
    """What was fitted, and what it is worth on pictures that had no part in the fit.

    Attributes:
        pictures: how many it was fitted to.
        labels: names of the labels.
        kind: of the logits that decide.
        lam: weight of the patches from now on, a number or (L,).
        temperature: of the patch weights, likewise.
        mixing: what was tried of these two; None where they were kept unasked.
        calibration: from now on; None for none.
        qualities: of the probabilities that each method gives, out of fold, by its name; "before" as it was.
        curves: reliability "before" and "after", the latter out of fold.
        thresholds: from now on.
        before: decisions as they were, at 0.5.
        after: decisions by calibration and thresholds that were fitted without the picture's fold.
        adaptive: when one look is enough from now on; None where there are none, or no calibration was wanted:
            then pictures with and without them could not be compared.
        closer_size: of the second look of efforts between 0 and 1; None where it is at the patches.
        effort: what that costs and keeps, out of fold; None likewise.
    """

    pictures: int
    labels: tuple[str, ...]
    kind: str
    lam: float | Tensor
    temperature: float | Tensor
    mixing: MixingChoice | None
    calibration: Calibration | None
    qualities: Mapping[str, CalibrationQuality]
    curves: Mapping[str, Reliability]
    thresholds: FittedThresholds
    before: PrecisionRecall
    after: PrecisionRecall
    adaptive: Adaptive | None
    closer_size: int | None
    effort: EffortCurve | None

    @property
    def method(self) -> str:
        """The name of the calibration."""
        return NONE if self.calibration is None else self.calibration.method

    def store(self, model: Classifier) -> None:
        """Give a network all that was fitted; what was fitted to it before is forgotten."""
        if isinstance(model, PatchClassifier):
            model.set_mixing(lam=self.lam, temperature=self.temperature)
            if self.adaptive is not None:  # else no effort was fitted, and the network's own stays
                model.closer_size = self.closer_size
        model.calibration, model.thresholds, model.adaptive = self.calibration, self.thresholds.values, self.adaptive

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        return {
            "pictures": self.pictures,
            "labels": self.labels,
            "kind": self.kind,
            "lam": _to_plain(self.lam),
            "temperature": _to_plain(self.temperature),
            "mixing": None if self.mixing is None else self.mixing.to_dict(),
            "calibration": {
                "chosen": self.method,
                "fitted": None if self.calibration is None else self.calibration.to_dict(),
                "qualities": {name: quality.to_dict() for name, quality in self.qualities.items()},
            },
            "thresholds": {
                **self.thresholds.to_dict(),
                "decisions": {"before": asdict(self.before), "after": asdict(self.after)},
            },
            "adaptive": None if self.adaptive is None else self.adaptive.to_dict(),
            "closer_size": self.closer_size,
            "effort": None if self.effort is None else self.effort.to_dict(),
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
    """Fit all that can be fitted without the network.

    The folds are the same for all parts, so that what is told of a picture owes nothing to its own target.

    Args:
        scores: of validation pictures. Without patches there is no lam to fit.
        mixing: what to do about lam and temperature.
        calibration: how to calibrate.
        goal: of the thresholds.
        patch_cost: of a picture's patches in passes over an image, see `PatchClassifier.patch_cost`; only told.
        closer: the second look of efforts between 0 and 1, in place of the patches. Its logits are mixed as those of
            the patches, out of fold too; its own patches must have been kept.
        resamples: of the interval of lam's gain.
        generator: draws them.
    """
    kind = scores.ranking
    known = ("auto", NONE, *METHODS)
    if calibration not in known:
        raise InputError("calibration", f"unknown method {calibration!r}", choose_one_of(calibration, known))
    if len(scores) < _FOLDS:
        raise InputError("tune", f"there are {len(scores)} pictures", f"give {_FOLDS} or more; hundreds are usual")
    choice = None
    if kind == "tde" and mixing != "keep":
        choice = _fit_mixing(scores, mixing, resamples=resamples, generator=generator)
    final, honest, target = scores, scores.scaled(kind), scores.target
    if choice is not None and choice.chosen is not choice.study.before:
        temperature = None if scores.patch_logits is None else choice.chosen.temperature
        final, honest = scores.remix(lam=choice.chosen.lam, temperature=temperature), choice.chosen.logits
    probs = {"before": scores.probs(kind), NONE: torch.sigmoid(honest)}
    for method in METHODS:
        if calibration in ("auto", method):
            probs[method] = calibrate_out_of_fold(honest, target, method=method, folds=_FOLDS)
    probs = {name: each.float() for name, each in probs.items()}
    qualities = {name: judge_calibration(each, target, labels=scores.labels) for name, each in probs.items()}
    chosen: Method | None = None
    if calibration == "auto":
        chosen = min((None, *METHODS), key=lambda method: qualities[method or NONE].overall.log_loss)
    elif calibration != NONE:
        chosen = calibration
    fitter = _RuleFitter(kind, chosen, goal, scores.labels)
    rule = fitter.fit(final.scaled(kind), target)
    adaptive = effort = None
    if kind == "tde" and calibration != NONE:
        again = None
        if closer is not None:
            again = closer.scores.remix(lam=final.lam, temperature=final.temperature)
            mixed = again.scaled(kind) if choice is None else choice.chosen.mix(closer.scores)
            closer = closer._replace(scores=_put_logits(again, mixed))
        adaptive = fit_adaptive(final, closer=again, method=chosen)
        effort = effort_curve(
            _put_logits(final, honest), patch_cost=patch_cost, closer=closer, method=chosen, folds=_FOLDS
        )
    return Tuning(
        pictures=len(scores),
        labels=scores.labels,
        kind=kind,
        lam=final.lam,
        temperature=final.temperature,
        mixing=choice,
        calibration=rule.calibration,
        qualities=qualities,
        curves={
            "before": reliability(probs["before"], target),
            "after": reliability(probs[chosen or NONE], target),
        },
        thresholds=rule.thresholds,
        before=precision_recall(probs["before"], target, labels=scores.labels),
        after=precision_recall(fitter.decide_out_of_fold(honest, target).float(), target, labels=scores.labels),
        adaptive=adaptive,
        closer_size=None if closer is None else closer.size,
        effort=effort,
    )


def _put_logits(scores: Scores, mixed: Tensor) -> Scores:
    """Scores whose TDE logits are others (N,L), given in the normalised form."""
    return replace(scores, logits={**scores.logits, "tde": mixed * (1 + scores.lam)})


def _fit_mixing(scores: Scores, mixing: Mixing, *, resamples: int, generator: torch.Generator) -> MixingChoice:
    if mixing not in get_args(Mixing):
        raise InputError("mixing", f"unknown way {mixing!r}", choose_one_of(mixing, get_args(Mixing)))
    study = fit_mixing(scores, folds=_FOLDS)
    before, shared, per_label = study.before, study.shared, study.per_label
    matrices = {each.name: each.logits for each in (before, shared, per_label)}
    drawn = resample_average_precision(matrices, scores.target, resamples=resamples, generator=generator)
    names = {id(logits): name for name, logits in matrices.items()}
    chosen = {"global": shared, "per-label": per_label}.get(mixing) or choose_mixture(
        study, lambda new, old: drawn.bound_mean(names[id(new)], minus=names[id(old)]).low
    )
    gains = {each.name: drawn.bound_mean(each.name, minus=before.name) for each in (shared, per_label)}
    return MixingChoice(study, gains, chosen)


class _Rule(NamedTuple):
    """From logits to decisions."""

    calibration: Calibration | None
    thresholds: FittedThresholds


class _RuleFitter(NamedTuple):
    """Fits calibration and thresholds to logits (N,L) of some pictures."""

    kind: str
    method: Method | None
    goal: Goal
    labels: tuple[str, ...]

    def fit(self, logits: Tensor, target: Tensor) -> _Rule:
        """A rule for all pictures."""
        calibration = None
        if self.method is not None:
            calibration = fit_calibration(logits, target, kind=self.kind, method=self.method)
        probs = _make_probs(logits, calibration)
        return _Rule(calibration, fit_thresholds(probs, target, goal=self.goal, labels=self.labels))

    def decide_out_of_fold(self, logits: Tensor, target: Tensor) -> Tensor:
        """Decisions (N,L), each by a rule that was fitted without the fold that its picture is in."""
        fold = draw_folds(len(logits), folds=_FOLDS)
        decided = torch.zeros_like(target, dtype=torch.bool)
        for number in range(_FOLDS):
            inside = fold == number
            rule = self.fit(logits[~inside], target[~inside])
            decided[inside] = rule.thresholds.policy.decide(_make_probs(logits[inside], rule.calibration))
        return decided


def _make_probs(logits: Tensor, calibration: Calibration | None) -> Tensor:
    return torch.sigmoid(logits) if calibration is None else calibration.apply(logits)


def _to_plain(value: float | Tensor) -> object:
    return value.tolist() if isinstance(value, Tensor) else value
