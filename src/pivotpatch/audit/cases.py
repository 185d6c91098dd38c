"""Case studies: what the image, its patches and both say of one label, beside a baseline."""

from dataclasses import asdict, dataclass

import torch

from pivotpatch.audit.evaluation import check_paired
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores


@dataclass(frozen=True)
class CaseStudy:
    """One label of one image."""

    picture: str  # name of the image, `row` among the scores
    row: int
    label: str
    shown: bool  # whether the image shows the label
    others: tuple[str, ...]  # the other labels that the image shows
    image: float  # probability from the whole image (the paper's Ori)
    patch: float  # probability from the pooled patches (Pat); `tde` from both
    tde: float
    weights: tuple[float, ...]  # share of each patch, row by row
    baseline: float  # probability from the baseline

    def to_dict(self) -> dict[str, object]:
        """In plain types, for JSON."""
        return {"company" if name == "others" else name: value for name, value in asdict(self).items()}


def find_cases(scores: Scores, baseline: Scores, *, count: int = 8) -> list[CaseStudy]:
    """Where a model is nearer to the truth than a baseline by most, then where it is farther from it by most.

    Half of each, the largest difference first, and no label twice among either. They show what can happen: for how
    often it does, see the rates.

    Args:
        scores: of a model with patches, with their patches.
        baseline: another model's scores of the same images.
        count: the most cases, of both together.
    """
    check_paired(scores, baseline)
    if scores.weights is None:
        raise InputError("scores", "the patches were not kept", "score the images again with --keep-patches")
    target, theirs, labels = scores.target, baseline.probs(baseline.ranking), scores.labels
    probs = {kind: scores.probs(kind) for kind in ("image", "patch", "tde")}
    rise = probs["tde"] - theirs
    gain = torch.where(target == 1, rise, -rise).masked_fill(target.isnan(), 0.0)
    found = []
    for signed, most in ((gain, count - count // 2), (-gain, count // 2)):
        best = signed.max(dim=0)
        ranked = best.values.argsort(descending=True, stable=True)[:most]
        for label in ranked[best.values[ranked] > 0].tolist():
            row = int(best.indices[label])
            study = CaseStudy(
                scores.pictures[row],
                row,
                labels[label],
                shown=bool(target[row, label]),
                others=tuple(labels[i] for i in (target[row] == 1).nonzero().flatten().tolist() if i != label),
                **{kind: values[row, label].item() for kind, values in probs.items()},
                weights=tuple(scores.weights[row, :, label].tolist()),
                baseline=theirs[row, label].item(),
            )
            found.append(study)
    return found
