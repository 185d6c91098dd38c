"""ADD-GCN (Ye et al., ECCV 2020): features of labels, from the places that activation maps mark, speak to each other.

First along a graph that is learned, then along one that is made of the image; what is assumed: docs/peers.md.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.models.heads import GroupProjection, Head, HeadOption, PerLabel

SLOPE = 0.2


class ADDGCNHead(Head):
    """Activation maps and two graphs; the embedding (B,L,W+1) is a label's feature and its largest activation."""

    per_label: ClassVar[PerLabel] = {
        "activation.weight": (0,),
        "static_edges.weight": (0, 1),
        "dynamic_edges.weight": (0,),
        "dynamic_edges.bias": (0,),
    }
    small: ClassVar[Mapping[str, HeadOption]] = {"zero": True}

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        width: int = 1024,  # numbers of a label's feature
        zero: bool = False,  # begin with scores of zero
    ) -> None:
        super().__init__()
        self.activation = nn.Conv2d(features, labels, 1, bias=False)
        self.enter = nn.Conv2d(features, width, 1)
        self.static_edges = nn.Conv1d(labels, labels, 1, bias=False)
        self.static_weight = nn.Conv1d(width, width, 1)
        self.summary = nn.Conv1d(width, width, 1)
        self.norm = LenientNorm(width)
        self.dynamic_edges = nn.Conv1d(2 * width, labels, 1)
        self.dynamic_weight = nn.Conv1d(width, width, 1)
        self.set_projection(MeanProjection, labels, queries=labels, width=width, zero=zero)
        if zero:
            nn.init.zeros_(self.activation.weight)

    def embed(self, features: Tensor) -> Tensor:
        """Features and activations (B,L,W+1) of labels, of a feature map (B,D,h,w)."""
        activation = self.activation(features).flatten(2)
        found = self.enter(features).flatten(2) @ activation.sigmoid().transpose(1, 2)  # (B,W,L)
        spread = F.leaky_relu(self.static_edges(found.transpose(1, 2)).transpose(1, 2), SLOPE)
        mixed = found + F.leaky_relu(self.static_weight(spread), SLOPE)
        summary = F.leaky_relu(self.norm(self.summary(mixed.mean(dim=2, keepdim=True))), SLOPE)
        edges = self.dynamic_edges(torch.cat([summary.expand_as(mixed), mixed], dim=1)).sigmoid()  # (B,L,L)
        told = F.leaky_relu(self.dynamic_weight(F.leaky_relu(mixed @ edges, SLOPE)), SLOPE)
        return torch.cat([found + told, activation.amax(dim=2)[:, None]], dim=1).transpose(1, 2)


class MeanProjection(GroupProjection):
    """A linear score of each label's feature; the logit is the mean of it and the activation behind the feature."""

    def forward(self, embedding: Tensor) -> Tensor:
        """Logits (B,L) of embeddings (B,L,W+1)."""
        return (super().forward(embedding[..., :-1]) + embedding[..., -1]) / 2


class LenientNorm(nn.BatchNorm1d):
    """Batch norm that also trains on one image: it then has no deviation, and the running one stands in."""

    def forward(self, values: Tensor) -> Tensor:
        """Normalised values (B,W,1)."""
        if self.training and len(values) == 1:
            moments = self.running_mean, self.running_var
            return F.batch_norm(values, *moments, self.weight, self.bias, training=False, eps=self.eps)
        return super().forward(values)
