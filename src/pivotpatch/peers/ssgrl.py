"""SSGRL (Chen et al., ICCV 2019): word vectors choose a feature for each label; a gated graph network mixes them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.models.heads import GroupProjection, Head
from pivotpatch.peers.label_priors import LabelGraph, WordVectors, find_conditionals


class SSGRLHead(Head):
    """Attention by word vectors and a gated graph network; the embedding is (B,L,W)."""

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        width: int | None = None,  # W of what a label is judged by; D by default
        attention_width: int = 1024,  # of the product of places and words
        vector_width: int = 300,  # numbers of a word vector
        steps: int = 3,  # in which messages are passed
    ) -> None:
        super().__init__()
        width = features if width is None else width
        self.steps = steps
        self.words, self.graph = WordVectors(labels, vector_width), LabelGraph(labels, find_conditionals)
        self.see = nn.Linear(features, attention_width, bias=False)
        self.read = nn.Linear(vector_width, attention_width, bias=False)
        self.mix = nn.Linear(attention_width, attention_width, bias=False)  # softmax would take no notice of a bias
        self.attend = nn.Linear(attention_width, 1, bias=False)
        self.message = nn.Linear(2 * features, 3 * features)  # of update gate, reset gate and new state
        self.state = nn.Linear(features, 3 * features)
        self.leave = nn.Linear(2 * features, width)
        self.set_projection(GroupProjection, labels, queries=labels, width=width)

    def embed(self, features: Tensor) -> Tensor:
        """What labels are judged by (B,L,W), of a feature map (B,D,h,w), whose places are pooled two by two."""
        places = F.avg_pool2d(features, 2, ceil_mode=True).flatten(2).transpose(1, 2)  # (B,N,D)
        met = (self.see(places)[:, :, None] * self.read(self.words.vectors)).tanh()
        weigh = self.attend.weight @ self.mix.weight  # both at once: spares a product for each place and label
        chosen = F.linear(met, weigh).squeeze(3).softmax(dim=1)  # (B,N,L)
        first = chosen.transpose(1, 2) @ places
        state = first
        for _ in range(self.steps):
            state = self._pass_messages(state)
        return self.leave(torch.cat([state, first], dim=2)).tanh()

    def _pass_messages(self, state: Tensor) -> Tensor:
        """Features of labels (B,L,D) after one step: a gated recurrent unit, told by both ends of each edge."""
        edges = self.graph.edges
        told = self.message(torch.cat([edges @ state, edges.t() @ state], dim=2)).chunk(3, dim=2)
        weight, bias = self.state.weight, self.state.bias
        size = state.shape[2]
        own = F.linear(state, weight[:-size], bias[:-size]).chunk(2, dim=2)
        update, reset = (torch.sigmoid(message + mine) for message, mine in zip(told[:2], own, strict=True))
        new = torch.tanh(told[2] + F.linear(reset * state, weight[-size:], bias[-size:]))
        return (1 - update) * state + update * new
