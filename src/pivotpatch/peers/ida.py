"""IDA (Liu et al., ICLR 2023): samples of a label's attended feature, one from each part of the channels.

A second attention weighs them against each other, to adjust for the context. What is assumed: docs/peers.md.
"""

import torch
from torch import Tensor, nn

from pivotpatch.errors import InputError
from pivotpatch.models.heads import AttentionLayer, Head, draw_uniform


class IDAHead(Head):
    """Two attentions; the embedding is (B,L,D). Filters of `project` are those of the first attention too."""

    project: "ScaledFilters"

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        samples: int = 4,  # S parts of the channels, each attended to on its own
        layers: int = 2,  # of the second attention
        feedforward: int = 2048,  # inner width of their feed-forward part
    ) -> None:
        super().__init__()
        if features % samples:
            raise InputError("IDA", f"{features} channels and {samples} samples", "give a number that divides them")
        width = features // samples
        self.set_projection(ScaledFilters, labels, samples, width)
        self.second = nn.ModuleList(
            AttentionLayer(width, 1, feedforward=feedforward, dropout=0.0, attend_self=True) for _ in range(layers)
        )
        self.leave = nn.Linear(features, features)

    def embed(self, features: Tensor) -> Tensor:
        """What labels are judged by (B,L,D), of a feature map (B,D,h,w)."""
        filters = self.project.scale()
        places = features.flatten(2).unflatten(1, filters.shape[1:])  # (B,S,D/S,N)
        chosen = torch.einsum("lsw,bswn->blsn", filters, places).softmax(dim=3)
        samples = torch.einsum("blsn,bswn->blsw", chosen, places)
        tokens = samples.flatten(0, 1)
        for layer in self.second:
            tokens = layer(tokens, positions=tokens.new_zeros(1))
        return self.leave(tokens.flatten(1)).unflatten(0, samples.shape[:2])


class ScaledFilters(nn.Module):
    """Logits (B,L) of embeddings (B,L,D), by filters (L,S,D/S) of nearly length 1 each, without a bias."""

    def __init__(self, labels: int, samples: int, width: int) -> None:
        super().__init__()
        self.weight = draw_uniform(labels, samples, width, of=width)

    def scale(self) -> Tensor:
        """Filters (L,S,D/S), each divided by its length and a little."""
        return self.weight / (torch.linalg.vector_norm(self.weight, dim=2, keepdim=True) + 1 / 32)

    def forward(self, embedding: Tensor) -> Tensor:
        """Logits (B,L) of embeddings (B,L,D)."""
        return (embedding * self.scale().flatten(1)).sum(dim=2)
