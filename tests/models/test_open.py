"""One door for all models: what a name, a folder or a run leads to."""

from pathlib import Path

import pytest
from made_networks import make_network

from pivotpatch import InputError, PatchClassifier, save_checkpoint
from pivotpatch.models import open_model


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
