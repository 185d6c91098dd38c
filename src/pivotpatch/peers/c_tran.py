"""C-Tran (Lanchantin et al., CVPR 2021): places and a token for each label pass one transformer together.

A token also says what is known of its label. Training reveals some at random; unknown is a zero vector, as meant.
"""

import torch
from torch import Tensor, nn

from pivotpatch.models.heads import AttentionLayer, GroupProjection, Head

REVEALED = 0.75
"""Largest share of labels that training reveals of an image."""


class CTranHead(Head):
    """One transformer over places and labels; the embedding is (B,L,D). Unless told, it knows no label."""

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        layers: int = 3,  # of the transformer
        attention_heads: int = 4,  # of each attention
        feedforward: int = 2048,  # inner width of the feed-forward part
        dropout: float = 0.1,  # of attention, feed-forward and their sums
    ) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(labels, features) / features**0.5)
        self.states = nn.Parameter(torch.randn(2, features) / features**0.5)  # known to be absent, to be present
        self.norm = nn.LayerNorm(features)
        self.layers = nn.ModuleList(
            AttentionLayer(features, attention_heads, feedforward=feedforward, dropout=dropout, attend_self=True)
            for _ in range(layers)
        )
        self.set_projection(GroupProjection, labels, queries=labels, width=features)

    def embed(self, features: Tensor, known: Tensor | None = None) -> Tensor:
        """Label embeddings (B,L,D) of a feature map (B,D,h,w).

        Args:
            features: (B,D,h,w).
            known: (B,L) what is known of labels: 1 present, 0 absent, NaN unknown; nothing by default.
        """
        labels = self.queries.expand(features.shape[0], -1, -1)
        if known is None:
            labels = labels + 0 * self.states.sum()  # so that every weight has a gradient, which processes wait for
        else:
            told = torch.stack([known == 0, known == 1], dim=2).to(labels.dtype)  # neither where it is NaN
            labels = labels + told @ self.states
        tokens = self.norm(torch.cat([features.flatten(2).transpose(1, 2), labels], dim=1))
        for layer in self.layers:
            tokens = layer(tokens, positions=tokens.new_zeros(1))
        return tokens[:, -labels.shape[1] :]


def draw_known(target: Tensor) -> Tensor:
    """Reveal labels of a target (B,L) at random, of each image a share up to `REVEALED`; others are NaN."""
    share = REVEALED * torch.rand(len(target), 1, device=target.device)
    revealed = torch.rand(target.shape, device=target.device) < share
    return target.masked_fill(~revealed, torch.nan)
