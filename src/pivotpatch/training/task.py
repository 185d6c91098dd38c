"""Tasks: model and loss as one module, so that the loop never learns the method."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from pivotpatch.core.losses import AsymmetricLoss, BinaryCrossEntropyLoss
from pivotpatch.data.augment import Augmentation
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.views import Views, make_closer_view, make_network_views
from pivotpatch.training.config import LossSection


class TaskLoss(NamedTuple):
    """What a batch costs, summed over its pictures and labels.

    Attributes:
        total: a scalar to go back from.
        parts: (K,) its summands, detached, in the order of the task's `parts`.
    """

    total: Tensor
    parts: Tensor


class Task(nn.Module):
    """A network and what it is trained for.

    Attributes:
        model: the network.
        loss: of logits (B,L) against target (B,L), summed.
        parts: names of the loss's summands.
        ranking: which of a network's logits its networks are compared by.
    """

    parts: tuple[str, ...]
    ranking: ClassVar[str]

    def __init__(self, model: Classifier, loss: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    @property
    def views_per_image(self) -> int:
        """How many views are drawn for each image, the image itself included."""
        return 1 + self.model.grid**2 if isinstance(self.model, PatchClassifier) else 1

    def make_views(self, images: Tensor, *, augmentation: Augmentation | None = None, compiled: bool = False) -> Views:
        """The views of images (B,3,h,w) uint8 from the loader, on their device."""
        return make_network_views(self.model, images, augmentation=augmentation, compiled=compiled)

    def forward(self, views: Views, target: Tensor) -> TaskLoss:
        """The loss of a batch against its target (B,L)."""
        raise NotImplementedError


class WholeImageTask(Task):
    """The baseline: loss(p, y)."""

    parts = ("image",)
    ranking = "image"

    def forward(self, views: Views, target: Tensor) -> TaskLoss:
        """Loss of the image logits."""
        cost = self.loss(self.model(views.image), target)
        return TaskLoss(cost, cost.detach()[None])


class PatchTask(Task):
    """PAT-T, equation 5: loss(p, y) + loss(q, y), unweighted, with no loss on the sum.

    A network that takes closer looks is trained for them too: by the same two losses of the larger image.
    """

    model: PatchClassifier
    parts: tuple[str, ...] = ("image", "patch")
    ranking = "tde"

    def __init__(self, model: PatchClassifier, loss: nn.Module) -> None:
        super().__init__(model, loss)
        if model.closer_size is not None:
            self.parts = (*self.parts, "closer")

    @property
    def views_per_image(self) -> int:
        """The image, its patches, and the larger image last."""
        return super().views_per_image + (self.model.closer_size is not None)

    def make_views(self, images: Tensor, *, augmentation: Augmentation | None = None, compiled: bool = False) -> Views:
        """The views of images (B,3,h,w) uint8 from the loader, on their device."""
        size, count = self.model.closer_size, len(images)
        if size is None:
            return super().make_views(images, augmentation=augmentation, compiled=compiled)
        usual = last = None
        if augmentation is not None:
            others = torch.arange(count, count * self.views_per_image).reshape(count, -1)
            usual = augmentation.select(torch.cat([torch.arange(count), others[:, :-1].flatten()]))
            last = augmentation.select(others[:, -1])
        views = super().make_views(images, augmentation=usual, compiled=compiled)
        closer = make_closer_view(self.model, images, size=size, augmentation=last, compiled=compiled)
        return views._replace(closer=closer)

    def forward(self, views: Views, target: Tensor) -> TaskLoss:
        """Loss of image and pooled patch logits, and of a closer look."""
        out = self.model.forward_views(views.image, views.patches)
        costs = [self.loss(out.image_logits, target), self.loss(out.pooled_logits, target)]
        if views.closer is not None:
            costs.append(sum(self.loss(logits, target) for logits in self.model.forward_closer(views.closer)))
        parts = torch.stack(costs)
        return TaskLoss(parts.sum(), parts.detach())


class PatchOnlyTask(Task):
    """The paper's study of image scale: loss(q, y); no whole image passes the network."""

    model: PatchClassifier
    parts = ("patch",)
    ranking = "patch"

    def __init__(self, model: PatchClassifier, loss: nn.Module) -> None:
        super().__init__(model, loss)
        model.head.project.requires_grad_(False)  # it gets no gradient, which several processes would wait for

    def forward(self, views: Views, target: Tensor) -> TaskLoss:
        """Loss of the pooled patch logits."""
        cost = self.loss(self.model.forward_patches(views.patches), target)
        return TaskLoss(cost, cost.detach()[None])


def make_loss(section: LossSection) -> nn.Module:
    """The loss that a configuration names, summed: the loop divides where a mean is wanted."""
    if section.name == "binary_cross_entropy":
        return BinaryCrossEntropyLoss()
    return AsymmetricLoss(
        gamma_neg=section.gamma_neg,
        gamma_pos=section.gamma_pos,
        clip=section.clip,
        detach_focus=section.detach_focus,
    )
