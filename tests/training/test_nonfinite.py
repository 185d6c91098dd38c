import re
from pathlib import Path

import pytest
import torch
from run_process import SMALL, make_config

from pivotpatch.cli.main import main
from pivotpatch.errors import InputError
from pivotpatch.models.checkpoint import load_checkpoint, save_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.build import open_training_records
from pivotpatch.training.config import ModelSection
from pivotpatch.training.folder import RunFolder
from pivotpatch.training.loop import fit, resume
from pivotpatch.training.nonfinite import _find_cause


def find_fault(folder: Path, *changes: str) -> str:
    with pytest.raises(InputError) as caught:
        fit(make_config(*changes), folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_that_diverges_names_images_and_keeps_its_last_good_state(tmp_path: Path) -> None:
    out = tmp_path / "run"
    fault = find_fault(out, "optimiser.lr=1e30", "output.save_every=1", "augment.flip=0.5")
    told = re.fullmatch(
        r"step (\d+): the loss of (.+), (.+), (.+) and 5 more is not finite \(nan, gradient norm nan\); "
        r"likely cause: .*lower optimiser.lr.*; last/ holds step (\d+), --resume goes on there",
        fault,
    )
    assert told, fault
    step = int(told[1])
    assert int(told[5]) == step - 1
    folder = RunFolder.open(out)
    assert folder.load_state().step == step - 1 > 0
    tensors = [*load_checkpoint(folder.last).state_dict().values(), *folder.load_tensors(torch.device("cpu")).values()]
    assert all(torch.isfinite(value).all() for value in tensors)
    records = open_training_records(make_config()).train
    assert {told[2], told[3], told[4]} <= {record.name for record in records}
    with pytest.raises(InputError, match=f"step {step}: the loss of {re.escape(told[2])}, "):
        resume(out)  # the same again


def test_the_command_line_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SMALL, "optimiser.lr=1e30", "--out", str(tmp_path / "run")]) == 1
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("pivotpatch: ")]
    assert output.out == ""
    assert lines == output.err.splitlines()[-1:]
    assert " is not finite (" in lines[0]
    assert lines[0].endswith("; nothing was saved yet")


def save_grown(folder: Path, *, times: float) -> list[str]:
    """A network whose first weights have grown; the changes that make a run start from it."""
    model = PatchClassifier("test_resnet", open_training_records(make_config()).train.labels.names)
    weight = next(model.backbone.parameters())
    weight.data *= times
    save_checkpoint(model, folder)
    defaults = ModelSection()
    return [
        f"model.start_from={folder}",
        f"model.backbone={defaults.backbone}",
        f"model.pretrained={str(defaults.pretrained).lower()}",
        "model.image_size=",
    ]


def test_what_a_finite_loss_hides_is_not_saved(tmp_path: Path) -> None:
    """A variance overflows; what batch norm makes of it is 0, which costs a finite loss."""
    fault = find_fault(tmp_path / "run", *save_grown(tmp_path / "start", times=1e25), "output.save_every=1")
    assert fault.startswith("step 1: model.backbone.")
    assert "running_var is not finite; likely cause: weights that have grown too large; lower" in fault
    assert fault.endswith("nothing was saved yet")
    assert not (tmp_path / "run" / "last").exists()


def test_a_first_step_cannot_be_blamed_on_the_learning_rate(tmp_path: Path) -> None:
    fault = find_fault(tmp_path / "run", *save_grown(tmp_path / "start", times=1e38))
    assert "likely cause: the weights that the run began with; check model.weights or model.start_from" in fault


@pytest.mark.parametrize(
    ("loss", "before", "cause"),
    [
        (float("nan"), [1.0, 2.0, 3.5], "the loss was rising"),
        (float("nan"), [3.0, 2.0, 1.5], "weights that have grown too large"),
        (5.0, [3.0, 2.0, 1.5], "gradients that overflow"),
    ],
)
def test_the_steps_before_tell_the_cause(loss: float, before: list[float], cause: str) -> None:
    rows = [[8 * each, 8.0, 1.0] for each in before]
    assert _find_cause(4, [loss], rows).startswith(cause)
