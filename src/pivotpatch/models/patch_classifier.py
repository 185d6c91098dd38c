"""PAT-T's model."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from pivotpatch.core.counterfactual import CounterfactualLogits, combine_logits
from pivotpatch.core.patches import cut_views, split_views, stack_views
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import Architecture, Embeddings, MultiLabelClassifier, SharedClassifier
from pivotpatch.models.heads import project_embedding
from pivotpatch.runtime.values import Patching, check_views, patch_boxes

PAPER = Patching()
"""The paper's way: 2 x 2 patches of the image that the model sees, lam 1."""


class PatchClassifier(SharedClassifier):
    """PAT-T's network: one backbone, and image, patch and weight logits from projections of their own.

    For the decoder heads the decoder is shared and only the last projection is tripled.

    Attributes:
        patching: how it cuts and mixes its patches. `forward` takes the image of `source_size` as `source`; efforts
            between 0 and 1 take a closer look of `closer_size`, `project_closer`, in the place of the patches;
            `set_mixing` changes `lam` and `temperature`.
        patch_only: whether it was trained without the whole image, for the study of scale: then its image logits,
            and all that is mixed from them, mean nothing.
        regions: whether its patches are regions of the image's feature map, `grid` per side: then one pass over the
            image is all that it takes, and patches are not blind to what lies around them.
    """

    projections = ("patch_projection", "weight_projection")
    patching: Patching
    patch_projection: nn.Module
    weight_projection: nn.Module

    def __init__(
        self,
        backbone: str | Architecture,
        labels: Sequence[str],
        *,
        head: str = "linear",
        image_size: int | None = None,
        pretrained: bool = False,
        weights: str | Path | None = None,
        patching: Patching = PAPER,
        patch_only: bool = False,
        regions: bool = False,
    ) -> None:
        """Build a model; how it cuts and weighs its patches is the paper's way by default."""
        super().__init__(backbone, labels, head=head, image_size=image_size, pretrained=pretrained, weights=weights)
        seen, source, small = self.preprocessing.image_size, patching.source_size, patching.patch_size
        if source is not None and source < seen:
            todo = f"give a side of {seen} pixels, which the model sees, or more, or None for the resized image"
            raise InputError("PatchClassifier", f"source_size is {source!r}", todo)
        if small is not None and not 1 <= small <= seen:
            todo = f"give a side of at most {seen} pixels, at which the model sees the image, or None for that"
            raise InputError("PatchClassifier", f"patch_size is {small!r}", todo)
        if regions and (source is not None or small is not None or patch_only):
            wrong = "regions of the feature map have no source_size or patch_size, and are not seen alone (patch_only)"
            raise InputError("PatchClassifier", wrong, "leave these out, or regions")
        if not regions:
            check_views(seen, patching, where="PatchClassifier")
        if patching.closer_size is not None:
            self.closer_cost(patching.closer_size)  # refuses one that is none
        self.patching, self.patch_only, self.regions = patching, patch_only, regions

    @classmethod
    def from_classifier(
        cls,
        trained: MultiLabelClassifier,
        *,
        patching: Patching = PAPER,
        patch_only: bool = False,
        regions: bool = False,
    ) -> "PatchClassifier":
        """Start PAT-T from an ordinary network: its projection is copied three times.

        Before any further training the result is what PAT-I makes of `trained`, which is left alone.
        """
        with torch.random.fork_rng(devices=[]):  # what is drawn here is replaced at once
            model = cls(trained.architecture, trained.labels, patching=patching, patch_only=patch_only, regions=regions)
        model.preprocessing = trained.preprocessing
        model.backbone, model.head = deepcopy((trained.backbone, trained.head))  # at once: they may be connected
        model.patch_projection = deepcopy(trained.head.project)
        model.weight_projection = deepcopy(trained.head.project)
        return model.train(trained.training)

    def set_mixing(self, *, lam: float, temperature: float) -> None:
        """Mix image and patches with other numbers; forgets what was fitted to the old probabilities."""
        self.patching = replace(self.patching, lam=lam, temperature=temperature)  # refuses what is none
        self.thresholds = self.calibration = self.adaptive = None

    @property
    def picture_size(self) -> int:
        """Rows and columns of the images that a loader is to give: those that patches are cut from."""
        return self.patching.source_size or super().picture_size

    @property
    def patch_cost(self) -> float:
        """What the patches of a image cost, in passes over an image: pixels are what costs."""
        image = self.preprocessing.image_size
        return 0.0 if self.regions else (self.patching.grid * (self.patching.patch_size or image) / image) ** 2

    def closer_cost(self, size: int) -> float:
        """What a closer look costs with images of so many rows and columns, in passes over an image."""
        image = self.preprocessing.image_size
        if size <= image:
            wrong = f"a closer look at {size} pixels is no closer than the {image} of the first"
            raise InputError("PatchClassifier", wrong, f"give more than {image}, about {image * 3 // 2}")
        if self.backbone.fixed_size is not None:
            raise InputError("PatchClassifier", "the backbone takes images of one size only", "look at patches instead")
        return (size / image) ** 2

    def forward(self, images: Tensor, *, source: Tensor | None = None) -> CounterfactualLogits:
        """All logits of preprocessed images.

        Args:
            images: (B,C,H,W), what the model sees.
            source: the same images, larger, to cut the patches from; `images` by default.
        """
        if self.regions:
            return self.project_embeddings(Embeddings(*self.embed_regions(images)))
        return self.forward_views(images, cut_views(self.patching, images, source=source))

    def forward_views(self, images: Tensor, patches: Tensor) -> CounterfactualLogits:
        """All logits of views that were cut before; images (B,C,H,W), patches (B,P,C,h,w)."""
        return self.project_embeddings(self.embed_views(images, patches))

    def embed_views(self, images: Tensor, patches: Tensor, closer: Tensor | None = None) -> Embeddings:
        """Embeddings of views that were cut before: the passes over the backbone, and nothing behind them.

        One pass over all of them, or where patches are smaller one over the images and one over the patches; another
        one over the closer look, whose patches are cut from its feature map. A model of `regions` sees no patches.

        Args:
            images: (B,C,H,W), preprocessed.
            patches: (B,P,C,h,w), likewise.
            closer: the same images (B,C,S,S), larger; None for no closer look.
        """
        if self.regions:
            seen = Embeddings(*self.embed_regions(images))
        elif patches.shape[3:] != images.shape[2:]:
            seen = Embeddings(self.embed_images(images), self.embed_patches(patches))
        else:
            seen = Embeddings(*split_views(self.embed_images(stack_views(images, patches)), patches=patches.shape[1]))
        return seen if closer is None else Embeddings(*seen[:2], *self.embed_regions(closer))

    def embed_patches(self, patches: Tensor) -> Tensor:
        """Embeddings (B,P,...) of preprocessed patches (B,P,C,h,w)."""
        return _for_each(patches, self.embed_images)

    def embed_regions(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (B,...) of images (B,C,H,W), and (B,P,...) of regions of their feature maps."""
        features = self.backbone(images)
        boxes = patch_boxes(*features.shape[-2:], grid=self.patching.grid, overlap=self.patching.overlap)
        return self.head.embed_regions(features, boxes)

    def project_embeddings(self, embeddings: Embeddings) -> CounterfactualLogits:
        """All logits of embeddings of images and their patches."""
        assert embeddings.patches is not None
        return self.combine(project_embedding(self.head.project, embeddings.image), embeddings.patches)

    def project_closer(self, embeddings: Embeddings) -> CounterfactualLogits:
        """All logits of embeddings of images that were seen once more, larger, in the place of their patches.

        One pass over the larger image stands for all of its patches, which are cut from its feature map: they cost
        `closer_cost`, not `patch_cost`, but are not blind to what lies around them. The image logits are the mean of
        both looks at the whole image.
        """
        assert embeddings.closer is not None
        assert embeddings.closer_patches is not None
        first = project_embedding(self.head.project, embeddings.image)
        return self.combine_closer(first, embeddings.closer, embeddings.closer_patches)

    def forward_patches(self, patches: Tensor) -> Tensor:
        """Pooled logits q (B,L) of patches (B,P,C,H,W) alone, for the study of scale; no whole image is seen."""
        parts = self.embed_patches(patches)
        return self.combine(parts.new_zeros(len(parts), len(self.labels)), parts).pooled_logits

    def combine_closer(self, image_logits: Tensor, closer: Tensor, parts: Tensor) -> CounterfactualLogits:
        """As `project_closer`, from image logits (B,L) of the first look and the embeddings of the closer one."""
        return self.combine((image_logits + project_embedding(self.head.project, closer)) / 2, parts)

    def combine(self, image_logits: Tensor, parts: Tensor) -> CounterfactualLogits:
        """All logits, from image logits (B,L) and the embeddings (B,P,...) of patches."""
        return combine_logits(
            image_logits,
            _for_each(parts, partial(project_embedding, self.patch_projection)),
            weight_logits=_for_each(parts, partial(project_embedding, self.weight_projection)),
            lam=self.patching.lam,
            temperature=self.patching.temperature,
        )


def _for_each(parts: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """What a function says (B,P,...) of each of parts (B,P,...)."""
    return function(parts.flatten(0, 1)).unflatten(0, parts.shape[:2])
