"""After RDAL (Wang et al., ICCV 2017): a spatial transformer cuts regions, an LSTM reads them; see docs/peers.md."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.models.heads import Head
from pivotpatch.peers.cnn_rnn import LargestScores

ANCHORS = ((0.0, 0.0), (-0.5, -0.5), (0.5, -0.5), (-0.5, 0.5), (0.5, 0.5))
"""Centres x, y of regions before they are moved; -1 and 1 are the map's borders. The first is the whole map."""


class RDALHead(Head):
    """An LSTM that looks at regions; the embedding (B,5,W) is what labels are scored by after each look."""

    def __init__(
        self,
        features: int,
        labels: int,
        *,
        hidden: int = 512,  # W, state of the LSTM
        side: int = 3,  # places per side that a region is sampled at
    ) -> None:
        super().__init__()
        self.side = side
        self.cell = nn.LSTMCell(features, hidden)
        self.leave = nn.Linear(hidden, hidden)
        self.locate = nn.Linear(hidden, 4)
        self.set_projection(LargestScores, hidden, labels)
        self.register_buffer("anchors", torch.tensor(ANCHORS), persistent=False)
        self.anchors: Tensor

    def embed(self, features: Tensor) -> Tensor:
        """What labels are scored by (B,5,W), of a feature map (B,D,h,w)."""
        glimpse, found = features.mean(dim=(2, 3)), list[Tensor]()
        state: tuple[Tensor, Tensor] | None = None
        for number in range(len(ANCHORS)):
            state = self.cell(glimpse, state)
            found.append(self.leave(state[0]).relu())
            if number + 1 < len(ANCHORS):
                region = self.locate(found[-1])
                half, centre = region[:, :2].sigmoid(), self.anchors[number + 1] + region[:, 2:].tanh() / 2
                glimpse = look_at(features, half, centre, side=self.side)
        return torch.stack(found, dim=1)


def look_at(features: Tensor, half: Tensor, centre: Tensor, *, side: int) -> Tensor:
    """Mean of a region of a feature map; -1 and 1 are the map's borders, beyond which it goes on as there.

    Args:
        features: (B,D,h,w).
        half: (B,2) of its width and height.
        centre: (B,2) x and y.
        side: places per side that it is sampled at.

    Returns:
        (B,D).
    """
    steps = (torch.arange(side, device=features.device) + 0.5) * (2 / side) - 1
    columns, rows = (centre[:, axis, None] + half[:, axis, None] * steps for axis in (0, 1))  # (B,side)
    places = torch.stack([columns[:, None].expand(-1, side, -1), rows[:, :, None].expand(-1, -1, side)], dim=3)
    sampled = F.grid_sample(features, places.to(features.dtype), align_corners=False, padding_mode="border")
    return sampled.mean(dim=(2, 3))
