"""ML-GCN (Chen et al., CVPR 2019): two graph convolutions make the classifiers of labels from their word vectors."""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.models.heads import Head, HeadOption, draw_uniform
from pivotpatch.peers.label_priors import LabelGraph, WordVectors, find_conditionals


class MLGCNHead(Head):
    """Max pooling and classifiers made by a graph; the embedding is (B,D). PAT-T has three pairs of convolutions."""

    small: ClassVar[Mapping[str, HeadOption]] = {"zero": True}

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        width: int = 1024,  # between the two convolutions
        vector_width: int = 300,  # numbers of a word vector
        threshold: float = 0.4,  # share of a label's images above which another that they show is its neighbour
        share: float = 0.2,  # of a label's own vector that its neighbours replace
        zero: bool = False,  # begin with classifiers of zeros
    ) -> None:
        super().__init__()
        make = partial(make_edges, threshold=threshold, share=share)
        made_with = {"width": width, "vector_width": vector_width, "make": make}
        self.set_projection(GraphClassifiers, features, labels, zero=zero, **made_with)

    def embed(self, features: Tensor) -> Tensor:
        """Largest value (B,D) over the places of a feature map (B,D,h,w)."""
        return features.amax(dim=(2, 3))


class GraphClassifiers(nn.Module):
    """Logits (B,L) of pooled images (B,D), by classifiers (L,D) that two graph convolutions make of word vectors."""

    last = ("second",)

    def __init__(self, features: int, labels: int, *, width: int, vector_width: int, make: "partial[Tensor]") -> None:
        super().__init__()
        self.words, self.graph = WordVectors(labels, vector_width), LabelGraph(labels, make)
        self.first = draw_uniform(vector_width, width, of=width)
        self.second = draw_uniform(width, features, of=features)

    def forward(self, embedding: Tensor) -> Tensor:
        """Logits (B,L) of pooled images (B,D)."""
        edges = self.graph.edges
        hidden = F.leaky_relu(edges @ self.words.vectors @ self.first, 0.2)
        return embedding @ (edges @ hidden @ self.second).t()


def make_edges(counts: Tensor, *, threshold: float, share: float) -> Tensor:
    """Edges (L,L) of counts (L,L): neighbours by `threshold`, weighed to share `share`, normalised from both sides.

    The published code multiplies by the transpose of the normalised matrix, and so does this.
    """
    near, own = (find_conditionals(counts) >= threshold).float(), torch.eye(len(counts), device=counts.device)
    near = near * (1 - own)
    weighed = share / (1 - share) * near / (near.sum(dim=0) + 1e-6) + own
    scale = weighed.sum(dim=1).rsqrt()
    return (scale[:, None] * weighed * scale).t()
