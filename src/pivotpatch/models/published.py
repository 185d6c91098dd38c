"""Weights in the naming of the published repositories, under our names."""

import re
from collections.abc import Mapping

from torch import Tensor

_QUERY2LABEL = (
    (r"^query_embed\.weight$", "queries"),
    (r"^input_proj\.", "enter."),
    (r"^transformer\.decoder\.norm\.", "norm."),
    (r"^transformer\.(encoder|decoder)\.layers\.(\d+)\.self_attn\.", r"\1.\2.self_attention."),
    (r"^transformer\.decoder\.layers\.(\d+)\.multihead_attn\.", r"decoder.\1.image_attention."),
    (r"^transformer\.(encoder|decoder)\.layers\.(\d+)\.linear1\.", r"\1.\2.feedforward.0."),
    (r"^transformer\.(encoder|decoder)\.layers\.(\d+)\.linear2\.", r"\1.\2.feedforward.3."),
    (r"^transformer\.(encoder|decoder)\.layers\.(\d+)\.norm1\.", r"\1.\2.self_norm."),
    (r"^transformer\.encoder\.layers\.(\d+)\.norm2\.", r"encoder.\1.feedforward_norm."),
    (r"^transformer\.decoder\.layers\.(\d+)\.norm2\.", r"decoder.\1.image_norm."),
    (r"^transformer\.decoder\.layers\.(\d+)\.norm3\.", r"decoder.\1.feedforward_norm."),
)


def rename_query2label(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a `Query2LabelHead` from those of query2labels, without the backbone's.

    Its output `fc.W` (1,L,W) and `fc.b` (1,L) become `project.weight` (L,W,1) and `project.bias` (L).
    """
    renamed = {}
    for name, value in state.items():
        if name == "fc.W":
            renamed["project.weight"] = value[0, :, :, None]
        elif name == "fc.b":
            renamed["project.bias"] = value[0]
        else:
            for pattern, ours in _QUERY2LABEL:
                if re.match(pattern, name):
                    renamed[re.sub(pattern, ours, name)] = value
    return renamed
