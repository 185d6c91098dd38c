"""Build everything, train one batch, write nothing: what a run will take."""

from dataclasses import dataclass

import numpy as np
import psutil
import torch
from accelerate import Accelerator

from pivotpatch.data.loading import Batch, Loader
from pivotpatch.data.records import Tell
from pivotpatch.inference.scoring import score_images
from pivotpatch.training.build import Run, build_run, ignore, none_read
from pivotpatch.training.config import RunConfig
from pivotpatch.training.processes import gather_named, own_settings
from pivotpatch.training.step import compile_run, take_step, time_again


@dataclass(frozen=True)
class DryRun:
    """What one batch tells of a run."""

    device: str
    processes: int
    weights: int  # numbers in the model
    labels: int
    pictures: int  # images for training
    val_pictures: int  # images for validation
    steps: int  # of the whole run
    seconds_per_step: float  # of the second of two steps, without waiting for images
    seconds_per_validation: float  # as one batch of it, scored again, suggests
    seconds: float  # of the whole run
    memory_bytes: int  # the most that was in use of the GPU's memory, or what the process uses on a CPU
    held_bytes: int  # what images that are held would take besides
    choices: dict[str, str]  # what "auto" was decided to be, and why, by the name of the setting
    not_read: dict[str, str]  # what was wrong with images that were skipped on the way to the batches, by name


def try_run(config: RunConfig, accelerator: Accelerator, *, tell: Tell = ignore) -> DryRun:
    """Try one batch of a run; nothing is written, and images to be held are not decoded. `tell` as in `make_model`."""
    with own_settings(accelerator.device):
        run = build_run(config, accelerator, decode=False, tell=tell)
        compile_run(run, steps_left=run.total_steps)
        batch = _find_first(run, run.loader)
        per_step = time_again(run, lambda: take_step(run, batch, step=0, rows=np.arange(len(batch.indices))))
        per_validation = 0.0 if run.val_loader is None else _time_validation(run, run.val_loader)
    failures = [failure for each in (run.loader, run.val_loader) if each is not None for failure in each.failures]
    val = 0 if run.val_loader is None else len(run.val_loader.records)
    evaluations = -(-config.train.epochs // config.evaluation.every) if val else 0
    on_gpu = accelerator.device.type == "cuda"
    return DryRun(
        device=torch.cuda.get_device_name() if on_gpu else f"cpu ({torch.get_num_threads()} threads)",
        processes=accelerator.num_processes,
        weights=sum(weight.numel() for weight in run.task.model.parameters()),
        labels=len(run.records.labels),
        pictures=len(run.records),
        val_pictures=val,
        steps=run.total_steps,
        seconds_per_step=per_step,
        seconds_per_validation=per_validation,
        seconds=per_step * run.total_steps + per_validation * evaluations,
        memory_bytes=torch.cuda.max_memory_allocated() if on_gpu else psutil.Process().memory_info().rss,
        held_bytes=run.held_bytes,
        choices=run.choices,
        not_read=gather_named({failure.name: str(failure.error) for failure in failures}, accelerator),
    )


def _find_first(run: Run, loader: Loader) -> Batch:
    """The first share of which anything can be read; an empty one where the other processes alone have some."""
    for batch in loader:
        if len(batch.indices):
            break
    if not run.accelerator.gather(torch.tensor([len(batch.indices)], device=run.accelerator.device)).any():
        raise none_read(loader.records)
    return batch


def _time_validation(run: Run, loader: Loader) -> float:
    batch = _find_first(run, loader)
    if len(batch.indices) == 0:
        return 0.0
    device, model = run.accelerator.device, run.model.eval()
    with torch.inference_mode(), torch.autocast(device.type, run.dtype, enabled=run.dtype != torch.float32):
        return time_again(run, lambda: score_images(model, batch.images.to(device))) * len(loader)
