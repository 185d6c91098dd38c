"""After CNN-RNN: labels named one after the other by a recurrent network (Wang et al., CVPR 2016).

At each step an LSTM reads the label that was named last. What it says and the pooled image together score all labels by
their embeddings; the highest that was not named before is named next. A logit is the largest score of all steps.
Assumed: four steps, labels named greedily, and the loss of the largest scores, where the paper trains on sequences in
the order of frequency and searches with a beam.
"""

import math

import torch
from torch import Tensor, nn

from pivotpatch.models.heads import Head


class CNNRNNHead(Head):
    """An LSTM that names labels; the embedding (B,S,W) is what labels are scored by at each of S steps."""

    project: "LargestScores"

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        width: int = 64,  # W of label embeddings
        hidden: int = 512,  # state of the LSTM
        steps: int = 4,  # S, or fewer where there are fewer labels
    ) -> None:
        super().__init__()
        self.steps = min(steps, labels)
        self.see = nn.Linear(features, width)
        self.cell = nn.LSTMCell(width, hidden)
        self.leave = nn.Linear(hidden, width)
        self.project = LargestScores(labels, width)

    def embed(self, features: Tensor) -> Tensor:
        """What labels are scored by (B,S,W), of a feature map (B,D,h,w)."""
        image = self.see(features.mean(dim=(2, 3)))
        given, found = torch.zeros_like(image), list[Tensor]()
        state: tuple[Tensor, Tensor] | None = None
        named = image.new_zeros(image.shape[0], self.project.weight.shape[0])
        for _ in range(self.steps):
            state = self.cell(given, state)
            found.append((self.leave(state[0]) + image).relu())
            with torch.no_grad():
                best = self.project.score(found[-1]).masked_fill(named > 0, -torch.inf).argmax(dim=1)
            named = named.scatter(1, best[:, None], 1.0)
            given = self.project.weight[best].to(image.dtype)
        return torch.stack(found, dim=1)


class LargestScores(nn.Module):
    """Logits (B,L), the largest over steps of linear scores of embeddings (B,S,W)."""

    def __init__(self, labels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(labels, width))
        self.bias = nn.Parameter(torch.zeros(labels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def score(self, embedding: Tensor) -> Tensor:
        """Scores (...,L) of embeddings (...,W)."""
        return nn.functional.linear(embedding, self.weight, self.bias)

    def forward(self, embedding: Tensor) -> Tensor:
        """Logits (B,L) of embeddings (B,S,W)."""
        return self.score(embedding).amax(dim=1)
