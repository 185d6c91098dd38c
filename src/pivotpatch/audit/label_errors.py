"""Likely annotation errors: where a model is sure of the contrary, and as a rule is not with that label.

The scores must come from images that the model was not trained on: a model learns wrong labels by heart.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pivotpatch.inference.scores import Scores
from pivotpatch.runtime.values import rate_self_confidence
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
    confidence = torch.from_numpy(rate_self_confidence(probs.numpy(), scores.target.numpy()))
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
