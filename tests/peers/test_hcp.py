"""HCP, one window at a time, and the hinge loss of VGG + SVM."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pivotpatch import load_checkpoint, save_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.peers.hcp import SPANS, HCPClassifier
from pivotpatch.peers.svm import SquaredHingeLoss
from pivotpatch.training.config import load_config
from pivotpatch.training.task import make_task

LABELS = ["a", "b", "c"]


def test_a_logit_is_the_largest_of_all_windows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, images = HCPClassifier("test_resnet", LABELS, image_size=96).eval(), torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        model.head.project.weight.mul_(20)  # type: ignore[operator]
        found = model(images)
        for image, logits in zip(images, found, strict=True):
            padded = F.pad(image[None], (2, 2, 2, 2), mode="replicate")
            said = [MultiLabelClassifier.forward(model, image[None])[0]]
            for side, tops in ((64, (0, 32)), (48, (0, 24, 48))):  # two thirds and a half of 96 pixels
                for top in tops:
                    for left in tops:
                        around = padded[..., top : top + side + 4, left : left + side + 4]
                        large = F.interpolate(around, scale_factor=96 / side, mode="bilinear", align_corners=False)
                        edge = (large.shape[-1] - 96) // 2
                        window = large[..., edge : edge + 96, edge : edge + 96]
                        said.append(MultiLabelClassifier.forward(model, window)[0])
            torch.testing.assert_close(logits, torch.stack(said).amax(dim=0), rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(model(image[None])[0], logits, rtol=1e-3, atol=1e-4)
        assert len(said) == len(SPANS) == 14
        assert (found - torch.cat([MultiLabelClassifier.forward(model, image[None]) for image in images])).max() > 1e-2
    save_checkpoint(model, tmp_path / "model")
    loaded = load_checkpoint(tmp_path / "model")
    assert isinstance(loaded, HCPClassifier)
    torch.testing.assert_close(loaded(images), model(images))
    sizes = list[int]()
    with model.backbone.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0]))):
        model(images)
        assert sizes == [len(images)] * len(SPANS)  # no more in memory than one look at each
        model.train()(images)
        assert sizes[len(SPANS) :] == [len(images) * len(SPANS)]
    task = make_task(model, load_config(None, ["task.kind=windows"]))
    views = task.make_views(torch.randint(256, (2, 3, 96, 96), dtype=torch.uint8))
    target = torch.randint(2, (2, 3)).float()
    torch.testing.assert_close(task(views, target), task.loss(model(views.image), target)[None])


def test_the_hinge_is_that_of_support_vector_machines() -> None:
    logits = torch.tensor([[2.0, 0.5, -3.0], [0.0, -0.5, 9.0]])
    target = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, float("nan")]])
    assert SquaredHingeLoss()(logits, target).item() == pytest.approx(0 + 0.25 + 0 + 1 + 2.25)
