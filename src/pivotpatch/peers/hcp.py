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
        views = crop_images(images, across, down).flatten(0, 1)
        # Some after the other in evaluation, which then takes no more memory than one look at each image.
        at_once = self.training or torch.compiler.is_compiling()
        parts = [views] if at_once else views.split(images.shape[0])
        logits = torch.cat([self.head(self.backbone(part)) for part in parts])
        return logits.unflatten(0, (-1, len(SPANS))).amax(dim=1)
