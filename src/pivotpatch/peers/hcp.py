"""After HCP (Wei et al., TPAMI 2016): one model looks at many windows; a logit is the largest of theirs.

So a label needs one window that shows it, and nothing around it. What is assumed: docs/peers.md.
"""

from itertools import product

import torch
from torch import Tensor

from pivotpatch.core.patches import crop_images
from pivotpatch.models.classifier import MultiLabelClassifier

SIZES = ((1, 1.0), (2, 2 / 3), (3, 1 / 2))
"""Windows per side and their side, as a part of the image's: evenly spread from border to border."""
SPANS = tuple(
    (row * (1 - side) / max(count - 1, 1), column * (1 - side) / max(count - 1, 1), side)
    for count, side in SIZES
    for row, column in product(range(count), range(count))
)
"""Top, left and side of each window."""


class HCPClassifier(MultiLabelClassifier):
    """A model that looks at windows of an image (B,C,H,W), each enlarged to its size."""

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B,L) of preprocessed images (B,C,H,W): the largest of those of windows."""
        top, left, side = images.new_tensor(SPANS).t()
        across, down = (
            torch.stack([first, first + side], dim=1).expand(images.shape[0], -1, -1) for first in (left, top)
        )
        windows = crop_images(images, across, down)
        logits: Tensor = self.head(self.backbone(windows.flatten(0, 1))).unflatten(0, windows.shape[:2])
        return logits.amax(dim=1)
