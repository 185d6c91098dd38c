"""CvT, the backbone of Query2Label's best row: transformers has it, timm has not."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from pivotpatch.errors import import_extra

CVTS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], float, int]] = {
    "cvt_13": ((64, 192, 384), (1, 2, 10), (1, 3, 6), 0.1, 224),
    "cvt_21": ((64, 192, 384), (1, 4, 16), (1, 3, 6), 0.1, 224),
    "cvt_w24": ((192, 768, 1024), (2, 2, 20), (3, 12, 16), 0.3, 384),
    "test_cvt": ((8, 16, 32), (1, 2, 3), (1, 2, 4), 0.1, 64),
}
"""Widths, depths and attention heads of the stages, share of dropped paths, rows and columns of the images."""
_NAMES = (  # of the authors, and of transformers
    (r"^stage(\d)\.", r"body.encoder.stages.\1."),
    (r"\.patch_embed\.proj\.", ".embedding.convolution_embeddings.projection."),
    (r"\.patch_embed\.norm\.", ".embedding.convolution_embeddings.normalization."),
    (r"\.blocks\.", ".layers."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
    (r"\.attn\.proj\.", ".attention.output.dense."),
    (r"\.attn\.(conv_)?proj_", r".attention.attention.\1projection_"),
    (r"\.conv_projection_([qkv])\.", r".convolution_projection_\1.convolution_projection."),
    (r"_projection\.conv\.", "_projection.convolution."),
    (r"_projection\.bn\.", "_projection.normalization."),
    (r"projection_q\b", "projection_query"),
    (r"projection_k\b", "projection_key"),
    (r"projection_v\b", "projection_value"),
)


class Cvt(nn.Module):
    """Images (B,3,H,W) in, feature map (B,D,h,w) out, with the attributes that a timm model has.

    The network is transformers', as published where that differs: a faster GELU, a share of dropped paths that rises
    with the depth, and each residual dropped on its own. The last norm stands on the map, as in Query2Label.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        library = import_extra("transformers", "transformers")
        widths, depths, heads, drop, _ = CVTS[name]
        self.body: Any = library.CvtModel(library.CvtConfig(embed_dim=widths, depth=depths, num_heads=heads))
        self.norm = nn.LayerNorm(widths[-1])
        self.num_features = widths[-1]
        self.pretrained_cfg = describe_cvt(name)
        stages = self.body.encoder.stages
        for stage in stages:
            for place, layer in enumerate(stage.layers):
                rate = drop * place / max(len(stage.layers) - 1, 1) if stage is stages[-1] else 0.0
                layer.intermediate.activation = QuickGELU()
                layer.drop_path = nn.Identity()
                layer.attention.output.dropout, layer.output.dropout = DropPath(rate), DropPath(rate)

    def forward_features(self, images: Tensor) -> Tensor:
        """Feature map (B,D,h,w) of images (B,3,H,W)."""
        features = self.body(images).last_hidden_state
        normed: Tensor = self.norm(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return normed

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights under our names, from those of the authors."""
        renamed = {}
        for name, value in state.items():
            for pattern, ours in _NAMES:
                name = re.sub(pattern, ours, name)
            renamed[name] = value
        return renamed


def describe_cvt(name: str) -> dict[str, Any]:
    """What timm states of its models as `pretrained_cfg`."""
    sizes = {"input_size": (3, CVTS[name][-1], CVTS[name][-1]), "interpolation": "bilinear"}
    colours = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    return {"architecture": name, "classifier": "head", **sizes, **colours}


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as x."""
        return x * torch.sigmoid(1.702 * x)
