"""The loop trains and reports what its task says; what it says in numbers; and numbers that are not finite."""

import re
from pathlib import Path

import pytest
import torch
from run_process import make_config

from pivotpatch.errors import InputError
from pivotpatch.models import load_checkpoint, save_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training import fit, resume
from pivotpatch.training.build import Run, build_run
from pivotpatch.training.folder import RunFolder, RunState
from pivotpatch.training.images import open_training_records
from pivotpatch.training.loop import sum_up_steps
from pivotpatch.training.processes import make_accelerator

ROWS = [[8.0, 4.0, 4.0, 1.0], [3.0, 1.0, 1.0, 5.0], [2.0, 0.0, 5.0, 3.0]]  # loss of images and patches, images, norm


@pytest.fixture(scope="module")
def run() -> Run:
    """Of PAT-T, with seven steps per epoch."""
    config = make_config("data.hold=nothing")
    return build_run(config, make_accelerator(config))


def test_an_entry_is_the_mean_over_images_and_the_steps_are_counted_once(run: Run) -> None:
    state = RunState(step=10, pending=[*ROWS], pending_seconds=4.0, pictures=7, train_seconds=1.0)
    assert sum_up_steps(run, state) == {
        "step": 10,
        "epoch": pytest.approx(10 / 7),
        "loss": pytest.approx(18 / 10),
        "loss_image": pytest.approx(13 / 10),
        "loss_patch": pytest.approx(5 / 10),
        "gradient_norm": pytest.approx(3.0),  # of steps, however many images they had
        "lr": run.optimiser.param_groups[0]["lr"],
        "pictures_per_second": pytest.approx(10 / 4),
    }
    assert (state.pending, state.pending_seconds, state.pictures, state.train_seconds) == ([], 0, 17, 5.0)
    empty = sum_up_steps(run, RunState(step=1, pending=[[0.0, 0.0, 0.0, 0.5]], pending_seconds=1.0))
    assert (empty["loss"], empty["pictures_per_second"]) == (0, 0)  # nothing could be read


def test_a_run_that_diverges_names_images_and_keeps_its_last_good_state(tmp_path: Path) -> None:
    out, config = tmp_path / "run", make_config("optimiser.lr=1e30", "output.save_every=1")
    with pytest.raises(InputError) as caught:
        fit(config, out)
    told = re.fullmatch(
        r"step (\d+): the loss of (.+), (.+), (.+) and 5 more is not finite \(nan, gradient norm nan\); "
        r"lower optimiser.lr, .*/last holds step (\d+), --resume .*/run goes on there",
        str(caught.value),
    )
    assert told, caught.value
    step = int(told[1])
    assert int(told[5]) == step - 1
    folder = RunFolder.open(out)
    assert folder.load_state().step == step - 1 > 0
    tensors = [*load_checkpoint(folder.last).state_dict().values(), *folder.load_tensors(torch.device("cpu")).values()]
    assert all(torch.isfinite(value).all() for value in tensors)
    records = open_training_records(config).train
    assert {told[2], told[3], told[4]} <= {record.name for record in records}
    folder.close()
    with pytest.raises(InputError, match=f"step {step}: the loss of {re.escape(told[2])}, "):
        resume(out)  # the same again


def test_what_a_finite_loss_hides_is_not_saved(tmp_path: Path) -> None:
    """A variance overflows; what batch norm makes of it is 0, which costs a finite loss."""
    model = PatchClassifier("test_resnet", open_training_records(make_config()).train.labels.names, image_size=32)
    next(model.backbone.parameters()).data *= 1e25
    save_checkpoint(model, tmp_path / "start")
    start = (f"model.start_from={tmp_path / 'start'}", "model.backbone=resnet101.tv_in1k", "model.image_size=")
    with pytest.raises(InputError, match=r"step 1: model\..*running_var is not finite; lower .*nothing was saved yet"):
        fit(make_config(*start, "output.save_every=1", "model.frozen=false", "data.val_fraction=0"), tmp_path / "run")
    assert not (tmp_path / "run" / "last").exists()
