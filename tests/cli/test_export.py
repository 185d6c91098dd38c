import re
from pathlib import Path

import pytest
import torch
from made_networks import fit_made_up, make_network, make_pictures

from pivotpatch.cli.main import main
from pivotpatch.inference.engine import TorchEngine
from pivotpatch.inference.exported import OnnxEngine
from pivotpatch.models.checkpoint import load_checkpoint, save_checkpoint

Output = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has a best network, in the folder that the test works in."""
    monkeypatch.chdir(tmp_path)
    model = make_network()
    fit_made_up(model)
    save_checkpoint(model, tmp_path / "my-run" / "best")
    return Path("my-run")


def fail(words: list[str], capsys: Output) -> str:
    assert main(["export", *words]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.slow
def test_a_run_becomes_a_file_of_its_name(run: Path, capsys: Output) -> None:
    assert main(["export", str(run), "--half"]) == 0
    captured = capsys.readouterr()
    size = Path("my-run.onnx").stat().st_size
    found = re.fullmatch(
        r"wrote my-run.onnx, (\d\.\d\d) MB; differs from torch by \d\.\de-\d\d at most\n", captured.out
    )
    assert found is not None
    assert float(found[1]) == round(size / 1e6, 2)
    assert captured.err == ""
    weights = (run / "best" / "model.safetensors").stat().st_size
    assert size < 0.6 * weights
    model = make_network()
    fit_made_up(model)
    pictures = make_pictures(2, 32, 32)
    said, expected = OnnxEngine("my-run.onnx")(pictures), TorchEngine(model)(pictures)
    assert 0 < (said.probs - expected.probs).abs().max() < 0.02
    torch.testing.assert_close(said.weights, expected.weights, rtol=0, atol=0.02)


def test_a_run_becomes_a_checkpoint_of_half_the_bytes(run: Path, capsys: Output) -> None:
    assert main(["export", str(run), "--format", "checkpoint", "--half", "--out", "small"]) == 0
    assert re.fullmatch(
        r"wrote small, \d\.\d\d MB; differs from torch by \d\.\de-\d\d at most\n", capsys.readouterr().out
    )
    sizes = [Path(folder, "model.safetensors").stat().st_size for folder in (run / "best", "small")]
    assert sizes[1] < 0.55 * sizes[0]
    whole, small = (load_checkpoint(folder) for folder in (run / "best", Path("small")))
    assert (small.thresholds, small.calibration) == (whole.thresholds, whole.calibration)
    pictures = make_pictures(2, 32, 32)
    probs, expected = (TorchEngine(model)(pictures).probs for model in (small, whole))
    assert 0 < (probs - expected).abs().max() < 0.02
    wrong = "small: exists already; choose another folder, or remove it first\n"
    assert fail([str(run), "--format", "checkpoint", "--out", "small"], capsys).endswith(wrong)
    assert "--out: there is no name" in fail([str(run), "--format", "checkpoint"], capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["my-run", "--out", "tags.pt2"], "tags.pt2: is no name for an ONNX file; give one that ends in .onnx"),
        (["my-run", "--out", "none/tags.onnx"], "none/tags.onnx: is no name for an ONNX file"),
        (["no-run"], "no-run: is neither a bundled model nor a folder or file"),
        (["my-run/best/model.json"], "my-run/best/model.json: is a file"),
    ],
)
def test_what_cannot_be_meant_is_told(words: list[str], said: str, run: Path, capsys: Output) -> None:
    assert said in fail(words, capsys)
    assert [path.name for path in Path().iterdir()] == ["my-run"]
