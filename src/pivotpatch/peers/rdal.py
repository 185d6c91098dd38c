"""After RDAL: recurrently discovered attentional regions (Wang et al., ICCV 2017).

A spatial transformer cuts a region out of the feature map, an LSTM reads it, scores labels and says where to look next.
A logit is the largest score of all steps. Assumed: the first look is at the whole map and counts too; each region stays
within half a side of an anchor of its own, where the paper has losses that spread regions; five looks.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.models.heads import Head
from pivotpatch.peers.cnn_rnn import LargestScores

ANCHORS = ((0.0, 0.0), (-0.5, -0.5), (0.5, -0.5), (-0.5, 0.5), (0.5, 0.5))
"""Centres x, y of regions before they are moved; -1 and 1 are the map's borders. The first is the whole map."""


class RDALHead(Head):
    """An LSTM that looks at regions; the embedding (B,5,W) is what labels are scored by after each look."""

    def __init__(self, features: int, labels: int, *, hidden: int = 512, side: int = 3) -> None:
        """Build one.

        Args:
            features: channels D of the feature map.
            labels: how many.
            hidden: W, state of the LSTM.
            side: places per side that a region is sampled at.
        """
        super().__init__()
        self.side = side
        self.cell = nn.LSTMCell(features, hidden)
        self.leave = nn.Linear(hidden, hidden)
        self.locate = nn.Linear(hidden, 4)
        self.project = LargestScores(labels, hidden)
        self.register_buffer("anchors", torch.tensor(ANCHORS), persistent=False)
        self.anchors: Tensor

    def embed(self, features: Tensor) -> Tensor:
        """What labels are scored by (B,5,W), of a feature map (B,D,h,w)."""
        glimpse, state, found = features.mean(dim=(2, 3)), None, list[Tensor]()
        for number in range(len(ANCHORS)):
            state = self.cell(glimpse, state)
            found.append(self.leave(state[0]).relu())
            if number + 1 < len(ANCHORS):
                region = self.locate(found[-1])
                half, centre = region[:, :2].sigmoid(), self.anchors[number + 1] + region[:, 2:].tanh() / 2
                glimpse = self._look(features, half, centre)
        return torch.stack(found, dim=1)

    def _look(self, features: Tensor, half: Tensor, centre: Tensor) -> Tensor:
        """Mean (B,D) of a region of a map (B,D,h,w), with half its sides (B,2) around a centre (B,2)."""
        steps = (torch.arange(self.side, device=features.device) + 0.5) * (2 / self.side) - 1
        columns, rows = (centre[:, axis, None] + half[:, axis, None] * steps for axis in (0, 1))  # (B,side)
        across = columns[:, None].expand(-1, self.side, -1)
        down = rows[:, :, None].expand(-1, -1, self.side)
        places = torch.stack([across, down], dim=3).to(features.dtype)
        return F.grid_sample(features, places, align_corners=False, padding_mode="border").mean(dim=(2, 3))
