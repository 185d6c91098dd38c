"""After MS-CMA (You et al., AAAI 2020): places count for a label by their cosine with its embedding, at two scales.

Cosines of embeddings are how often labels occur together. What is assumed: docs/peers.md.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.models.heads import GroupProjection, Head, PerLabel
from pivotpatch.peers.label_priors import SEED, LabelPrior, find_conditionals

STEPS, RATE = 300, 0.05
"""Of the fit of label embeddings."""
LEAST = 1e-6
"""Attention of a place that has none, so that a label is never left without a feature to learn from."""


class MSCMAHead(Head):
    """Attention by cosine to label embeddings, at two scales; the embedding is (B,L,2D)."""

    per_label: ClassVar[PerLabel] = {"semantic.vectors": (0,)}

    def __init__(self, features: int, labels: int, *, width: int = 256, alpha: float = 0.4) -> None:
        """Build one for `features` channels; label embeddings have `width` numbers, `alpha` is explained with them."""
        super().__init__()
        self.semantic = LabelEmbeddings(labels, width, alpha=alpha)
        self.enter = nn.Sequential(nn.Conv2d(features, width, 1), nn.ReLU(), nn.Conv2d(width, width, 1))
        self.set_projection(GroupProjection, labels, queries=labels, width=2 * features)

    def embed(self, features: Tensor) -> Tensor:
        """What labels are judged by (B,L,2D), of a feature map (B,D,h,w)."""
        coarse = F.avg_pool2d(features, 2, ceil_mode=True)
        return torch.cat([self._attend(features), self._attend(coarse)], dim=2)

    def _attend(self, features: Tensor) -> Tensor:
        """Mean (B,L,D) over the places of a map (B,D,h,w), weighed for each label; the plain one if none attends."""
        places = F.normalize(self.enter(features).flatten(2), dim=1)
        near = (F.normalize(self.semantic.vectors, dim=1) @ places).relu() + LEAST  # (B,L,N)
        return near / near.sum(dim=2, keepdim=True) @ features.flatten(2).transpose(1, 2)


class LabelEmbeddings(LabelPrior):
    """Vectors (L,W) of labels, fitted so that cosines are the means of P(i | j) and P(j | i).

    A pair for which both are below `alpha` costs nothing: few pairs are seen, and the others need not be apart.
    """

    def __init__(self, labels: int, width: int, *, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.register_buffer("vectors", torch.empty(labels, width))
        self.vectors: Tensor
        drawn = torch.randn(labels, width, generator=torch.Generator().manual_seed(SEED), device="cpu")
        self.vectors.copy_(drawn)

    def learn_counts(self, counts: Tensor) -> None:
        """Fit the vectors to counts (L,L) of images that show both of two labels, from what they were before."""
        wanted = find_conditionals(counts.float())
        wanted = (wanted + wanted.t()) / 2
        vectors = self.vectors.clone().requires_grad_()
        optimiser = torch.optim.Adam([vectors], lr=RATE)
        with torch.enable_grad():
            for _ in range(STEPS):
                optimiser.zero_grad()
                find_misfit(vectors, wanted, alpha=self.alpha).backward()
                optimiser.step()
        self.vectors.copy_(vectors.detach())


def find_misfit(vectors: Tensor, wanted: Tensor, *, alpha: float) -> Tensor:
    """Squared differences of the cosines of vectors (L,W) from those wanted (L,L), summed over pairs that count."""
    directions = F.normalize(vectors, dim=1)
    cosines = directions @ directions.t()
    counts = ((cosines >= alpha) | (wanted >= alpha)).float().fill_diagonal_(0)
    return ((cosines - wanted) ** 2 * counts).sum()
