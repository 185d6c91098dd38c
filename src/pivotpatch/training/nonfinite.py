"""A loss that is not finite: name the images that made it, and say what most likely did."""

import math
from collections.abc import Mapping, Sequence

import torch
from accelerate.utils import gather_object
from torch import Tensor

from pivotpatch.errors import InputError, shorten
from pivotpatch.training.build import Run

HISTORY = 20  # steps that are looked back at
RISE = 3.0  # times the least loss of those steps, from which on the learning rate is suspected
_WIDER = "or precision.dtype=float32 where it is not"
GROWN = f"weights that have grown too large; lower optimiser.lr, set optimiser.clip_norm, {_WIDER}"


def explain_nonfinite(
    run: Run, *, step: int, indices: Tensor, numbers: Sequence[float], before: Sequence[Sequence[float]]
) -> InputError:
    """The error that ends a run; all processes take part.

    Args:
        run: whose loss it was.
        step: its number.
        indices: (B,) the images of this process's share, in the run's records.
        numbers: its row from `take_step`.
        before: the rows of the steps before it.
    """
    share = indices.tolist()
    chosen = gather_object(share) if run.accelerator.num_processes > 1 else share
    names = shorten(run.records.images.name(run.records.place(index)) for index in chosen)
    losses, gradient = list(numbers[:-2]), numbers[-1]
    what = "the loss" if not all(map(math.isfinite, losses)) else "the gradient"
    wrong = f"{what} of {names} is not finite ({sum(losses)}, gradient norm {gradient})"
    return InputError(f"step {step}", wrong, f"likely cause: {_find_cause(step, losses, before)}")


def check_weights(tensors: Mapping[str, Tensor], *, step: int) -> None:
    """Refuse weights that are not finite though the loss was: it is that of the weights before the step."""
    for name, value in tensors.items():
        if not torch.isfinite(value).all():
            raise InputError(f"step {step}", f"{name} is not finite", f"likely cause: {GROWN}")


def _find_cause(step: int, losses: Sequence[float], before: Sequence[Sequence[float]]) -> str:
    if step == 1 and not all(map(math.isfinite, losses)):
        return "the weights that the run began with; check model.weights or model.start_from"
    totals = [sum(row[:-2]) / max(row[-2], 1) for row in before]
    if len(totals) > 1 and totals[-1] > RISE * min(totals):
        return "the loss was rising, so the learning rate is too high; lower optimiser.lr or set optimiser.clip_norm"
    if all(map(math.isfinite, losses)):
        return f"gradients that overflow; set optimiser.clip_norm, {_WIDER}"
    return GROWN
