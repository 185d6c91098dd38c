"""One door for all models: what a name, a folder or a run leads to."""

from pathlib import Path

import pytest
import torch
from made_networks import make_network
from safetensors.torch import save_file

from pivotpatch import InputError, PatchClassifier, save_checkpoint
from pivotpatch.models import open_model, open_weights
from pivotpatch.models.classifier import Architecture, MultiLabelClassifier


def test_bundled_models_runs_and_checkpoints_are_opened(tmp_path: Path) -> None:
    assert open_model("tagger").labels
    save_checkpoint(make_network(), tmp_path / "run" / "best")
    for name in (tmp_path / "run", str(tmp_path / "run" / "best"), f"hub:{tmp_path / 'run' / 'best'}"):
        model = open_model(name)
        assert type(model) is PatchClassifier
        assert not model.training
    assert model.called == name
    (tmp_path / "run" / "best").rename(tmp_path / "run" / "last")
    with pytest.raises(InputError, match="the run has no best model yet; train on, or give .*/last"):
        open_model(tmp_path / "run")


def test_weights_get_the_options_of_the_head_that_is_named(tmp_path: Path) -> None:
    built = Architecture("test_resnet", "csra", 32, head_options={"lam": 0.1})
    model, images = MultiLabelClassifier(built, ["a", "b"]).eval(), torch.rand(2, 3, 32, 32)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    opened = open_weights(tmp_path / "w.safetensors", built, labels=["a", "b"])
    with torch.inference_mode():
        torch.testing.assert_close(opened(images), model(images))
