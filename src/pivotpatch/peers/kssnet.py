"""After KSSNet (Wang et al., AAAI 2020): a graph network over labels beside the backbone.

Behind each stage but the last its labels look for themselves in the feature map, and what they find is added to it,
nothing at first, so that a trained backbone begins as it was. What else is assumed: docs/peers.md.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.errors import InputError
from pivotpatch.models.heads import Head, PerLabel
from pivotpatch.peers.label_priors import LabelGraph, WordVectors, find_conditionals

LEAST = 0.03
"""Edges below it are dropped."""
STAGES = 3
"""Behind which labels are injected: all but the last."""


class KSSNetHead(Head):
    """A graph network whose states are injected into the backbone; the embedding (B,D+L) is the pooled map and scores.

    The backbone must give a map (B,C,h,w) behind each of its stages, as those of convolutions do.
    """

    project: "AddedLinear"
    per_label: ClassVar[PerLabel] = {f"laterals.{stage}": (0,) for stage in range(STAGES)}

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        vector_width: int = 300,  # numbers of a word vector
        own: float = 0.6,  # share of a label's own state in what the graph passes on
    ) -> None:
        super().__init__()
        self.words = WordVectors(labels, vector_width)
        self.graph = LabelGraph(labels, partial(superimpose, own=own))
        self.layers = nn.ModuleList([make_layer(vector_width, features)])
        self.laterals = nn.ParameterList()
        self.set_projection(AddedLinear, features, labels)

    def connect(self, network: nn.Module) -> None:
        """Inject labels behind the stages of a timm model, by hooks that a copy of both keeps."""
        said: list[Any] = list(getattr(network, "feature_info", []))[-1 - STAGES :]
        stages = [(each["module"], each["num_chs"]) for each in said[:STAGES]]
        shrinks = len({each["reduction"] for each in said}) == STAGES + 1  # a transformer of one size has no stages
        if not shrinks or getattr(network, "output_fmt", "NCHW") != "NCHW":
            wrong = f"the stages of a {type(network).__name__} give no maps that labels could be injected into"
            raise InputError("KSSNet", wrong, "choose a backbone of convolutions, such as resnet50")
        count, length = self.words.vectors.shape
        widths = [length, *(width for _, width in stages), self.project.in_features]
        self.layers = nn.ModuleList(map(make_layer, widths[:-1], widths[1:]))
        self.laterals = nn.ParameterList(torch.zeros(count, width) for _, width in stages)
        for stage, (name, _) in enumerate(stages):
            network.get_submodule(name).register_forward_hook(partial(self._inject, stage))

    def embed_labels(self, layers: int) -> Tensor:
        """States (L,C) of labels behind so many layers of the graph network, between -1 and 1."""
        state = self.words.vectors
        for number, layer in enumerate(self.layers[:layers]):
            state = layer(self.graph.edges @ (F.leaky_relu(state, 0.2) if number else state))
        return state.tanh()

    def _inject(self, stage: int, _module: nn.Module, _given: object, features: Tensor) -> Tensor:
        """A stage's map (B,C,h,w) with what labels found in it."""
        found = torch.einsum("lc,bchw->blhw", self.embed_labels(stage + 1), features)
        return features + torch.einsum("lc,blhw->bchw", self.laterals[stage], found)

    def embed(self, features: Tensor) -> Tensor:
        """Pooled map and the graph's scores (B,D+L) of a feature map (B,D,h,w)."""
        pooled = features.mean(dim=(2, 3))
        return torch.cat([pooled, pooled @ self.embed_labels(len(self.layers)).t()], dim=1)


class AddedLinear(nn.Linear):
    """A linear layer of the first D numbers of an embedding (B,D+L), added to the scores behind them."""

    def forward(self, embedding: Tensor) -> Tensor:
        """Logits (B,L)."""
        pooled, scores = embedding.split([self.in_features, self.out_features], dim=1)
        return super().forward(pooled) + scores


def make_layer(width: int, wider: int) -> nn.Sequential:
    """A layer of the graph network, of low rank."""
    rank = max(32, (width + wider) // 8)
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, wider))


def superimpose(counts: Tensor, *, own: float) -> Tensor:
    """Edges (L,L) of counts (L,L): means of P(i | j) and P(j | i), labels themselves, normalised from both sides."""
    near = find_conditionals(counts)
    near = (near + near.t()) / 2
    mixed = (1 - own) * near * (near >= LEAST) + own * torch.eye(len(counts), device=counts.device)
    scale = mixed.sum(dim=1).clamp(min=1e-12).rsqrt()  # with own=0 a label may have no neighbour at all
    return scale[:, None] * mixed * scale
