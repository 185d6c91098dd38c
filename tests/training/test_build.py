"""What a run begins with."""

from pathlib import Path

import pytest
import torch

from pivotpatch.core.adaptive import Adaptive
from pivotpatch.core.calibration import Calibration
from pivotpatch.models.checkpoint import load_checkpoint, save_checkpoint
from pivotpatch.models.classifier import Classifier, IndependentClassifier, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.build import make_model
from pivotpatch.training.config import load_config

LABELS = ("cat", "dog")


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        (MultiLabelClassifier, "image"),
        (MultiLabelClassifier, "patch"),
        (PatchClassifier, "patch"),
        (PatchClassifier, "patch_only"),
        (IndependentClassifier, "independent"),
    ],
)
def test_what_was_fitted_to_other_weights_does_not_go_on(kind: type[Classifier], task: str, tmp_path: Path) -> None:
    model = kind("test_vit", LABELS, image_size=32)
    if isinstance(model, PatchClassifier):
        model.set_mixing(lam=torch.tensor([0.5, 2.0]), temperature=0.25)
    model.thresholds = (0.3, 0.4)
    model.calibration = Calibration("image", "platt", (2.0, 2.0), (1.0, 1.0))
    model.adaptive = Adaptive(model.calibration, (0.0, 0.5))
    save_checkpoint(model, tmp_path / "first")
    stored = load_checkpoint(tmp_path / "first")
    assert (stored.calibration, stored.adaptive) == (model.calibration, model.adaptive)
    config = load_config(None, [f"model.start_from={tmp_path / 'first'}", f"task.kind={task}", "task.lam=0.7"])
    again = make_model(config, LABELS)
    assert (again.thresholds, again.calibration, again.adaptive) == (None, None, None)
    assert torch.equal(next(again.parameters()), next(model.parameters()))
    if isinstance(again, PatchClassifier):
        assert (again.lam, again.temperature) == (0.7, 1.0)
        assert again.patch_only == (task == "patch_only")


@pytest.mark.parametrize("task", ["patch", "patch_only"])
def test_a_new_network_knows_whether_it_will_see_the_whole_image(task: str) -> None:
    settings = ["model.backbone=test_vit", "model.image_size=32", "model.pretrained=false", f"task.kind={task}"]
    model = make_model(load_config(None, settings), LABELS)
    assert isinstance(model, PatchClassifier)
    assert model.patch_only == (task == "patch_only")
