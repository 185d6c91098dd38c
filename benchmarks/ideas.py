"""Patches in feature space: the image passes the network once, and its patches are regions of the feature map.

The runs of `coco256.py`, with two more methods and one more thing that is judged:

- region: p from the whole map, q by the paper's softmax over the regions of the same map, trained as PAT-T is, by
  loss(p) + loss(q); with +joint by the loss of p + q alone;
- mldec_region: the same with ML-Decoder, whose queries look once at all places, for p, and once at each region;
- of every plain network also PAT-I with regions: nothing is trained, the head reads each region as if it were an image.

    python benchmarks/ideas.py --data table:coco256 --weights resnet50.safetensors --select --runs 224-region+flip+grid3

All networks with patches look in this way here; PAT-T itself is in `coco256.py`.
"""

import argparse
from functools import partial
from typing import Any
from unittest.mock import patch

import coco256
import torch
from torch import Tensor

from pivotpatch.data.augment import Augmentation
from pivotpatch.inference import scoring
from pivotpatch.models.classifier import Embeddings, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.views import Views, make_network_views
from pivotpatch.training import task
from pivotpatch.training.task import PatchTask

GRIDS = (2, 3)  # of PAT-I with regions
see_once = partial(make_network_views, patches=False)


def look_once(model: PatchClassifier, images: Tensor, *_: Tensor | None) -> Embeddings:
    """In the place of `PatchClassifier.embed_views`: all embeddings from one pass over images (B,C,H,W)."""
    return Embeddings(*model._embed_regions(images))


class RegionTask(PatchTask):
    """PAT-T's losses, of logits that all come from one view."""

    joint = False

    @property
    def views_per_image(self) -> int:
        """The image alone."""
        return 1

    def make_views(self, images: Tensor, *, augmentation: Augmentation | None = None, compiled: bool = False) -> Views:
        """The image alone."""
        return see_once(self.model, images, augmentation=augmentation, compiled=compiled)

    def judge(self, model: PatchClassifier, embeddings: Embeddings, target: Tensor) -> Tensor:
        """Loss of image and pooled logits, or of their sum."""
        if not self.joint:
            return super().judge(model, embeddings, target)
        cost = self.loss(model.project_embeddings(embeddings).tde_logits, target)
        return torch.stack([cost / 2, cost / 2])


def list_judged(model: Any, size: int) -> dict[str, tuple[Any, int]]:
    """What `coco256.py` judges, and PAT-I with regions."""
    judged = _list_judged(model, size)
    if isinstance(model, MultiLabelClassifier):
        for grid in GRIDS:
            judged[f"regions {grid} "] = (PatchClassifier.from_classifier(model, grid=grid), size)
    return judged


def train(name: str, seed: int, args: argparse.Namespace) -> None:
    """Train one run by the task that its name asks for."""
    RegionTask.joint = "+joint" in name
    _train(name, seed, args)


_list_judged, _train = coco256.list_judged, coco256.train

if __name__ == "__main__":
    coco256.METHODS |= {"region": coco256.PAT, "mldec_region": coco256.METHODS["mldec_pat"]}
    coco256.CHANGES |= {"grid7": ["task.grid=7"], "joint": []}
    with (
        patch.object(PatchClassifier, "embed_views", look_once),
        patch.object(scoring, "make_network_views", see_once),
        patch.object(task, "PatchTask", RegionTask),
        patch.multiple(coco256, list_judged=list_judged, train=train),
    ):
        coco256.main()
