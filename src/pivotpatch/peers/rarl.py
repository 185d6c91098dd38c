"""After RARL (Chen et al., AAAI 2018): an LSTM looks at regions around places that it chooses; see docs/peers.md.

A place is drawn in training, and its choice rewarded by the share of present labels that the logits rank first, less
the batch's mean; else it is the expected one.
"""

import torch
from torch import Tensor, nn

from pivotpatch.models.heads import Head
from pivotpatch.peers.cnn_rnn import LargestScores
from pivotpatch.peers.rdal import look_at

HALVES = (0.3, 0.6, 1.0)
"""Half the sides of regions; 1 is half the map's."""
SPREAD = 0.2
"""Standard deviation of a drawn place, where -1 and 1 are the map's borders."""


class RARLHead(Head):
    """An LSTM that chooses where to look; the embedding (B,S,W) is what labels are scored by after each of S looks."""

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        hidden: int = 512,  # W, state of the LSTM
        steps: int = 5,  # S looks
        side: int = 3,  # places per side that a region is sampled at
    ) -> None:
        super().__init__()
        self.steps, self.side = steps, side
        self.cell = nn.LSTMCell(features, hidden)
        self.leave = nn.Linear(hidden, hidden)
        self.locate = nn.Linear(hidden, 2)
        self.set_projection(LargestScores, hidden, labels)

    def embed(self, features: Tensor) -> Tensor:
        """What labels are scored by (B,S,W), of a feature map (B,D,h,w), at the places that are expected."""
        found, likelihood = self.walk(features)
        return found + 0 * likelihood[:, None, None]  # so that every weight has a gradient, which processes wait for

    def walk(self, features: Tensor, *, spread: float = 0.0) -> tuple[Tensor, Tensor]:
        """What labels are scored by (B,S,W), of a feature map (B,D,h,w), and how likely the way there was.

        Args:
            features: (B,D,h,w).
            spread: standard deviation of places, which are drawn where it is above 0.

        Returns:
            (B,S,W), and the logarithm (B,) of the likelihood of all places, but for a constant.
        """
        place, found = features.new_zeros(features.shape[0], 2), list[Tensor]()
        state: tuple[Tensor, Tensor] | None = None
        likelihood = features.new_zeros(features.shape[0])
        for number in range(self.steps):
            glimpses = [look_at(features, torch.full_like(place, half), place, side=self.side) for half in HALVES]
            state = self.cell(torch.stack(glimpses).mean(dim=0), state)
            found.append(self.leave(state[0]).relu())
            if number + 1 < self.steps:
                expected = self.locate(found[-1].detach()).tanh().to(place.dtype)
                drawn = spread * torch.randn_like(expected) if spread else 0.0
                place = (expected + drawn).detach()
                likelihood = likelihood - (place - expected).square().sum(dim=1) / (2 * SPREAD**2)
        return torch.stack(found, dim=1), likelihood


def find_reward(logits: Tensor, target: Tensor) -> Tensor:
    """Share (B,) of an image's n present labels that are among its n highest logits (B,L); 0 where it has none.

    Labels of which nothing is known take no part.

    >>> find_reward(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[torch.nan, 1.0, 0.0, 1.0]]))
    tensor([0.5000])
    """
    present = target.nan_to_num(0) > 0
    count = present.sum(dim=1)
    rank = logits.masked_fill(target.isnan(), -torch.inf).argsort(dim=1, descending=True).argsort(dim=1)
    return (present & (rank < count[:, None])).sum(dim=1) / count.clamp(min=1)
