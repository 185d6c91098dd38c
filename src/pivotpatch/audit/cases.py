"""Case studies: what the image, its patches and both say of one label, beside a baseline."""

from dataclasses import asdict, dataclass

import torch

from pivotpatch.audit.evaluation import check_paired
from pivotpatch.core.counterfactual import CounterfactualLogits
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores


@dataclass(frozen=True)
class CaseStudy:
    """One label of one image.

    Attributes:
        picture: name of the image, `row` among the scores.
        shown: whether the image shows the label; None where nobody knows.
        others: the other labels that the image shows.
        image: probability from the whole image (the paper's Ori).
        patch: probability from the pooled patches (Pat); `tde` from both.
        weights: share of each patch, row by row.
        baseline: probability from another model, where there is one.
    """

    picture: str
    row: int
    label: str
    shown: bool | None
    others: tuple[str, ...]
    image: float
    patch: float
    tde: float
    weights: tuple[float, ...]
    baseline: float | None

    def to_dict(self) -> dict[str, object]:
        """In plain types, for JSON."""
        return {"company" if name == "others" else name: value for name, value in asdict(self).items()}


def study_case(scores: Scores, row: int, *, label: int, baseline: Scores | None = None) -> CaseStudy:
    """What a model with patches says of a label of one image.

    Args:
        scores: with their patches.
        row: position of the image.
        label: index of the label.
        baseline: another model's scores of the same images.
    """
    logits, truth, names = gather_logits(scores, row), scores.target[row], scores.labels
    shown = None if truth[label].isnan() else bool(truth[label])
    other = None
    if baseline is not None:
        other = baseline.select(torch.tensor([row])).probs(baseline.ranking)[0, label].item()
    return CaseStudy(
        scores.pictures[row],
        row,
        names[label],
        shown,
        tuple(names[place] for place in (truth == 1).nonzero().flatten().tolist() if place != label),
        image=logits.image_logits[0, label].sigmoid().item(),
        patch=logits.pooled_logits[0, label].sigmoid().item(),
        tde=logits.probs[0, label].item(),
        weights=tuple(logits.weights[0, :, label].tolist()),
        baseline=other,
    )


def find_cases(scores: Scores, baseline: Scores, *, count: int = 4) -> list[CaseStudy]:
    """The clearest cases of both rows of the paper's figure, in images that show other labels too.

    First objects that are there and that the model is surer of than the baseline, then objects that are not there and
    that it claims less; the largest difference first. They show what can happen: for how often it does, see the rates.

    Args:
        scores: of a model with patches, with their patches.
        baseline: another model's scores of the same images.
        count: the most cases of each of the two.
    """
    check_paired(scores, baseline)
    rise = scores.probs("tde") - baseline.probs(baseline.ranking)
    there = scores.target == 1
    others = there.sum(1, keepdim=True) - there.int()
    found = []
    for wanted, gain in ((there, rise), (scores.target == 0, -rise)):
        gain = gain.masked_fill(~wanted | (others == 0), 0.0)
        best = gain.flatten().topk(min(count, gain.numel()))
        cells = best.indices[best.values > 0]
        found += [divmod(cell, len(scores.labels)) for cell in cells.tolist()]
    return [study_case(scores, row, label=label, baseline=baseline) for row, label in found]


def gather_logits(scores: Scores, row: int) -> CounterfactualLogits:
    """All that is known of one image, B = 1, as `plot_case` takes it."""
    one = scores.select(torch.tensor([row]))
    if one.patch_logits is None or one.weights is None:
        raise InputError("scores", "the patches were not kept", "score the images again with --keep-patches")
    parts = one.patch_logits, one.weights
    return CounterfactualLogits(one.get("image"), *parts, one.get("patch"), one.get("tde"), one.probs("tde"))
