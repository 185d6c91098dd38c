"""Patches in feature space: the image passes the network once, and its patches are regions of the feature map.

The runs of `coco256.py`, with two more methods and one more thing that is judged:

- region+joint: the method region of `coco256.py` (`task.regions`) trained by the loss of p + q alone;
- mldec_region: regions with ML-Decoder, whose queries look once at all places, for p, and once at each region;
- of every plain network also PAT-I with regions: nothing is trained, the head reads each region as if it were an image.

    python benchmarks/ideas.py --data table:coco256 --weights resnet50.safetensors --select --runs 224-region+flip+joint
"""

import argparse
from typing import Any
from unittest.mock import patch

import coco256
import torch
from torch import Tensor

from pivotpatch.models.classifier import Embeddings, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training import task
from pivotpatch.training.task import PatchTask

GRIDS = (2, 3)  # of PAT-I with regions


class JointTask(PatchTask):
    """The loss of the sum of image and pooled logits, in two halves."""

    def judge(self, model: PatchClassifier, embeddings: Embeddings, target: Tensor) -> Tensor:
        """Losses (2,) of the sum."""
        cost = self.loss(model.project_embeddings(embeddings).tde_logits, target)
        return torch.stack([cost / 2, cost / 2])


def list_judged(model: Any, size: int) -> dict[str, tuple[Any, int]]:
    """What `coco256.py` judges, and PAT-I with regions."""
    judged = _list_judged(model, size)
    if isinstance(model, MultiLabelClassifier):
        for grid in GRIDS:
            judged[f"regions {grid} "] = (PatchClassifier.from_classifier(model, grid=grid, regions=True), size)
    return judged


def train(name: str, seed: int, args: argparse.Namespace) -> None:
    """Train one run by the task that its name asks for."""
    with patch.object(task, "PatchTask", JointTask if "+joint" in name else PatchTask):
        _train(name, seed, args)


_list_judged, _train = coco256.list_judged, coco256.train

if __name__ == "__main__":
    coco256.METHODS["mldec_region"] = [*coco256.METHODS["region"], "model.head=ml_decoder"]
    coco256.CHANGES["joint"] = []
    with patch.multiple(coco256, list_judged=list_judged, train=train):
        coco256.main()
