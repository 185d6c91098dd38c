"""After VGG + SVM (Simonyan and Zisserman, ICLR 2015): a linear machine for each label; see docs/peers.md."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.models.heads import HeadOption, LinearHead

SCALE = 10.0
"""Length of what is judged: with 1, weights would have to grow for long before margins are 1 wide."""


class SVMHead(LinearHead):
    """Global average pooling to one length and a linear layer; the embedding is (B,D)."""

    small: ClassVar[Mapping[str, HeadOption]] = {}  # its backbone is frozen, so that errors cannot spoil it

    def embed(self, features: Tensor) -> Tensor:
        """Mean (B,D) over the places of a feature map (B,D,h,w), of length `SCALE`."""
        return SCALE * F.normalize(super().embed(features), dim=1)


class SquaredHingeLoss(nn.Module):
    """max(0, 1 - s)^2 of present labels and max(0, 1 + s)^2 of absent ones, for scores s, summed."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Loss of logits (B,L) against target (B,L), where NaN is unknown and costs nothing."""
        known = ~target.isnan()
        side = 2 * target.nan_to_num(0).float() - 1
        return torch.where(known, (1 - side * logits.float()).relu().square(), 0).sum()
