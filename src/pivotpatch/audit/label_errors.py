"""Likely annotation errors: where a model is sure of the contrary, and as a rule is not with that label.

The scores must come from images that the model was not trained on: a model learns wrong labels by heart.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pivotpatch.inference.scores import Scores
from pivotpatch.tuning.calibration import calibrate_out_of_fold

HIGHEST_SELF_CONFIDENCE = 0.25
"""Of an entry: noise stays above it, but for a few dozen images; no probability from 0.25 to 0.75 goes below it."""


class LabelError(NamedTuple):
    """A label that is probably missing from an image, or probably wrong."""

    rank: int  # from 1, the most suspicious
    picture: str  # name of the image, `row` among the scores
    row: int
    label: str
    # "missing", the target says no and the model yes; "wrong", the other way round.
    direction: Literal["missing", "wrong"]
    probability: float  # that the image shows the label, calibrated
    self_confidence: float  # see `rate_self_confidence`; near 0 is suspicious, 1 is ordinary


def find_label_errors(scores: Scores, *, probs: Tensor | None = None, count: int = 100) -> list[LabelError]:
    """Rank what is probably wrong with the target, the most suspicious first.

    Probabilities are calibrated per label, each image's without its own fold, so that a label which is given too freely
    is not believed too easily. Only entries of `HIGHEST_SELF_CONFIDENCE` or less are returned: none, where the model is
    sure of nothing.

    Args:
        scores: what a model says, and the target to doubt.
        probs: (N,L) such probabilities, where the caller has fitted them already.
        count: the most entries to return.
    """
    if probs is None:
        probs = calibrate_out_of_fold(scores.scaled(scores.ranking), scores.target)
    confidence = rate_self_confidence(probs, scores.target)
    rows, columns = (confidence <= HIGHEST_SELF_CONFIDENCE).nonzero(as_tuple=True)
    order = confidence[rows, columns].argsort(stable=True)[:count]
    return [
        LabelError(
            rank,
            scores.pictures[row],
            row,
            scores.labels[column],
            "wrong" if scores.target[row, column] == 1 else "missing",
            probs[row, column].item(),
            confidence[row, column].item(),
        )
        for rank, (row, column) in enumerate(zip(rows[order].tolist(), columns[order].tolist(), strict=True), 1)
    ]


def rate_self_confidence(probs: Tensor, target: Tensor) -> Tensor:
    """What a model gives to the target's answers, as a part of what it gives to such answers as a rule.

    That is p where the target says yes and 1 - p where it says no, divided by its mean over all images with that
    answer: a label that the model hardly ever finds is not suspicious for being missed once more.

    Args:
        probs: (N,L).
        target: (N,L), 1 present, 0 absent, NaN unknown.

    Returns:
        (N,L), 0 or more, 1 for an ordinary answer; NaN where the target is unknown.

    >>> rate_self_confidence(torch.tensor([[0.9], [0.9], [0.3]]), torch.tensor([[1.0], [1.0], [1.0]])).flatten()
    tensor([1.2857, 1.2857, 0.4286])
    """
    own = torch.where(target == 1, probs, 1 - probs)
    rated = torch.full_like(probs, torch.nan)
    for answer in (0, 1):
        asked = target == answer
        usual = (own * asked).sum(0) / asked.sum(0)
        rated = torch.where(asked, own / usual, rated)
    return rated
