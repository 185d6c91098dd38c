"""CPSD (Xu et al., IJCAI 2022): a student of all labels learns from teachers of groups of them; see docs/peers.md.

Labels are divided twice: into groups that occur together, and into groups that do not. Of four clusterings, which
differ in their seed alone, the best by Calinski and Harabasz counts.
"""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from pivotpatch.errors import InputError
from pivotpatch.models.classifier import Classifier, MultiLabelClassifier

TRIES, STARTS = 4, 20
"""Clusterings, and starts of each."""


def find_similarity(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Similarity (L,L) of labels by counts (L,L) of images that show both: the mean of two square roots of shares.

    >>> find_similarity(np.array([[4, 1], [1, 1]])).tolist()
    [[0.0, 0.75], [0.75, 0.0]]
    """
    images = np.maximum(counts.diagonal(), 1)
    shares = np.sqrt(counts / images)
    np.fill_diagonal(shares, 0)
    return np.asarray((shares + shares.T) / 2)


def group_labels(similarity: NDArray[np.float64], groups: int) -> list[list[int]]:
    """Divide labels into groups of similar ones, by spectral clustering of similarities (L,L); positions of each."""
    from sklearn.cluster import SpectralClustering
    from sklearn.metrics import calinski_harabasz_score

    if len(similarity) <= groups:
        return [[label] for label in range(len(similarity))]
    best, highest = np.zeros(len(similarity), dtype=np.int64), -np.inf
    for seed in range(TRIES if groups > 1 else 0):
        cluster = SpectralClustering(groups, affinity="precomputed", n_init=STARTS, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # labels that occur with no other are no fault
            found = cluster.fit_predict(similarity)
        worth = calinski_harabasz_score(similarity, found)
        best, highest = (found, worth) if worth > highest else (best, highest)
    return [np.flatnonzero(best == number).tolist() for number in np.unique(best)]


def divide_labels(names: Sequence[str], counts: NDArray[np.int64], groups: int) -> dict[str, tuple[str, ...]]:
    """Labels of each teacher, by its name: groups that occur together, then groups that do not.

    Args:
        names: of the L labels.
        counts: (L,L) of images that show both of two labels.
        groups: of each kind, or fewer where there are fewer labels.
    """
    near = find_similarity(counts)
    kinds = {"together": near, "apart": 1 - near}
    return {
        f"{kind}-{number}": tuple(names[place] for place in places)
        for kind, similarity in kinds.items()
        for number, places in enumerate(group_labels(similarity, groups), 1)
    }


class Teachers:
    """What trained models say, each of the labels that it knows, to a model with L labels; no part of that model."""

    def __init__(self, models: Sequence[Classifier], student: MultiLabelClassifier) -> None:
        """Take teachers whose labels the student has, and who see images as it does."""
        known = {label: place for place, label in enumerate(student.labels)}
        device = next(student.parameters()).device
        for model in models:
            if not isinstance(model, MultiLabelClassifier) or model.preprocessing != student.preprocessing:
                wrong = "it is no plain model, or does not see images as the student does"
                raise InputError(model.called, wrong, "train teachers with the student's settings and task.kind=image")
            if not known.keys() >= set(model.labels):
                wrong = f"it knows labels that the student lacks, such as {min(set(model.labels) - known.keys())!r}"
                raise InputError(model.called, wrong, "give a teacher of some of the student's labels")
        self.models = [model.eval().requires_grad_(False).to(device) for model in models]
        self.places = [torch.tensor([known[label] for label in model.labels], device=device) for model in models]
        taught = torch.cat(self.places).bincount(minlength=len(known))
        self.shares = 1 / taught.clamp(min=1)

    def find_difference(self, images: Tensor, logits: Tensor) -> Tensor:
        """Squared differences of a student's logits (B,L) from those of a label's teachers, in the mean over these.

        Args:
            images: (B,C,H,W), preprocessed.
            logits: (B,L) of the student.

        Returns:
            Their sum (B,) over labels.
        """
        total = torch.zeros(len(logits), device=logits.device)
        for model, places in zip(self.models, self.places, strict=True):
            with torch.no_grad():
                wanted = model(images)
            cost = F.mse_loss(logits[:, places].float(), wanted.float(), reduction="none")
            total = total + (cost * self.shares[places]).sum(dim=1)
        return total
