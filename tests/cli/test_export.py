from pathlib import Path

import pytest
from made_networks import ask, fit_made_up, make_network, make_pictures
from verb import Errors

from pivotpatch.cli.main import main
from pivotpatch.inference.engine import TorchEngine
from pivotpatch.models import load_checkpoint, save_checkpoint


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has a best network, in the folder that the test works in."""
    monkeypatch.chdir(tmp_path)
    model = make_network()
    fit_made_up(model)
    save_checkpoint(model, tmp_path / "my-run" / "best")
    return Path("my-run")


def test_a_run_becomes_a_checkpoint_of_half_the_bytes(run: Path, capsys: Errors) -> None:
    assert main(["export", str(run), "--format", "checkpoint", "--half", "--out", "small"]) == 0
    assert capsys.readouterr().out.startswith("wrote small, ")
    sizes = [Path(folder, "model.safetensors").stat().st_size for folder in (run / "best", "small")]
    assert sizes[1] < 0.55 * sizes[0]
    whole, small = (load_checkpoint(folder) for folder in (run / "best", Path("small")))
    assert (small.thresholds, small.calibration) == (whole.thresholds, whole.calibration)
    pictures = make_pictures(2, 32, 32)
    probs, expected = (ask(TorchEngine(model), pictures).probs for model in (small, whole))
    assert 0 < (probs - expected).abs().max() < 0.02
