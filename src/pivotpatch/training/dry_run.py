"""Build everything, train one batch, write nothing: what a run will take."""

import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from pivotpatch.data.loading import Batch, Loader
from pivotpatch.data.records import Tell
from pivotpatch.errors import InputError
from pivotpatch.inference.scoring import score_images
from pivotpatch.training.build import Run, build_run, none_read
from pivotpatch.training.config import RunConfig
from pivotpatch.training.processes import gather_named, own_settings
from pivotpatch.training.step import take_step


@dataclass(frozen=True)
class DryRun:
    """What one batch tells of a run.

    Attributes:
        device: what it ran on.
        processes: how many share the work.
        weights: numbers in the network.
        labels: L.
        pictures: for training.
        val_pictures: for validation.
        steps: of the whole run.
        seconds_per_step: as measured on the second of two steps, without waiting for pictures.
        seconds_per_validation: as one batch of it suggests.
        seconds: of the whole run.
        memory_bytes: the most that was in use, of the GPU's memory or else of the process's; 0 where it is unknown.
        held_bytes: what pictures that are held would take besides.
        not_read: what was wrong with pictures that were skipped on the way to the batches, by name.
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
    not_read: dict[str, str]


def try_run(config: RunConfig, accelerator: Accelerator, *, tell: Tell | None = None) -> DryRun:
    """Try one batch of a run; nothing is written, and held pictures are not decoded.

    Args:
        config: of the run.
        accelerator: device and processes.
        tell: as in `make_model`.
    """
    lazy = config.model_copy(update={"data": config.data.model_copy(update={"hold": "nothing"})})
    with own_settings(accelerator.device):
        run = build_run(lazy, accelerator, tell=tell)
        if len(run.records) == 0:
            raise InputError(config.data.train or "data.train", "there are no pictures to train on", "give some")
        first = _find_first(run, run.loader)
        for _ in range(2):  # the first one also compiles, and chooses kernels
            started = time.perf_counter()
            take_step(run, first.batch, step=0, rows=first.rows)
            _wait(run)
            per_step = time.perf_counter() - started
        per_validation = _time_validation(run)
    failures = [failure for each in (run.loader, run.val_loader) if each is not None for failure in each.failures]
    val = 0 if run.val_loader is None else len(run.val_loader.records)
    evaluations = -(-config.train.epochs // config.evaluation.every) if val else 0
    held = 0 if config.data.hold == "nothing" else (len(run.records) + val) * 3 * run.task.model.picture_size**2
    return DryRun(
        device=_name_device(accelerator.device),
        processes=accelerator.num_processes,
        weights=sum(weight.numel() for weight in run.task.model.parameters()),
        labels=len(run.records.labels),
        pictures=len(run.records),
        val_pictures=val,
        steps=run.total_steps,
        seconds_per_step=per_step,
        seconds_per_validation=per_validation,
        seconds=per_step * run.total_steps + per_validation * evaluations,
        memory_bytes=_find_memory(accelerator.device),
        held_bytes=held,
        not_read=gather_named({failure.name: str(failure.error) for failure in failures}, accelerator),
    )


class _First(NamedTuple):
    """A process's share of a batch, and the positions of its pictures in the whole one."""

    batch: Batch
    rows: NDArray[np.int64]


def _find_first(run: Run, loader: Loader) -> _First:
    """The first share of which anything can be read; an empty one where the other processes alone have some."""
    sampler = loader.epoch_sampler
    for number, (share, batch) in enumerate(zip(list(sampler), loader, strict=True)):
        first = _First(batch, sampler.rows(number)[np.isin(share, batch.indices)])
        if len(first.rows):
            break
    if not run.accelerator.gather(torch.tensor([len(first.rows)], device=run.accelerator.device)).any():
        raise none_read(loader.records)
    return first


def _time_validation(run: Run) -> float:
    if run.val_loader is None:
        return 0.0
    batch = _find_first(run, run.val_loader).batch
    if len(batch.indices) == 0:
        return 0.0
    device, model = run.accelerator.device, run.model.eval()
    started = time.perf_counter()
    with torch.inference_mode(), torch.autocast(device.type, run.dtype, enabled=run.dtype != torch.float32):
        score_images(model, batch.images.to(device))
    _wait(run)
    return (time.perf_counter() - started) * len(run.val_loader)


def _wait(run: Run) -> None:
    if run.accelerator.device.type == "cuda":
        torch.cuda.synchronize(run.accelerator.device)


def _name_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)" if device.type == "cpu" else device.type


def _find_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource  # Unix alone has it

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
