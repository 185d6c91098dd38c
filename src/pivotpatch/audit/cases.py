"""Case studies: what the image, its patches and both say of one label, beside a baseline."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from pivotpatch.audit.stepwise import check_same_pictures
from pivotpatch.core.counterfactual import CounterfactualLogits
from pivotpatch.errors import InputError, choose_one_of
from pivotpatch.inference.scores import Scores


@dataclass(frozen=True)
class CaseStudy:
    """One label of one picture.

    Attributes:
        picture: name of the picture.
        row: its position among the scores.
        label: name of the label.
        shown: whether the picture shows it; None where nobody knows.
        company: names of the other labels that the picture shows.
        image: probability from the whole image, the paper's Ori.
        patch: probability from the pooled patches, Pat.
        tde: probability from both.
        weights: share of each patch, row by row.
        baseline: probability from another model, where there is one.
    """

    picture: str
    row: int
    label: str
    shown: bool | None
    company: tuple[str, ...]
    image: float
    patch: float
    tde: float
    weights: tuple[float, ...]
    baseline: float | None

    def to_dict(self) -> dict[str, object]:
        """In plain types, for JSON."""
        return asdict(self)


def study_case(scores: Scores, row: int, *, label: str, baseline: Scores | None = None) -> CaseStudy:
    """What a model with patches says of a label of one picture.

    Args:
        scores: with their patches.
        row: position of the picture.
        label: name of the label.
        baseline: another model's scores of the same pictures.
    """
    if scores.weights is None:
        raise InputError("scores", "the patches were not kept", "score the pictures again with their patches")
    if label not in scores.labels:
        raise InputError("scores", f"unknown label {label!r}", choose_one_of(label, scores.labels))
    column = scores.labels.index(label)
    one = scores.select(torch.tensor([row]))
    truth = one.target[0]
    company = tuple(name for name, there in zip(scores.labels, truth == 1, strict=True) if there and name != label)
    other = None
    if baseline is not None:
        check_same_pictures(scores, baseline)
        other = baseline.select(torch.tensor([row])).probs(baseline.ranking)[0, column].item()
    return CaseStudy(
        scores.pictures[row],
        row,
        label,
        None if truth[column].isnan() else bool(truth[column]),
        company,
        **{kind: one.probs(kind)[0, column].item() for kind in ("image", "patch", "tde")},
        weights=tuple(scores.weights[row, :, column].tolist()),
        baseline=other,
    )


def find_cases(scores: Scores, baseline: Scores, *, count: int = 4) -> list[CaseStudy]:
    """The clearest cases of both rows of the paper's figure, in pictures that show other labels too.

    First objects that are there and that the model is surer of than the baseline, then objects that are not there and
    that it claims less; the largest difference first. They show what can happen: for how often it does, see the rates.

    Args:
        scores: of a model with patches, with their patches.
        baseline: another model's scores of the same pictures.
        count: the most cases of each of the two.
    """
    check_same_pictures(scores, baseline)
    rise = scores.probs("tde") - baseline.probs(baseline.ranking)
    there = scores.target == 1
    others = there.sum(1, keepdim=True) - there.int()
    found = []
    for wanted, gain in ((there, rise), (scores.target == 0, -rise)):
        gain = gain.masked_fill(~wanted | (others == 0), 0.0)
        best = gain.flatten().topk(min(count, gain.numel()))
        cells = best.indices[best.values > 0]
        found += [divmod(cell, len(scores.labels)) for cell in cells.tolist()]
    return [study_case(scores, row, label=scores.labels[column], baseline=baseline) for row, column in found]


def gather_logits(scores: Scores, row: int) -> CounterfactualLogits:
    """All that is known of one picture, B = 1, as `plot_case` takes it."""
    if scores.patch_logits is None or scores.weights is None:
        raise InputError("scores", "the patches were not kept", "score the pictures again with their patches")
    one = scores.select(torch.tensor([row]))
    parts: tuple[Tensor, Tensor] = scores.patch_logits[row][None], scores.weights[row][None]
    return CounterfactualLogits(one.get("image"), *parts, one.get("patch"), one.get("tde"), one.probs("tde"))
