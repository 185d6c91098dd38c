"""Your evaluation loop with PAT-I in it: the lines marked + are all that changes.

Run it as it is (random pictures and an untrained network), then put your own in their places.
"""

import torch
from torch import Tensor
from torchvision.models import mobilenet_v3_small

from pivotpatch import PatchInference, average_precision  # +


def batches() -> list[tuple[Tensor, Tensor]]:
    """Your loader: preprocessed images (B,3,H,W) and targets (B,L)."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(8, 3, 128, 128, generator=generator)
    return [(images[i : i + 4], (images[i : i + 4, :, 0, 0] > 0.5).float()) for i in (0, 4)]


model = mobilenet_v3_small(num_classes=3).eval()  # your trained model
pat = PatchInference(model)  # +

scores, targets = [], []
with torch.inference_mode():
    for images, target in batches():
        # logits = model(images)                   -
        logits = pat(images).tde_logits  # +
        scores.append(logits)
        targets.append(target)

print(average_precision(torch.cat(scores), torch.cat(targets), labels=["bench", "cat", "dog"]))
