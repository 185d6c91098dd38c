"""What a run says of itself in numbers: entries of log.jsonl, metrics.json, and numbers that are not finite."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from pivotpatch.core.metrics import DEFINITIONS, AveragePrecision, average_precision
from pivotpatch.errors import InputError, shorten
from pivotpatch.inference.scores import Scores
from pivotpatch.training.build import Run
from pivotpatch.training.folder import RunState


def sum_up_steps(run: Run, state: RunState, *, since: int, seconds: float) -> dict[str, Any]:
    """Make an entry of the log from the steps that wait for one, and count them as logged.

    Args:
        run: what is trained.
        state: how far it is; its pending steps are cleared, their images and seconds added.
        since: the step from which on time was taken; pending steps from before a resume lie before it.
        seconds: that the steps since then took.
    """
    *parts, pictures, norms = map(sum, zip(*state.pending, strict=True))
    losses = {name: part / max(pictures, 1) for name, part in zip(run.task.parts, parts, strict=True)}
    timed = pictures * (state.step - since) / len(state.pending)
    entry = {
        "step": state.step,
        "epoch": state.step / run.steps_per_epoch,
        "loss": sum(losses.values()),
        **{f"loss_{name}": value for name, value in losses.items()},
        "gradient_norm": norms / len(state.pending),
        "lr": run.optimiser.param_groups[0]["lr"],
        "pictures_per_second": timed / seconds,
    }
    state.pictures += math.ceil(timed)
    state.train_seconds += seconds
    state.pending.clear()
    return entry


def measure_scores(run: Run, scores: Scores) -> dict[str, AveragePrecision]:
    """Average precision of each kind of logits that the task trains."""
    definition, task = run.config.evaluation.definition, run.task
    return {
        kind: average_precision(logits, scores.target, definition=definition, labels=scores.labels)
        for kind, logits in scores.logits.items()
        if kind in (*task.parts, task.ranking)
    }


def describe_run(run: Run, state: RunState, *, seconds: float, finished: bool) -> dict[str, Any]:
    """What metrics.json says, but for the test sets; `seconds` are those of all starts."""
    metrics: dict[str, Any] = {
        "finished": finished,
        "steps": state.step,
        "epochs": state.step / run.steps_per_epoch,
        "seconds": seconds,
        "pictures_per_second": state.pictures / state.train_seconds if state.pictures else None,
        "average_precision": DEFINITIONS[run.config.evaluation.definition],
        "ranking": run.task.ranking,
        "chosen_by": f"validation mAP of the {run.task.ranking} logits" if run.val_loader else "nothing, the last step",
        "best_step": state.best_step if run.val_loader else state.step,
        "best_val_mAP": state.best,
        "not_read": dict(sorted(state.not_read.items())),
    }
    if run.accelerator.device.type == "cuda":
        metrics["peak_memory_GB"] = torch.cuda.max_memory_allocated(run.accelerator.device) / 1e9
    return metrics


_MEND = "lower optimiser.lr, set optimiser.clip_norm, or try precision.dtype=float32"


def explain_nonfinite(run: Run, *, step: int, indices: Tensor, numbers: Sequence[float]) -> InputError:
    """The error that ends a run whose loss or gradient is not finite; all processes take part.

    Args:
        run: whose loss it was.
        step: its number.
        indices: (B,) the images of this process's share, in the run's records.
        numbers: its row from `take_step`.
    """
    share = indices.tolist()
    chosen = gather_object(share) if run.accelerator.num_processes > 1 else share
    names = shorten(run.records.images.name(run.records.place(index)) for index in chosen)
    *losses, _, gradient = numbers
    what = "gradient" if all(map(math.isfinite, losses)) else "loss"
    first = step == 1 and what == "loss"
    todo = "check the weights it began with, model.weights or model.start_from" if first else _MEND
    return InputError(
        f"step {step}", f"the {what} of {names} is not finite ({sum(losses)}, gradient norm {gradient})", todo
    )


def check_weights(tensors: Mapping[str, Tensor], *, step: int) -> None:
    """Refuse weights that are not finite though the loss was, which is that of the weights before the step."""
    for name, value in tensors.items():
        if not torch.isfinite(value).all():
            raise InputError(f"step {step}", f"{name} is not finite", _MEND)
