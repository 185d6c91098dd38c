"""After CNN-RNN (Wang et al., CVPR 2016): an LSTM names labels one after the other; docs/peers.md says what is assumed.

At each step it reads the label that was named last and, with the pooled image, scores all; the largest score counts.
"""

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
        self.set_projection(LargestScores, width, labels)

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


class LargestScores(nn.Linear):
    """A linear layer whose logits (B,L) are the largest over steps of embeddings (B,S,W)."""

    def score(self, embedding: Tensor) -> Tensor:
        """Scores (...,L) of embeddings (...,W)."""
        return super().forward(embedding)

    def forward(self, embedding: Tensor) -> Tensor:
        """Logits (B,L) of embeddings (B,S,W)."""
        return self.score(embedding).amax(dim=1)
