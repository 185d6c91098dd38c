"""Backbones with random weights."""

import torch
from torch import nn

from pivotpatch.models.backbone import Backbone


def make_backbone(name: str) -> Backbone:
    """A backbone whose norms have seen something."""
    backbone = Backbone(name, image_size=64)
    generator = torch.Generator().manual_seed(0)
    for norm in backbone.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.copy_(0.1 * torch.randn(norm.num_features, generator=generator))
            norm.running_var.copy_(0.5 + torch.rand(norm.num_features, generator=generator))
    return backbone.eval()
