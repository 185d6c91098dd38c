"""Step by step from image logits to the total direct effect, and what of it is due to the larger view alone."""

from dataclasses import asdict, dataclass

import torch

from pivotpatch.core.bootstrap import Interval, resample_average_precision
from pivotpatch.core.metrics import Definition, average_precision
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores


@dataclass(frozen=True)
class LabelSteps:
    """Average precision of one label at each step.

    Attributes:
        label: its name.
        positives: pictures that show it.
        image: of the image logits p.
        patch: of the pooled patch logits q.
        tde: of p + lam q.
    """

    label: str
    positives: int
    image: float
    patch: float
    tde: float

    @property
    def gain(self) -> float:
        """What the sum adds to the better of its two parts."""
        return self.tde - max(self.image, self.patch)


@dataclass(frozen=True)
class StepwiseEvaluation:
    """The paper's step-wise evaluation.

    Attributes:
        definition: of average precision, "step" or "envelope".
        steps: the labels that have a positive picture, in their own order.
        skipped: the labels that have none.
    """

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
        steps = [asdict(step) | {"gain": step.gain} for step in self.steps]
        summary = {"definition": self.definition, "mean": self.mean, "share_gained": self.share_gained}
        return {**summary, "skipped": self.skipped, "labels": steps}


@dataclass(frozen=True)
class ScaleStudy:
    """A row of the paper's study of image scale: do larger views alone explain the gain?

    Attributes:
        definition: of average precision.
        patch: mAP of the patch logits of a network that was trained on patches alone.
        tde: mAP of the TDE logits of PAT-T.
        difference: TDE less patch, with the interval of a paired bootstrap over the pictures.
        labels: names of the labels that have a positive picture.
        patch_per_label: average precision of each.
        tde_per_label: likewise.
    """

    definition: Definition
    patch: float
    tde: float
    difference: Interval
    labels: tuple[str, ...]
    patch_per_label: tuple[float, ...]
    tde_per_label: tuple[float, ...]

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        return asdict(self)


def evaluate_steps(scores: Scores, *, definition: Definition = "step") -> StepwiseEvaluation:
    """Average precision of image, patch and TDE logits, label by label.

    Args:
        scores: of a model with patches, all three kinds of logits.
        definition: of average precision.
    """
    found = {
        kind: average_precision(scores.get(kind), scores.target, definition=definition, labels=scores.labels)
        for kind in ("image", "patch", "tde")
    }
    positives = found["tde"].positives
    rows = zip(scores.labels, positives, *(precision.per_label for precision in found.values()), strict=True)
    steps = tuple(
        LabelSteps(label, count, image, patch, tde)
        for label, count, image, patch, tde in rows
        if image is not None and patch is not None and tde is not None
    )
    return StepwiseEvaluation(definition, steps, found["tde"].skipped)


def study_scale(
    scores: Scores,
    patch_only: Scores,
    *,
    definition: Definition = "step",
    resamples: int = 1000,
    generator: torch.Generator,
) -> ScaleStudy:
    """TDE logits of PAT-T beside the patch logits of a network that never saw a whole picture.

    Args:
        scores: of PAT-T, with "tde" logits.
        patch_only: of the other network (task `patch_only`), with "patch" logits of the same pictures.
        definition: of average precision.
        resamples: of the bootstrap.
        generator: draws them.
    """
    check_same_pictures(scores, patch_only)
    drawn = resample_average_precision(
        {"tde": scores.get("tde"), "patch": patch_only.get("patch")},
        scores.target,
        definition=definition,
        resamples=resamples,
        generator=generator,
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


def check_same_pictures(one: Scores, other: Scores) -> None:
    """Refuse scores of other pictures or labels, or with another target: they cannot be compared row by row."""
    for what in ("labels", "pictures"):
        if getattr(one, what) != getattr(other, what):
            wrong = f"{what} differ between the two files of scores"
            raise InputError("audit", wrong, "score the same data with both models")
    if not torch.equal(one.target.nan_to_num(-1), other.target.nan_to_num(-1)):
        raise InputError("audit", "targets differ between the two files of scores", "score the same data with both")
