"""After Fev+Lv (Yang et al., CVPR 2016): an image is a bag of regions, judged by their features and their neighbours.

Regions are places of the feature map and 2 x 2 means of them, of length 1. What is assumed: docs/peers.md.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.models.heads import Head, PerLabel, draw_uniform

SHARPNESS = 20.0
"""What cosines are multiplied by before softmax."""
SCALE = 30.0
"""Length of what is judged: with 10, on held-out images, the same number of steps got less far."""


class FevLvHead(Head):
    """Two views of regions; the embedding is the R regions (B,R,D), so PAT-T triples all of its weights."""

    per_label: ClassVar[PerLabel] = {"labels_of": (0,)}

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        centres: int = 64,  # K, of the feature view
        exemplars: int = 512,  # M, of the label view
    ) -> None:
        super().__init__()
        self.set_projection(TwoViews, features, labels, centres=centres, exemplars=exemplars)

    def embed(self, features: Tensor) -> Tensor:
        """The regions (B,R,D) of a feature map (B,D,h,w)."""
        large = F.avg_pool2d(features, 2, ceil_mode=True)
        return F.normalize(torch.cat([features.flatten(2), large.flatten(2)], dim=2), dim=1).transpose(1, 2)


class TwoViews(nn.Module):
    """The mean of two logits (B,L): of where regions (B,R,D) lie about centres, and of the exemplars they are near."""

    def __init__(self, features: int, labels: int, *, centres: int, exemplars: int) -> None:
        super().__init__()
        self.centres = draw_uniform(centres, features, of=features)
        self.exemplars = draw_uniform(exemplars, features, of=features)
        self.weight = draw_uniform(labels, centres * features, of=centres * features)
        self.labels_of = draw_uniform(labels, exemplars, of=exemplars)
        self.bias = nn.Parameter(torch.zeros(labels))

    def forward(self, regions: Tensor) -> Tensor:
        """Logits (B,L) of regions (B,R,D)."""
        centres, exemplars = F.normalize(self.centres, dim=1), F.normalize(self.exemplars, dim=1)
        near = (SHARPNESS * regions @ centres.t()).softmax(dim=2).transpose(1, 2)  # (B,K,R)
        residuals = near @ regions - near.sum(dim=2, keepdim=True) * centres
        encoded = F.normalize(F.normalize(residuals, dim=2).flatten(1), dim=1)
        neighbours = (SHARPNESS * regions @ exemplars.t()).softmax(dim=2)  # (B,R,M)
        label_view = (neighbours @ self.labels_of.t()).amax(dim=1)
        return SCALE * (encoded @ self.weight.t() + label_view) / 2 + self.bias
