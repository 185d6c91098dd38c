"""CSRA (Zhu and Wu, ICCV 2021): scores of every place, their mean plus `lam` times their mean weighed by softmax.

What PAT does with patches, done with places. Several heads, each sharper than the last, add up.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.errors import InputError
from pivotpatch.models.heads import Head, HeadOption, draw_uniform

SHARPNESS: dict[int, tuple[float, ...]] = {
    1: (1.0,),
    2: (1.0, math.inf),
    4: (1.0, 2.0, 4.0, math.inf),
    6: (1.0, 2.0, 3.0, 4.0, 5.0, math.inf),
    8: (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, math.inf),
}
"""By the number of heads, what each one's scores are multiplied by before softmax; infinity is the largest score."""


class CSRAHead(Head):
    """Residual attention; the embedding is the feature map's places (B,D,N), so PAT-T triples all of its weights."""

    small: ClassVar[Mapping[str, HeadOption]] = {"scale": 0.1}  # filters of length 1 cannot begin at zero

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        heads: int = 4,  # 1, 2, 4, 6 or 8; published: 4 for COCO, 1 for VOC
        lam: float = 0.5,  # weight of the attention; published: 0.5 for COCO, 0.1 for VOC
        scale: float = 1.0,  # of logits; published: 1
    ) -> None:
        super().__init__()
        if heads not in SHARPNESS:
            raise InputError("CSRA", f"heads is {heads}", f"give one of {', '.join(map(str, SHARPNESS))}")
        self.set_projection(ResidualAttention, features, labels, heads=heads, lam=lam, scale=scale)

    def embed(self, features: Tensor) -> Tensor:
        """The places (B,D,N) of a feature map (B,D,h,w)."""
        return features.flatten(2)


class ResidualAttention(nn.Module):
    """Logits (B,L) of places (B,D,N): filters (L,H,D) of length 1, without a bias."""

    def __init__(self, features: int, labels: int, *, heads: int, lam: float, scale: float) -> None:
        super().__init__()
        self.lam, self.scale, self.sharpness = lam, scale, SHARPNESS[heads]
        self.weight = draw_uniform(labels, heads, features, of=features)

    def forward(self, places: Tensor) -> Tensor:
        """Logits (B,L) of places (B,D,N)."""
        scores = torch.einsum("lhd,bdn->hbln", F.normalize(self.weight, dim=2), places)
        attended = torch.stack([_attend(each, sharp) for each, sharp in zip(scores, self.sharpness, strict=True)])
        return self.scale * (scores.mean(dim=3) + self.lam * attended).sum(dim=0)


def _attend(scores: Tensor, sharpness: float) -> Tensor:
    """Mean (B,L) of scores (B,L,N) over places, weighed by their softmax."""
    if math.isinf(sharpness):
        return scores.amax(dim=2)
    return ((sharpness * scores).softmax(dim=2) * scores).sum(dim=2)
