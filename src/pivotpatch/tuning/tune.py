"""All that is fitted after training, in order: lam and temperature, calibration, thresholds, effort."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from pivotpatch.core.adaptive import Adaptive
from pivotpatch.core.calibration import Calibration
from pivotpatch.core.metrics import PrecisionRecall, precision_recall
from pivotpatch.inference.scores import Scores
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.tuning.calibration import (
    METHODS,
    CalibrationQuality,
    Method,
    Reliability,
    calibrate_out_of_fold,
    fit_calibration,
    judge_calibration,
    reliability,
)
from pivotpatch.tuning.effort import CloserLook, EffortCurve, effort_curve, fit_adaptive
from pivotpatch.tuning.folds import FOLDS, draw_folds
from pivotpatch.tuning.mixing import MixingStudy, fit_mixing
from pivotpatch.tuning.thresholds import BestF1, FittedThresholds, Goal, fit_thresholds

Mixing = Literal["auto", "keep", "global"]
"""Lam and temperature: "auto" fits them and keeps what was scored with where the gain is within noise."""
Scaling = Literal["auto", "none"] | Method
"""Calibration: "auto" takes the method of the least log loss out of fold."""
NONE: Final = "none"
_BEST_F1 = BestF1()


@dataclass(frozen=True, eq=False)
class Tuning:
    """What was fitted, and what it is worth on images that had no part in the fit.

    Attributes:
        pictures: number of images that it was fitted to.
        labels: names of the labels.
        kind: of the logits that decide.
        lam: weight of the patches from now on.
        temperature: of the patch weights from now on.
        mixing: what was tried of these two; None where they were kept unasked.
        calibration: from now on; None for none.
        qualities: of the probabilities that each method gives, out of fold, by its name; "before" as it was.
        curves: reliability "before" and "after", the latter out of fold.
        thresholds: from now on.
        before: decisions as they were, at 0.5.
        after: decisions by calibration and thresholds that were fitted without the image's fold.
        adaptive: when one look is enough from now on; None without patches or calibration: then images with and
            without a second look could not be compared.
        closer_size: of the second look of efforts between 0 and 1; None where it is at the patches.
        effort: what that costs and keeps, out of fold; None likewise.
    """

    pictures: int
    labels: tuple[str, ...]
    kind: str
    lam: float
    temperature: float
    mixing: MixingStudy | None
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
        """Give a model all that was fitted; what was fitted to it before is forgotten."""
        if isinstance(model, PatchClassifier):
            model.set_mixing(lam=self.lam, temperature=self.temperature)
            if self.adaptive is not None:  # else no effort was fitted, and the model's own stays
                model.closer_size = self.closer_size
        model.calibration, model.thresholds, model.adaptive = self.calibration, self.thresholds.values, self.adaptive

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        return {
            "pictures": self.pictures,
            "labels": self.labels,
            "kind": self.kind,
            "lam": self.lam,
            "temperature": self.temperature,
            "mixing": None if self.mixing is None else self.mixing.to_dict(),
            "calibration": {
                "chosen": self.method,
                "fitted": None if self.calibration is None else self.calibration.to_dict(),
                "qualities": {name: asdict(quality) for name, quality in self.qualities.items()},
            },
            "thresholds": {
                **asdict(self.thresholds),
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
    kind, target = scores.ranking, scores.target
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
    qualities = {name: judge_calibration(each, target, labels=scores.labels) for name, each in probs.items()}
    chosen: Method | None = None
    if calibration == "auto":
        chosen = min((None, *METHODS), key=lambda method: qualities[method or NONE].overall.log_loss)
    elif calibration != NONE:
        chosen = calibration
    rule = _fit_rule(final.scaled(kind), target, kind=kind, method=chosen, goal=goal, labels=scores.labels)
    decided = torch.zeros_like(target)
    fold = draw_folds(len(scores))
    for number in range(FOLDS):
        inside = fold == number
        other = _fit_rule(honest[~inside], target[~inside], kind=kind, method=chosen, goal=goal, labels=scores.labels)
        decided[inside] = other.decide(honest[inside]).float()
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
        labels=scores.labels,
        kind=kind,
        lam=float(final.lam),
        temperature=float(final.temperature),
        mixing=study,
        calibration=rule.calibration,
        qualities=qualities,
        curves={"before": reliability(probs["before"], target), "after": reliability(probs[chosen or NONE], target)},
        thresholds=rule.thresholds,
        before=precision_recall(probs["before"], target, labels=scores.labels),
        after=precision_recall(decided, target, labels=scores.labels),
        adaptive=adaptive,
        closer_size=None if closer is None else closer.size,
        effort=effort,
    )


def _put_logits(scores: Scores, mixed: Tensor) -> Scores:
    """Scores whose TDE logits are others (N,L), given in the normalised form."""
    return replace(scores, logits={**scores.logits, "tde": mixed * (1 + scores.lam)})


class _Rule(NamedTuple):
    """From logits to decisions."""

    calibration: Calibration | None
    thresholds: FittedThresholds

    def decide(self, logits: Tensor) -> Tensor:
        """Decisions (N,L) on logits (N,L)."""
        return self.thresholds.policy.decide(_make_probs(logits, self.calibration))


def _fit_rule(
    logits: Tensor, target: Tensor, *, kind: str, method: Method | None, goal: Goal, labels: tuple[str, ...]
) -> _Rule:
    """Calibration and thresholds of logits (N,L)."""
    calibration = None if method is None else fit_calibration(logits, target, kind=kind, method=method)
    return _Rule(calibration, fit_thresholds(_make_probs(logits, calibration), target, goal=goal, labels=labels))


def _make_probs(logits: Tensor, calibration: Calibration | None) -> Tensor:
    return torch.sigmoid(logits) if calibration is None else calibration.apply(logits)
