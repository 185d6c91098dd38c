"""A run, a checkpoint or scores are told apart in one place for all verbs; so are images and policies."""

from pathlib import Path

import pytest
import torch
from verb import make_model, write_run

from pivotpatch.cli.sources import open_source
from pivotpatch.errors import InputError
from pivotpatch.training.config import load_config


def test_a_run_is_its_best_model_and_its_configuration(tmp_path: Path) -> None:
    run, model = tmp_path / "run", make_model()
    write_run(run, model, "data.train=scenes:@train?count=9", "train.epochs=7")
    source, checkpoint = open_source(run), open_source(str(run / "best"))
    for found in (source, checkpoint):
        assert found.model is not None
        torch.testing.assert_close(found.model.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert source.config == load_config(run / "config.toml")
    assert (source.path, source.checkpoint) == (run, run / "best")
    assert (checkpoint.config, checkpoint.checkpoint) == (None, run / "best")
    (run / "best").rename(tmp_path / "away")
    with pytest.raises(InputError, match="run: the run has no best model yet; train on, or give .*run/last"):
        open_source(run)
