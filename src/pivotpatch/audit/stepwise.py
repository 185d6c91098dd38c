"""Step by step from image logits to the total direct effect, and what of it is due to the larger view alone."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from pivotpatch.audit.evaluation import check_paired
from pivotpatch.core.bootstrap import Interval, resample_average_precision
from pivotpatch.core.metrics import Definition, average_precision
from pivotpatch.inference.scores import Scores


class LabelSteps(NamedTuple):
    """Average precision of a label by image logits p, patch logits q and p + lam q; `gain` over the better part."""

    label: str
    positives: int
    image: float
    patch: float
    tde: float
    gain: float


@dataclass(frozen=True)
class StepwiseEvaluation:
    """The paper's step-wise evaluation; labels without a positive image are skipped."""

    definition: Definition
    steps: tuple[LabelSteps, ...]
    skipped: tuple[str, ...]

    @property
    def mean(self) -> dict[str, float]:
        """MAP of each kind of logits, and the mean gain."""
        kinds = ("image", "patch", "tde", "gain")
        return {kind: sum(getattr(step, kind) for step in self.steps) / len(self.steps) for kind in kinds}

    @property
    def share_gained(self) -> float:
        """Part of the labels whose gain is above 0."""
        return sum(step.gain > 0 for step in self.steps) / len(self.steps)

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        summary = {"definition": self.definition, "mean": self.mean, "share_gained": self.share_gained}
        return {**summary, "skipped": self.skipped, "labels": [step._asdict() for step in self.steps]}


@dataclass(frozen=True)
class ScaleStudy:
    """A row of the paper's study of image scale: do larger views alone explain the gain?

    Attributes:
        patch: mAP of the patch logits of a model that was trained on patches alone.
        tde: mAP of the TDE logits of PAT-T.
        difference: TDE less patch, with the interval of a paired bootstrap over the images.
        labels: those that have a positive image; their average precisions follow.
    """

    definition: Definition
    patch: float
    tde: float
    difference: Interval
    labels: tuple[str, ...]
    patch_per_label: tuple[float, ...]
    tde_per_label: tuple[float, ...]


def evaluate_steps(scores: Scores, *, definition: Definition = "step") -> StepwiseEvaluation:
    """Average precision of image, patch and TDE logits, label by label."""
    image, patch, tde = (
        average_precision(scores.get(kind), scores.target, definition=definition, labels=scores.labels)
        for kind in ("image", "patch", "tde")
    )
    rows = zip(scores.labels, tde.positives, image.per_label, patch.per_label, tde.per_label, strict=True)
    steps = tuple(
        LabelSteps(label, count, p, q, both, gain=both - max(p, q))
        for label, count, p, q, both in rows
        if p is not None and q is not None and both is not None
    )
    return StepwiseEvaluation(tde.definition, steps, tde.skipped)


def study_scale(
    scores: Scores,
    patch_only: Scores,
    *,
    definition: Definition = "step",
    resamples: int = 1000,
    generator: torch.Generator,
) -> ScaleStudy:
    """TDE logits of PAT-T beside the patch logits of a model that never saw a whole image.

    Args:
        scores: of PAT-T, with "tde" logits.
        patch_only: of the other model (task `patch_only`), with "patch" logits of the same images.
        definition: of average precision.
        resamples: of the bootstrap.
        generator: draws them.
    """
    check_paired(scores, patch_only)
    logits = {"tde": scores.get("tde"), "patch": patch_only.get("patch")}
    drawn = resample_average_precision(
        logits, scores.target, resamples=resamples, definition=definition, generator=generator
    )
    known = ~drawn.measured["tde"].isnan()
    patch, tde = drawn.measured["patch"][known], drawn.measured["tde"][known]
    return ScaleStudy(
        definition,
        patch.mean().item(),
        tde.mean().item(),
        drawn.bound_mean("tde", minus="patch"),
        tuple(label for label, kept in zip(scores.labels, known.tolist(), strict=True) if kept),
        tuple(patch.tolist()),
        tuple(tde.tolist()),
    )
