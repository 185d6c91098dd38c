"""Heads: a feature map in, logits out, in two steps.

`embed` does the work, `project` is the last linear step. PAT-T triples only the projection, so
that the decoder heads share one decoder among image, patch and weight logits.
"""

import inspect
import math
from collections.abc import Callable, Mapping

import torch
from timm.layers.ml_decoder import TransformerDecoderLayerOptimal
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.core.errors import InputError, choose_one_of, quote, quote_fault
from pivotpatch.models.limits import check_numbers

HeadOption = int | float | None


class Head(nn.Module):
    """Feature map (B,D,h,w) -> embedding -> logits (B,L)."""

    project: nn.Module

    def embed(self, features: Tensor) -> Tensor:
        """Embedding of a feature map (B,D,h,w): what `project` turns into logits."""
        raise NotImplementedError

    def make_projection(self) -> nn.Module:
        """A new last step, embedding -> logits (B,L), with weights of its own."""
        raise NotImplementedError

    def forward(self, features: Tensor) -> Tensor:
        """Logits (B,L) of a feature map (B,D,h,w)."""
        logits: Tensor = self.project(self.embed(features))
        return logits


class LinearHead(Head):
    """Global average pooling and one linear layer; the embedding is (B,D)."""

    def __init__(self, features: int, labels: int) -> None:
        super().__init__()
        self.features = features
        self.labels = labels
        self.project = self.make_projection()

    def embed(self, features: Tensor) -> Tensor:
        """Mean (B,D) over the places of a feature map (B,D,h,w)."""
        return features.mean(dim=(2, 3))

    def make_projection(self) -> nn.Module:
        """A linear layer D -> L."""
        return nn.Linear(self.features, self.labels)


class MaxHead(LinearHead):
    """Global max pooling and one linear layer; the embedding is (B,D)."""

    def embed(self, features: Tensor) -> Tensor:
        """Largest value (B,D) over the places of a feature map (B,D,h,w)."""
        return features.amax(dim=(2, 3))


class GroupProjection(nn.Module):
    """A linear layer of its own for each query; a query serves ceil(L / G) consecutive labels.

    With as many queries as labels this is Query2Label's group-wise linear layer.
    """

    def __init__(self, labels: int, *, queries: int, width: int) -> None:
        super().__init__()
        self.labels = labels
        self.weight = nn.Parameter(torch.empty(queries, width, -(-labels // queries)))
        self.bias = nn.Parameter(torch.zeros(labels))
        bound = 1 / math.sqrt(width)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, embedding: Tensor) -> Tensor:
        """Logits (B,L) of query embeddings (B,G,W)."""
        grouped = torch.einsum("bgw,gwl->bgl", embedding, self.weight)
        return grouped.flatten(1)[:, : self.labels] + self.bias


class Query2LabelHead(Head):
    """Query2Label: a transformer in which each label's query looks for its place in the image.

    The embedding is (B,L,W). Positions enter queries and keys as fixed sines of the relative row
    and column, so that any input size has an encoding.
    """

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        width: int = 2048,
        encoder_layers: int = 1,
        decoder_layers: int = 2,
        attention_heads: int = 4,
        feedforward: int = 8192,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if width % 4 or width % attention_heads:
            raise InputError(
                "Query2Label",
                f"width {width} with {attention_heads} attention heads",
                "give a multiple of 4 and of them",
            )
        self.labels = labels
        self.width = width
        self.enter = nn.Conv2d(features, width, kernel_size=1)
        self.queries = nn.Parameter(torch.randn(labels, width))
        self.encoder = nn.ModuleList(
            AttentionLayer(width, attention_heads, feedforward=feedforward, dropout=dropout, attend_image=False)
            for _ in range(encoder_layers)
        )
        self.decoder = nn.ModuleList(
            AttentionLayer(width, attention_heads, feedforward=feedforward, dropout=dropout, attend_image=True)
            for _ in range(decoder_layers)
        )
        self.project = self.make_projection()

    def embed(self, features: Tensor) -> Tensor:
        """Label embeddings (B,L,W) of a feature map (B,D,h,w)."""
        positions = encode_positions(features.shape[2], features.shape[3], width=self.width).to(features)
        image = self.enter(features).flatten(2).transpose(1, 2)
        for layer in self.encoder:
            image = layer(image, positions=positions)
        labels = self.queries.expand(image.shape[0], -1, -1)
        for layer in self.decoder:
            labels = layer(labels, positions=positions, image=image)
        return labels

    def make_projection(self) -> nn.Module:
        """A linear layer W -> 1 for each label."""
        return GroupProjection(self.labels, queries=self.labels, width=self.width)


class AttentionLayer(nn.Module):
    """A transformer layer, normalised after each step: attention to itself, to the image, feed-forward.

    Positions are added to queries and keys only, never to values.
    """

    def __init__(self, width: int, heads: int, *, feedforward: int, dropout: float, attend_image: bool) -> None:
        super().__init__()
        self.self_attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.self_norm = nn.LayerNorm(width)
        if attend_image:
            self.image_attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
            self.image_norm = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, feedforward), nn.ReLU(), nn.Dropout(dropout), nn.Linear(feedforward, width)
        )
        self.feedforward_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, *, positions: Tensor, image: Tensor | None = None) -> Tensor:
        """New tokens (B,N,W).

        Args:
            tokens: (B,N,W), the image's places, or the labels' queries where `image` is given.
            positions: (M,W) of the image's places.
            image: (B,M,W) for the labels to attend to.
        """
        placed = tokens + positions if image is None else tokens
        found = self.self_attention(placed, placed, tokens, need_weights=False)[0]
        tokens = self.self_norm(tokens + self.dropout(found))
        if image is not None:
            found = self.image_attention(tokens, image + positions, image, need_weights=False)[0]
            tokens = self.image_norm(tokens + self.dropout(found))
        normed: Tensor = self.feedforward_norm(tokens + self.dropout(self.feedforward(tokens)))
        return normed


class MLDecoderHead(Head):
    """ML-Decoder: fixed queries attend to the image, each decodes a group of labels.

    The embedding is (B,G,W). The layer is timm's; timm's whole head is not used because its
    decoder loop no longer runs on current torch.
    """

    def __init__(self, features: int, labels: int, *, groups: int | None = None, width: int = 768) -> None:
        super().__init__()
        self.labels = labels
        self.width = width
        self.groups = min(labels, 100 if groups is None else groups)
        if self.groups < 1 or width % 8:
            raise InputError(
                "ML-Decoder", f"{groups} groups of width {width}", "give 1 group or more, width a multiple of 8"
            )
        self.enter = nn.Linear(features, width)
        self.decoder = TransformerDecoderLayerOptimal(width, nhead=8, dim_feedforward=2048, dropout=0.1)
        self.register_buffer("queries", torch.randn(self.groups, width))
        self.queries: Tensor
        self.project = self.make_projection()

    def embed(self, features: Tensor) -> Tensor:
        """Group embeddings (B,G,W) of a feature map (B,D,h,w)."""
        image = F.relu(self.enter(features.flatten(2).transpose(1, 2)))
        queries = self.queries[:, None].expand(-1, image.shape[0], -1)
        decoded: Tensor = self.decoder(queries, image.transpose(0, 1))
        return decoded.transpose(0, 1)

    def make_projection(self) -> nn.Module:
        """A linear layer W -> ceil(L / G) for each group."""
        return GroupProjection(self.labels, queries=self.groups, width=self.width)


HEADS: Mapping[str, Callable[..., Head]] = {
    "linear": LinearHead,
    "max": MaxHead,
    "query2label": Query2LabelHead,
    "ml_decoder": MLDecoderHead,
}


def make_head(name: str, *, features: int, labels: int, options: Mapping[str, HeadOption] | None = None) -> Head:
    """A head by name; `options` are the keyword arguments of its class."""
    if name not in HEADS:
        raise InputError("head", f"unknown head {name!r}", choose_one_of(name, HEADS))
    known = [p.name for p in inspect.signature(HEADS[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options or {}:
        if option not in known:
            todo = choose_one_of(option, known) if known else "this head has no options"
            raise InputError(f"head {name!r}", f"unknown option {option!r}", todo)
    check_numbers(options or {}, f"head {name!r}")
    try:
        return HEADS[name](features, labels, **(options or {}))
    except InputError:
        raise
    except Exception as error:  # numbers that are none of a size
        wrong = f"cannot be built with {quote(dict(options or {}))}: {quote_fault(error)}"
        raise InputError(f"head {name!r}", wrong, "change what it does not take") from error


def encode_positions(height: int, width_places: int, *, width: int) -> Tensor:
    """Fixed encoding (height * width_places,W) of the places of a feature map, row by row.

    Half of the W values are sines and cosines of the relative row, half of the relative column,
    at frequencies from 2 pi down to 2 pi / 10,000.

    >>> encode_positions(2, 3, width=8).shape
    torch.Size([6, 8])
    """
    count = width // 4
    frequencies = 2 * math.pi * 10000 ** (-torch.arange(count) / count)
    rows = (torch.arange(height) + 1) / height
    columns = (torch.arange(width_places) + 1) / width_places
    by_row = rows[:, None] * frequencies
    by_column = columns[:, None] * frequencies
    row_part = torch.cat([by_row.sin(), by_row.cos()], dim=1)[:, None].expand(-1, width_places, -1)
    column_part = torch.cat([by_column.sin(), by_column.cos()], dim=1)[None].expand(height, -1, -1)
    return torch.cat([row_part, column_part], dim=2).flatten(0, 1)
