"""What a run begins with."""

from pathlib import Path

import pytest
import torch

from pivotpatch.errors import InputError
from pivotpatch.models import load_checkpoint, save_checkpoint
from pivotpatch.models.classifier import Classifier, IndependentClassifier, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.values import Adaptive, Calibration
from pivotpatch.training.build import make_model
from pivotpatch.training.config import load_config

LABELS = ("cat", "dog")
NEW_LABELS = ("lamp", "dog", "sofa")


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        (MultiLabelClassifier, "image"),
        (MultiLabelClassifier, "patch"),
        (PatchClassifier, "patch_only"),
        (IndependentClassifier, "independent"),
    ],
)
def test_what_was_fitted_to_other_weights_does_not_go_on(kind: type[Classifier], task: str, tmp_path: Path) -> None:
    model = kind("test_vit", LABELS, image_size=32)
    if isinstance(model, PatchClassifier):
        model.set_mixing(lam=2.0, temperature=0.25)
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


def test_only_pat_looks_closer() -> None:
    for kind in ("image", "patch_only"):
        with pytest.raises(InputError, match=f"task.closer_size: task.kind is {kind}; leave it out, or train"):
            make_model(load_config(None, ["task.closer_size=48", f"task.kind={kind}"]), LABELS)


@pytest.mark.parametrize("task", ["image", "patch"])
def test_an_ordinary_model_may_go_on_with_other_labels(task: str, tmp_path: Path) -> None:
    first = MultiLabelClassifier("test_vit", LABELS, image_size=32)
    save_checkpoint(first, tmp_path / "first")
    config, told = load_config(None, [f"model.start_from={tmp_path / 'first'}", f"task.kind={task}"]), list[str]()
    again = make_model(config, NEW_LABELS, tell=told.append)
    assert told == ["starting from a model that knows 1 of 3 labels: dog; new: lamp, sofa"]
    assert isinstance(again, PatchClassifier if task == "patch" else MultiLabelClassifier)
    assert again.labels == NEW_LABELS
    shared = [model.state_dict()["head.project.weight"][model.labels.index("dog")] for model in (again, first)]
    torch.testing.assert_close(*shared)
    assert torch.equal(next(again.parameters()), next(first.parameters()))
    make_model(config, LABELS[::-1], tell=told.append)
    assert len(told) == 1  # all are known
    save_checkpoint(IndependentClassifier("test_vit", LABELS, image_size=32), tmp_path / "first", overwrite=True)
    with pytest.raises(InputError, match=f"IndependentClassifier, which task.kind={task} cannot train"):
        make_model(config, NEW_LABELS)
