"""Heads: `embed` makes an embedding of a feature map, `project`, the last step, logits, which PAT-T triples."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, ClassVar

import torch
from timm.layers.ml_decoder import TransformerDecoderLayerOptimal
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.errors import InputError, check_known, explaining, quote
from pivotpatch.models.limits import HEAD_NAMES
from pivotpatch.runtime.values import PatchBox

HeadOption = int | float | bool | None
PerLabel = Mapping[str, tuple[int, ...]]


class Head(nn.Module):
    """Feature map (B,D,h,w) -> embedding -> logits (B,L); built for D `features` and L `labels`.

    Attributes:
        make_projection: makes a last step, embedding -> logits (B,L), with weights of its own.
        project: the one that it has itself.
        per_label: how names of tensors end in which some dimensions, these, count the labels, beside `project.weight`,
            `project.bias`, `queries`, `words.vectors` and `graph.edges`.
        small: options that make its first logits small (`model.first_logits`): large ones are errors, which training
            mends in a trained backbone, too.
    """

    make_projection: Callable[[], nn.Module]
    project: nn.Module
    per_label: ClassVar[PerLabel] = {}
    small: ClassVar[Mapping[str, HeadOption]] = {}

    def set_projection(self, kind: Callable[..., nn.Module], *given: int, zero: bool = False, **options: Any) -> None:
        """Say of which kind a last step is, what it is made with, and whether its weights begin at zero."""
        make = partial(kind, *given, **options)
        self.make_projection = partial(_make_zero, make) if zero else make
        self.project = self.make_projection()

    def connect(self, network: nn.Module) -> None:
        """Take part in what a timm model does between image and feature map, where a head does more than follow it."""

    def embed(self, features: Tensor) -> Tensor:
        """Embedding of a feature map (B,D,h,w): what `project` turns into logits."""
        raise NotImplementedError

    def embed_regions(self, features: Tensor, boxes: Sequence[PatchBox]) -> tuple[Tensor, Tensor]:
        """Embeddings (B,...) of a feature map (B,D,h,w), and (B,P,...) of P regions of it, boxes of one size."""
        cut = torch.stack([features[..., box.top : box.bottom, box.left : box.right] for box in boxes], dim=1)
        parts: Tensor = self.embed(cut.flatten(0, 1)).unflatten(0, cut.shape[:2])
        return self.embed(features), parts

    def forward(self, features: Tensor) -> Tensor:
        """Logits (B,L) of a feature map (B,D,h,w)."""
        return project_embedding(self.project, self.embed(features))


def _make_zero(make: Callable[[], nn.Module]) -> nn.Module:
    """What `make` makes, its `last` weights zero; not for decoders, whose layers would learn nothing at first."""
    made = make()
    for name in getattr(made, "last", ("weight", "bias")):
        nn.init.zeros_(getattr(made, name))
    return made


def project_embedding(project: nn.Module, embedding: Tensor) -> Tensor:
    """Logits (B,L) of an embedding (B,...) by a last step, in float32 where a model is judged, under autocast too.

    Half precision knows so few numbers that of thousands of images many would have the same logit, in no order.
    """
    kind = embedding.device.type
    if project.training or not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        logits: Tensor = project(embedding)
        return logits
    with torch.autocast(kind, enabled=False):
        return project(embedding.float())


class LinearHead(Head):
    """Global average pooling and one linear layer; the embedding is (B,D)."""

    small: ClassVar[Mapping[str, HeadOption]] = {"zero": True}

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        zero: bool = False,  # begin with a last step of zeros
    ) -> None:
        super().__init__()
        self.set_projection(nn.Linear, features, labels, zero=zero)

    def embed(self, features: Tensor) -> Tensor:
        """Mean (B,D) over the places of a feature map (B,D,h,w)."""
        return features.mean(dim=(2, 3))


class MaxHead(LinearHead):
    """Global max pooling and one linear layer; the embedding is (B,D)."""

    def embed(self, features: Tensor) -> Tensor:
        """Largest value (B,D) over the places of a feature map (B,D,h,w)."""
        return features.amax(dim=(2, 3))


def draw_uniform(*shape: int, of: int) -> nn.Parameter:
    """A weight of this shape, drawn as torch draws those of linear layers over `of` numbers."""
    bound = 1 / math.sqrt(of)
    return nn.Parameter(nn.init.uniform_(torch.empty(shape), -bound, bound))


class GroupProjection(nn.Module):
    """A linear layer of its own for each query; a query serves ceil(L / G) consecutive labels.

    With as many queries as labels this is Query2Label's group-wise linear layer.
    """

    def __init__(self, labels: int, *, queries: int, width: int) -> None:
        super().__init__()
        self.labels = labels
        self.weight = draw_uniform(queries, width, -(-labels // queries), of=width)
        self.bias = nn.Parameter(torch.zeros(labels))

    def forward(self, embedding: Tensor) -> Tensor:
        """Logits (B,L) of query embeddings (B,G,W)."""
        grouped = torch.einsum("bgw,gwl->bgl", embedding, self.weight)
        return grouped.flatten(1)[:, : self.labels] + self.bias


class Query2LabelHead(Head):
    """Query2Label as published: a transformer in which each label's query looks for its place in the image.

    The encoder works on the places of the feature map. The decoder's tokens, one per label, begin at zero; the label
    queries are added to them as positions in every layer. The embedding is (B,L,W).
    """

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        width: int | None = None,  # of tokens; D by default
        projection: bool = False,  # begin with a 1 x 1 convolution D -> W also where W is D
        self_attention: bool = False,  # let the labels attend to each other in the decoder
        encoder_layers: int = 1,  # over the image
        decoder_layers: int = 2,  # from labels to image
        attention_heads: int = 4,  # of each attention
        feedforward: int = 8192,  # inner width of the feed-forward part
        dropout: float = 0.1,  # of attention, feed-forward and their sums
    ) -> None:
        super().__init__()
        self.width = features if width is None else width
        if self.width % 4 or self.width % attention_heads:
            wrong = f"width {self.width} with {attention_heads} attention heads"
            raise InputError("Query2Label", wrong, "give a multiple of 4 and of them")
        enters = projection or self.width != features
        self.enter = nn.Conv2d(features, self.width, kernel_size=1) if enters else nn.Identity()
        self.queries = nn.Parameter(torch.randn(labels, self.width))
        layer = partial(AttentionLayer, self.width, attention_heads, feedforward=feedforward, dropout=dropout)
        decoder = partial(layer, attend_self=self_attention, attend_image=True)
        self.encoder = nn.ModuleList(layer(attend_self=True) for _ in range(encoder_layers))
        self.decoder = nn.ModuleList(decoder() for _ in range(decoder_layers))
        self.norm = nn.LayerNorm(self.width)
        self.set_projection(GroupProjection, labels, queries=labels, width=self.width)
        for weights in (*self.encoder.parameters(), *self.decoder.parameters()):
            if weights.dim() > 1:
                nn.init.xavier_uniform_(weights)

    def embed(self, features: Tensor) -> Tensor:
        """Label embeddings (B,L,W) of a feature map (B,D,h,w)."""
        positions = encode_positions(features.shape[2], features.shape[3], width=self.width).to(features)
        image = self.enter(features).flatten(2).transpose(1, 2)
        for layer in self.encoder:
            image = layer(image, positions=positions)
        labels = self.queries.new_zeros(image.shape[0], *self.queries.shape)
        for layer in self.decoder:
            labels = layer(labels, positions=self.queries, image=image, image_positions=positions)
        return self.norm(labels)


class AttentionLayer(nn.Module):
    """A transformer layer, normalised after each step: attention to itself, to the image, feed-forward.

    Positions are added to queries and keys only, never to values.
    """

    def __init__(
        self, width: int, heads: int, *, feedforward: int, dropout: float, attend_self: bool, attend_image: bool = False
    ) -> None:
        super().__init__()
        self.attend_self, self.attend_image = attend_self, attend_image
        if attend_self:
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

    def forward(
        self, tokens: Tensor, *, positions: Tensor, image: Tensor | None = None, image_positions: Tensor | None = None
    ) -> Tensor:
        """New tokens (B,N,W), of such with positions (N,W) and an image (B,M,W) with positions (M,W)."""
        if self.attend_self:
            placed = tokens + positions
            found = self.self_attention(placed, placed, tokens, need_weights=False)[0]
            tokens = self.self_norm(tokens + self.dropout(found))
        if self.attend_image:
            assert image is not None
            assert image_positions is not None
            found = self.image_attention(tokens + positions, image + image_positions, image, need_weights=False)[0]
            tokens = self.image_norm(tokens + self.dropout(found))
        return self.feedforward_norm(tokens + self.dropout(self.feedforward(tokens)))


class MLDecoderHead(Head):
    """ML-Decoder: fixed queries attend to the image, each decodes a group of labels.

    The embedding is (B,G,W). The weights are those of timm's layer; timm's whole head is not used because its
    decoder loop no longer runs on current torch, and its layer cannot attend to regions with keys that they share.
    """

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        groups: int | None = None,  # G; one per label by default, 100 at most
        width: int = 768,  # W, of queries
        # Decode a region as far as the whole image. Else the embedding of a region is what its queries have
        # found there, before the feed-forward part, most of what a region costs
        deep_regions: bool = True,
    ) -> None:
        super().__init__()
        groups = min(labels, 100 if groups is None else groups)
        self.deep_regions = deep_regions
        self.enter = nn.Linear(features, width)
        self.decoder = TransformerDecoderLayerOptimal(width, nhead=8, dim_feedforward=2048, dropout=0.1)
        self.register_buffer("queries", torch.randn(groups, width))
        self.queries: Tensor
        self.set_projection(GroupProjection, labels, queries=groups, width=width)

    def embed(self, features: Tensor) -> Tensor:
        """Group embeddings (B,G,W) of a feature map (B,D,h,w)."""
        keys, values = self._read(features)
        return self._feed(self._attend(keys, values))

    def embed_regions(self, features: Tensor, boxes: Sequence[PatchBox]) -> tuple[Tensor, Tensor]:
        """Group embeddings (B,G,W) of a feature map (B,D,h,w), and (B,P,G,W) of regions, whose keys are the map's."""
        keys, values = self._read(features)
        places = torch.arange(keys.shape[-2], device=keys.device).reshape(features.shape[-2:])
        inside = torch.stack([places[box.top : box.bottom, box.left : box.right].flatten() for box in boxes])
        found = self._attend(*(each[..., inside, :].movedim(-3, 1) for each in (keys, values)))
        return self._feed(self._attend(keys, values)), self._feed(found) if self.deep_regions else found

    def _read(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B,H,h*w,W/H) of a feature map (B,D,h,w), for H attention heads."""
        image, attention = F.relu(self.enter(features.flatten(2).transpose(1, 2))), self.decoder.multihead_attn
        weights, biases = (each.tensor_split(3)[1:] for each in (attention.in_proj_weight, attention.in_proj_bias))
        read = (F.linear(image, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        keys, values = (each.unflatten(2, (attention.num_heads, -1)).transpose(1, 2) for each in read)
        return keys, values

    def _attend(self, keys: Tensor, values: Tensor) -> Tensor:
        """What queries find (...,G,W) where they attend to N places, with keys and values (...,H,N,W/H)."""
        layer, attention = self.decoder, self.decoder.multihead_attn
        # Regions ask what the image asks, and without dropout all images ask the same.
        images = keys.shape[0] if self.training else 1
        queries = self.queries.expand(images, *(1 for _ in keys.shape[1:-3]), -1, -1)
        queries = layer.norm1(queries + layer.dropout1(queries))
        asked = F.linear(
            queries, attention.in_proj_weight.tensor_split(3)[0], attention.in_proj_bias.tensor_split(3)[0]
        )
        asked = asked.unflatten(-1, (attention.num_heads, -1)).transpose(-3, -2).expand(*keys.shape[:-2], -1, -1)
        share = attention.dropout if self.training else 0.0
        asked, at, held = (each.flatten(0, -4) for each in (asked, keys, values))  # exporters know four dimensions
        found = F.scaled_dot_product_attention(asked, at, held, dropout_p=share).transpose(1, 2).flatten(2)
        found = found.unflatten(0, (-1, *keys.shape[1:-3]))
        return layer.norm2(queries + layer.dropout2(attention.out_proj(found)))

    def _feed(self, found: Tensor) -> Tensor:
        """Embeddings (...,G,W) of what queries have found (...,G,W): the feed-forward part."""
        layer = self.decoder
        fed = layer.linear2(layer.dropout(layer.activation(layer.linear1(found))))
        return layer.norm3(found + layer.dropout3(fed))


HEADS: Mapping[str, type[Head]] = {
    "linear": LinearHead,
    "max": MaxHead,
    "query2label": Query2LabelHead,
    "ml_decoder": MLDecoderHead,
}


def make_head(name: str, *, features: int, labels: int, options: Mapping[str, HeadOption] | None = None) -> Head:
    """A head by name; `options` are the keyword arguments of its class."""
    check_known(name, HEAD_NAMES, where="head", what="head")
    make = find_head(name)
    given = dict(options or {})
    with explaining(f"head {name!r}", f"cannot be built with {quote(given)}", "change what it does not take"):
        made = make(features, labels, **given)
    for key, value in given.items():
        counted = type(signature(make).parameters[key].default) is int
        least = 1 if counted and not key.endswith("layers") else 0  # there may be no layers at all
        if value is not None and value < least:
            raise InputError(f"head {name!r}", f"{key} is {value}", f"give {least} or more")
    return made


def find_head(name: str) -> type[Head]:
    """The class of a head; that of another system is built on what this module holds, and imported when asked for."""
    if name in HEADS:
        return HEADS[name]
    peer = import_module(f"pivotpatch.peers.{name}")
    kinds = (each for each in vars(peer).values() if isinstance(each, type) and issubclass(each, Head))
    return next(kind for kind in kinds if kind.__module__ == peer.__name__)


def encode_positions(height: int, width_places: int, *, width: int) -> Tensor:
    """Fixed encoding (height * width_places,W) of the places of a feature map, row by row.

    The first half of the W values tells the relative row, the second the relative column: sine and cosine in turns, at
    frequencies from 2 pi down to 2 pi / 10,000.

    >>> encode_positions(2, 3, width=8).shape
    torch.Size([6, 8])
    """
    count = width // 4
    frequencies = 2 * math.pi * 10000 ** (-torch.arange(count) / count)

    def encode(places: int) -> Tensor:
        angles = ((torch.arange(places) + 1) / (places + 1e-6))[:, None] * frequencies
        return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)

    rows = encode(height)[:, None].expand(-1, width_places, -1)
    columns = encode(width_places)[None].expand(height, -1, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)
