"""MCAR (Gao and Zhou, IEEE TIP 2021): the four most likely labels are cut out, enlarged and seen again.

Like PAT it costs five passes, but crops go where the first look already was. What is assumed: docs/peers.md.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from pivotpatch.core.patches import crop_images
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import MultiLabelClassifier

CROPS = 4
LEVEL = 0.5
"""Of a profile that goes from 0 to 1, above which a crop reaches."""
LEAST = 0.125
"""Smallest side of a crop, as a share of the image's."""


class MCARClassifier(MultiLabelClassifier):
    """A model that looks at an image (B,C,H,W), then at crops of it, with the same weights."""

    def _build(self, *, pretrained: bool, weights: Path | None) -> None:
        if self.architecture.head not in ("linear", "max"):
            wrong = f"the head is {self.architecture.head}, which has no activation maps"
            raise InputError("MCAR", wrong, "give model.head=linear or max")
        super()._build(pretrained=pretrained, weights=weights)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B,L) of preprocessed images (B,C,H,W): the largest of the image's and its crops'."""
        return torch.maximum(*self.forward_both(images))

    def forward_both(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B,L) of images (B,C,H,W), and the largest of those of their crops."""
        features = self.backbone(images)
        whole = self.head(features)
        with torch.no_grad():
            named = whole.topk(min(CROPS, whole.shape[1]), dim=1).indices  # (B,N)
            weight, bias = (self.head.project.get_parameter(name) for name in ("weight", "bias"))
            maps = torch.einsum("bnd,bdhw->bnhw", weight[named], features) + bias[named][..., None, None]
            large = F.interpolate(maps.float().sigmoid(), size=images.shape[2:], mode="bilinear", align_corners=False)
            across, down = find_interval(large.amax(dim=2)), find_interval(large.amax(dim=3))
            crops = crop_images(images, across, down)
        local = self.head(self.backbone(crops.flatten(0, 1))).unflatten(0, named.shape)
        return whole, local.amax(dim=1)


def find_interval(profile: Tensor) -> Tensor:
    """Where a crop begins and ends (...,2), as shares of a side, by profiles (...,S) of activation along it.

    It is the stretch around the peak that stays above `LEVEL` of the profile's range, at least `LEAST` long; of a flat
    profile, the middle three quarters.

    >>> find_interval(torch.tensor([0.0, 0.1, 0.9, 1.0, 0.2, 0.8, 0.0, 0.0])).tolist()
    [0.25, 0.5]
    """
    low, high = profile.amin(dim=-1, keepdim=True), profile.amax(dim=-1, keepdim=True)
    size, flat = profile.shape[-1], high - low < 1e-6
    below = (profile - low) / (high - low).clamp(min=1e-6) < LEVEL
    place, peak = torch.arange(size, device=profile.device), profile.argmax(dim=-1, keepdim=True)
    begin = torch.where(below & (place < peak), place + 1, 0).amax(dim=-1) / size
    end = torch.where(below & (place > peak), place, size).amin(dim=-1) / size
    middle, half = (begin + end) / 2, (end - begin).clamp(min=LEAST) / 2
    middle = middle.clamp(min=half, max=1 - half)
    found = torch.stack([middle - half, middle + half], dim=-1)
    return torch.where(flat, found.new_tensor([LEAST, 1 - LEAST]), found)
