"""Query2Label, slowly: loops over images, labels, places and attention heads, weights under the authors' names."""

import math

import torch
from torch import Tensor

State = dict[str, Tensor]


def query2label_logits(
    state: State, features: Tensor, *, heads: int, encoder_layers: int, decoder_layers: int
) -> Tensor:
    """Logits (B,L) of feature maps (B,W,h,w)."""
    queries = state["query_embed.weight"]
    labels, width = queries.shape
    height, columns = features.shape[2:]
    places = [(row, column) for row in range(height) for column in range(columns)]
    positions = torch.stack([position((row + 1) / height, (column + 1) / columns, width) for row, column in places])
    positions = positions.to(features)
    logits = features.new_zeros(features.shape[0], labels)
    for number, one in enumerate(features):
        image = torch.stack([one[:, row, column] for row, column in places])
        for place in range(encoder_layers):
            layer = part(state, f"transformer.encoder.layers.{place}.")
            found = attend(image + positions, image + positions, image, part(layer, "self_attn."), heads)
            image = norm(image + found, part(layer, "norm1."))
            image = norm(image + feed(image, layer), part(layer, "norm2."))
        tokens = torch.zeros_like(queries)
        for place in range(decoder_layers):
            layer = part(state, f"transformer.decoder.layers.{place}.")
            if "self_attn.in_proj_weight" in layer:
                found = attend(tokens + queries, tokens + queries, tokens, part(layer, "self_attn."), heads)
                tokens = norm(tokens + found, part(layer, "norm1."))
            found = attend(tokens + queries, image + positions, image, part(layer, "multihead_attn."), heads)
            tokens = norm(tokens + found, part(layer, "norm2."))
            tokens = norm(tokens + feed(tokens, layer), part(layer, "norm3."))
        tokens = norm(tokens, part(state, "transformer.decoder.norm."))
        for label in range(labels):
            logits[number, label] = tokens[label] @ state["fc.W"][0, label] + state["fc.b"][0, label]
    return logits


def part(state: State, prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def position(row: float, column: float, width: int) -> Tensor:
    """The code of a place: sine and cosine in turns, the row first."""
    code = []
    for place in (row, column):
        for step in range(width // 4):
            angle = 2 * math.pi * place / 10000 ** (step / (width // 4))
            code += [math.sin(angle), math.cos(angle)]
    return torch.tensor(code, dtype=torch.float64)


def attend(queries: Tensor, keys: Tensor, values: Tensor, state: State, heads: int) -> Tensor:
    """What each query (N,W) finds among keys and values (M,W), head by head."""
    width = queries.shape[1]
    asked, known, told = (
        given @ state["in_proj_weight"][at * width : (at + 1) * width].T
        + state["in_proj_bias"][at * width : (at + 1) * width]
        for at, given in enumerate((queries, keys, values))
    )
    found = []
    for head in range(heads):
        share = slice(head * width // heads, (head + 1) * width // heads)
        scores = asked[:, share] @ known[:, share].T / math.sqrt(width // heads)
        weights = scores.exp() / scores.exp().sum(1, keepdim=True)
        found.append(weights @ told[:, share])
    return torch.cat(found, 1) @ state["out_proj.weight"].T + state["out_proj.bias"]


def feed(tokens: Tensor, state: State) -> Tensor:
    inner = (tokens @ state["linear1.weight"].T + state["linear1.bias"]).clamp(min=0)
    return inner @ state["linear2.weight"].T + state["linear2.bias"]


def norm(tokens: Tensor, state: State) -> Tensor:
    centred = tokens - tokens.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() * state["weight"] + state["bias"]
