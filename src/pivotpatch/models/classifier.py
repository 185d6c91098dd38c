"""Multi-label classifiers: a backbone and a head, with one projection or with PAT-T's three."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from pivotpatch.core.counterfactual import CounterfactualLogits, check_lam, check_temperature, combine_logits
from pivotpatch.core.errors import InputError
from pivotpatch.core.patches import check_grid, check_images, check_source, cut_patches, split_views, stack_views
from pivotpatch.models.backbone import Backbone, BackboneOption
from pivotpatch.models.heads import HeadOption, make_head
from pivotpatch.models.preprocessing import Preprocessing


@dataclass(frozen=True)
class Architecture:
    """What must be known to build a network again before its weights are loaded.

    Attributes:
        backbone: a timm model's name.
        head: "linear", "query2label" or "ml_decoder".
        image_size: rows and columns of the images; the backbone's own where None.
        backbone_options: further arguments of timm's constructor.
        head_options: keyword arguments of the head's class.
    """

    backbone: str
    head: str = "linear"
    image_size: int | None = None
    backbone_options: Mapping[str, BackboneOption] = field(default_factory=dict)
    head_options: Mapping[str, HeadOption] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """In plain types, for JSON."""
        return asdict(self)


class Classifier(nn.Module):
    """What both kinds of network share: a backbone, a head, and what they know of their labels.

    Attributes:
        architecture: what it was built from.
        labels: names of the L labels, in the order of the logits.
        preprocessing: what must be done to pictures first.
        thresholds: probabilities above which each label is given, where they were fitted.
    """

    def __init__(
        self,
        backbone: str | Architecture,
        labels: Sequence[str],
        *,
        head: str = "linear",
        image_size: int | None = None,
        pretrained: bool = False,
        weights: str | Path | None = None,
    ) -> None:
        """Build a network.

        Args:
            backbone: a timm model's name, or a whole `Architecture`, which then says head and size.
            labels: names of the L labels.
            head: "linear", "query2label" or "ml_decoder".
            image_size: rows and columns of the images; the backbone's own by default.
            pretrained: fetch timm's weights for the backbone from the hub.
            weights: a local file of weights for the backbone instead.
        """
        super().__init__()
        if isinstance(labels, str) or not labels or len(set(labels)) != len(labels) or "" in labels:
            raise InputError("labels", f"{labels!r} are not different names", "give a list of one name a label")
        if isinstance(backbone, Architecture) and (head != "linear" or image_size is not None):
            wrong = f"an Architecture is given, and head {head!r} and image_size {image_size} besides"
            raise InputError(type(self).__name__, wrong, "say them in the Architecture")
        chosen = backbone if isinstance(backbone, Architecture) else Architecture(backbone, head, image_size)
        self.architecture = chosen
        self.labels = tuple(labels)
        self.backbone = Backbone(
            chosen.backbone,
            image_size=chosen.image_size,
            options=chosen.backbone_options,
            pretrained=pretrained,
            weights=weights,
        )
        self.head = make_head(
            chosen.head, features=self.backbone.features, labels=len(labels), options=chosen.head_options
        )
        self.preprocessing: Preprocessing = self.backbone.preprocessing
        self.thresholds: tuple[float, ...] | None = None


class MultiLabelClassifier(Classifier):
    """An ordinary multi-label network: images (B,C,H,W) in, logits (B,L) out.

    Example:
        model = MultiLabelClassifier("resnet101", ["cat", "dog"], pretrained=True)
        logits = model(model.preprocessing(picture)[None])
    """

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B,L) of preprocessed images (B,C,H,W)."""
        logits: Tensor = self.head(self.backbone(images))
        return logits


class PatchClassifier(Classifier):
    """PAT-T's network: one backbone, and image, patch and weight logits from projections of their own.

    For the decoder heads the decoder is shared and only the last projection is tripled.

    Attributes:
        grid: patches per side.
        lam: weight of the direct effect.
        temperature: of the patch weights.
    """

    def __init__(
        self,
        backbone: str | Architecture,
        labels: Sequence[str],
        *,
        head: str = "linear",
        image_size: int | None = None,
        pretrained: bool = False,
        weights: str | Path | None = None,
        grid: int = 2,
        lam: float = 1.0,
        temperature: float = 1.0,
    ) -> None:
        """Build a network; `grid`, `lam` and `temperature` are the paper's by default."""
        check_grid(grid, "PatchClassifier")
        check_lam(lam, "PatchClassifier")
        check_temperature(temperature, "PatchClassifier")
        super().__init__(backbone, labels, head=head, image_size=image_size, pretrained=pretrained, weights=weights)
        self.patch_projection = self.head.make_projection()
        self.weight_projection = self.head.make_projection()
        self.grid = grid
        self.lam = lam
        self.temperature = temperature

    @classmethod
    def from_classifier(
        cls, trained: MultiLabelClassifier, *, grid: int = 2, lam: float = 1.0, temperature: float = 1.0
    ) -> "PatchClassifier":
        """Start PAT-T from an ordinary network: its projection is copied three times.

        Before any further training the result is what PAT-I makes of `trained`, which is left alone.
        """
        with torch.random.fork_rng(devices=[]):  # what is drawn here is replaced at once
            model = cls(trained.architecture, trained.labels, grid=grid, lam=lam, temperature=temperature)
        model.preprocessing = trained.preprocessing
        model.backbone = deepcopy(trained.backbone)
        model.head = deepcopy(trained.head)
        model.patch_projection = deepcopy(trained.head.project)
        model.weight_projection = deepcopy(trained.head.project)
        return model.train(trained.training)

    def forward(self, images: Tensor, *, source: Tensor | None = None) -> CounterfactualLogits:
        """All logits of preprocessed images.

        Args:
            images: (B,C,H,W), what the network sees.
            source: the same images, larger, to cut the patches from; `images` by default.
        """
        check_images(images, "PatchClassifier")
        if source is not None:
            check_source(images, source, "PatchClassifier")
        size = (images.shape[-2], images.shape[-1])
        return self.forward_views(images, cut_patches(images if source is None else source, grid=self.grid, size=size))

    def forward_views(self, images: Tensor, patches: Tensor) -> CounterfactualLogits:
        """All logits of views that were cut before, in one pass; images (B,C,H,W), patches (B,P,C,H,W)."""
        embedding = self.head.embed(self.backbone(stack_views(images, patches)))
        whole, parts = split_views(embedding, patches=patches.shape[1])
        flat, rows = parts.flatten(0, 1), parts.shape[:2]
        return combine_logits(
            self.head.project(whole),
            self.patch_projection(flat).unflatten(0, rows),
            weight_logits=self.weight_projection(flat).unflatten(0, rows),
            lam=self.lam,
            temperature=self.temperature,
        )
