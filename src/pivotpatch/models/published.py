"""Weights in the naming of MLC-PAT, query2labels, ML-Decoder, ASL and TResNet, under our names."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pivotpatch.models.backbone import convert_names

_LAYERS = r"transformer\.(encoder|decoder)\.layers\.(\d+)\."
_DECODER = r"(?:head|fc)\.decoder\."
_HEADS = (  # names of heads, which begin so, and ours
    (r"query_embed\.weight$", "head.queries"),
    (r"input_proj\.", "head.enter."),
    (r"transformer\.decoder\.norm\.", "head.norm."),
    (rf"{_LAYERS}self_attn\.", r"head.\1.\2.self_attention."),
    (rf"{_LAYERS}multihead_attn\.", r"head.\1.\2.image_attention."),
    (rf"{_LAYERS}linear1\.", r"head.\1.\2.feedforward.0."),
    (rf"{_LAYERS}linear2\.", r"head.\1.\2.feedforward.3."),
    (rf"{_LAYERS}norm1\.", r"head.\1.\2.self_norm."),
    (r"transformer\.encoder\.layers\.(\d+)\.norm2\.", r"head.encoder.\1.feedforward_norm."),
    (r"transformer\.decoder\.layers\.(\d+)\.norm2\.", r"head.decoder.\1.image_norm."),
    (r"transformer\.decoder\.layers\.(\d+)\.norm3\.", r"head.decoder.\1.feedforward_norm."),
    (rf"{_DECODER}embed_standart\.", "head.enter."),
    (rf"{_DECODER}query_embed\.weight$", "head.queries"),
    (rf"{_DECODER}layers\.0\.", "head.decoder."),
    (rf"{_DECODER}duplicate_pooling$", "head.project.weight"),
    (rf"{_DECODER}duplicate_pooling_bias$", "head.project.bias"),
)
# MLC-PAT's outputs: of the image, of the patches' weights, of the patches; where there are two, the second is both.
_OUTPUTS = {None: "head.project", "1": "head.project", "2": "weight_projection", "3": "patch_projection"}


def rename_published(state: Mapping[str, Tensor], network: Any) -> dict[str, Tensor]:
    """Weights of a whole model under our names, with as many projections as there are; what is unknown keeps its name.

    Args:
        state: under our names, timm's, or those of the model's authors.
        network: the timm model of the backbone, which knows names of its authors, too.
    """
    if any(name.startswith("backbone.network.") for name in state):
        return dict(state)
    asked = "query_embed.weight" in state  # Query2Label
    classifier = network.pretrained_cfg["classifier"]
    tops = [classifier] if isinstance(classifier, str) else list(classifier)
    output = re.compile(rf"{'fc' if asked else re.escape(tops[0])}\.(?:fc([123])\.)?(weight|bias|W|b)")
    plain = not asked and _averages(network)
    named, body = {}, {}
    for name, value in state.items():
        found, known = output.fullmatch(name), [pair for pair in _HEADS if re.match(pair[0], name)]
        if found is not None and (asked or plain or found[1] is not None):
            part = {"W": "weight", "b": "bias"}.get(found[2], found[2])
            ours = value[0, :, :, None] if found[2] == "W" else value[0] if found[2] == "b" else value
            named[f"{_OUTPUTS[found[1]]}.{part}"] = ours
        elif known:
            named[re.sub(*known[0], name)] = value
        else:
            body[name.removeprefix("backbone.0.").removeprefix("body.") if asked else name] = value
    expected = network.state_dict()
    if not expected.keys() <= body.keys():
        body = convert_names(body, network)
    for name, value in body.items():
        another = name not in expected and name.startswith(tuple(f"{top.partition('.')[0]}." for top in tops))
        named[name if another else f"backbone.network.{name}"] = value  # a head that is none of ours keeps its name
    if "weight_projection.weight" in named and "patch_projection.weight" not in named:
        named |= {f"patch_projection.{part}": named[f"weight_projection.{part}"] for part in ("weight", "bias")}
    return named


def _averages(network: Any) -> bool:
    """Whether a timm model's classifier stands on the mean of its feature map, as our linear head does."""
    shape = (
        (1, 2, 2, network.num_features)
        if getattr(network, "output_fmt", "") == "NHWC"
        else (1, network.num_features, 2, 2)
    )
    features = torch.linspace(-1, 1, network.num_features * 4).reshape(shape)
    try:
        pooled = network.forward_head(features, pre_logits=True)
    except Exception:  # it wants tokens, or has no such step
        return False
    mean = features.mean(dim=(1, 2) if shape[1] == 2 else (2, 3))
    return pooled.shape == mean.shape and torch.allclose(pooled, mean, atol=1e-6)


def read_head_options(state: Mapping[str, Tensor]) -> dict[str, int | bool]:
    """Options of the decoder head that published weights are of, as their shapes tell; none for any other head."""
    queries = {name: value.shape for name, value in state.items() if name.endswith("query_embed.weight")}
    if "query_embed.weight" in queries:
        layers = {match.groups() for name in state if (match := re.match(_LAYERS, name))}
        inner = state.get("transformer.decoder.layers.0.linear1.weight", torch.empty(1))
        return {
            "width": queries["query_embed.weight"][-1],
            "projection": "input_proj.weight" in state,
            "self_attention": any(re.match(r"transformer\.decoder\.layers\.\d+\.self_attn", name) for name in state),
            "encoder_layers": sum(kind == "encoder" for kind, _ in layers),
            "decoder_layers": sum(kind == "decoder" for kind, _ in layers),
            "feedforward": inner.shape[0],
        }
    return next(({"groups": shape[0], "width": shape[-1]} for shape in queries.values()), {})
