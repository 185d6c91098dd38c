"""Build everything, train one batch, write nothing: what a run will take."""

import time
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from accelerate import Accelerator

from pivotpatch.data.loading import Batch, Loader
from pivotpatch.data.records import Tell
from pivotpatch.inference.scoring import score_images
from pivotpatch.training.build import Run, build_run, none_read
from pivotpatch.training.config import RunConfig
from pivotpatch.training.processes import gather_named, own_settings
from pivotpatch.training.step import compile_run, take_step, wait_for_device


@dataclass(frozen=True)
class DryRun:
    """What one batch tells of a run.

    Attributes:
        device: what it ran on.
        processes: how many share the work.
        weights: numbers in the model.
        labels: L.
        pictures: images for training.
        val_pictures: images for validation.
        steps: of the whole run.
        seconds_per_step: as measured on the second of two steps, without waiting for images.
        seconds_per_validation: as one batch of it suggests.
        seconds: of the whole run.
        memory_bytes: the most that was in use of the GPU's memory, or what the process uses on a CPU.
        held_bytes: what images that are held would take besides.
        choices: what "auto" was decided to be, and why; a line each, by the name of the setting.
        not_read: what was wrong with images that were skipped on the way to the batches, by name.
    """

    device: str
    processes: int
    weights: int
    labels: int
    pictures: int
    val_pictures: int
    steps: int
    seconds_per_step: float
    seconds_per_validation: float
    seconds: float
    memory_bytes: int
    held_bytes: int
    choices: dict[str, str]
    not_read: dict[str, str]


def try_run(config: RunConfig, accelerator: Accelerator, *, tell: Tell | None = None) -> DryRun:
    """Try one batch of a run; nothing is written, and images to be held are not decoded.

    Args:
        config: of the run.
        accelerator: device and processes.
        tell: as in `make_model`.
    """
    with own_settings(accelerator.device):
        run = build_run(config, accelerator, decode=False, tell=tell)
        compile_run(run, steps_left=run.total_steps)
        batch = _find_first(run, run.loader)
        for _ in range(2):  # the first one also compiles, and chooses kernels
            started = time.perf_counter()
            take_step(run, batch, step=0, rows=np.arange(len(batch.indices)))
            wait_for_device(run)
            per_step = time.perf_counter() - started
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
    started = time.perf_counter()
    with torch.inference_mode(), torch.autocast(device.type, run.dtype, enabled=run.dtype != torch.float32):
        score_images(model, batch.images.to(device))
    wait_for_device(run)
    return (time.perf_counter() - started) * len(loader)
