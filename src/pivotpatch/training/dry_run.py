"""Build everything, train one batch, write nothing: what a run will take."""

import sys
import time
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import psutil
import torch
from accelerate import Accelerator

from pivotpatch.data.loading import Batch, Loader
from pivotpatch.data.records import Tell
from pivotpatch.inference.embedding import AT_ONCE
from pivotpatch.inference.scoring import score_images
from pivotpatch.process import ignore
from pivotpatch.training.build import Run, build_run
from pivotpatch.training.config import RunConfig, settle_config
from pivotpatch.training.features import Features
from pivotpatch.training.gain import score_unseen, tune_folds
from pivotpatch.training.images import none_read
from pivotpatch.training.model import settle_model
from pivotpatch.training.processes import gather_named, own_settings
from pivotpatch.training.step import compile_run, take_step, time_again, time_step
from pivotpatch.training.task import make_task

FEW = 2  # images that a step of training everything is timed with, which takes much memory
STARTING_SECONDS = 30.0  # that a program takes at most before it tries a run; one that is older did something else


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
    seconds: float  # of the whole run, from the start of the program
    memory_bytes: int  # the most that was in use of the GPU's memory, or of RAM on a CPU
    held_bytes: int  # what images that are held would take besides
    choices: dict[str, str]  # what "auto" was decided to be, and why, by the name of the setting
    not_read: dict[str, str]  # what was wrong with images that were skipped on the way to the batches, by name


def try_run(config: RunConfig, accelerator: Accelerator, *, tell: Tell = ignore) -> DryRun:
    """Try one batch of a run; nothing is written, and images to be held are not decoded. `tell` as in `make_model`."""
    config = settle_model(config, tell=tell)
    begun = min(time.time() - psutil.Process().create_time(), STARTING_SECONDS)
    if config.distil.groups and not config.distil.teachers:
        tell(f"up to {2 * config.distil.groups} teachers are trained first, each about as long as this says")
    with own_settings(accelerator.device):
        began = time.perf_counter()
        run = build_run(config, accelerator, decode=False, tell=tell)
        compile_run(run, steps_left=run.total_steps)
        begun += time.perf_counter() - began
        if run.embedder is not None:
            begun += _try_features(run)
        run.choices["model.frozen"] += tell_full_time(run, config)
        batch = _find_first(run, run.loader)
        per_step = time_again(run, lambda: take_step(run, batch, step=0, rows=np.arange(len(batch.indices))))
        per_validation = 0.0 if run.val_loader is None else _time_validation(run, run.val_loader)
    failures = [failure for each in (run.loader, run.val_loader) if each is not None for failure in each.failures]
    evaluations = 1 if run.embedder is not None else -(-config.train.epochs // config.evaluation.every)
    on_gpu = accelerator.device.type == "cuda"
    return DryRun(
        device=torch.cuda.get_device_name() if on_gpu else f"cpu ({torch.get_num_threads()} threads)",
        processes=accelerator.num_processes,
        weights=sum(weight.numel() for weight in run.task.model.parameters()),
        labels=len(run.records.labels),
        pictures=len(run.records),
        val_pictures=run.held_out,
        steps=run.total_steps,
        seconds_per_step=per_step,
        seconds_per_validation=per_validation,
        seconds=begun + per_step * run.total_steps + per_validation * evaluations,
        memory_bytes=torch.cuda.max_memory_allocated() if on_gpu else find_peak(),
        held_bytes=run.held_bytes,
        choices=run.choices,
        not_read=gather_named({failure.name: str(failure.error) for failure in failures}, accelerator),
    )


def tell_full_time(run: Run, config: RunConfig) -> str:
    """How long `--full` would take, from a step of a few images; nothing where it would change nothing, or on a GPU."""
    if run.embedder is None or run.accelerator.device.type != "cpu":
        return ""
    given = settle_config(config, frozen=False)
    few = given.model_copy(update={"train": given.train.model_copy(update={"batch_size": FEW, "accumulate": 1})})
    task = make_task(deepcopy(run.task.model).requires_grad_(True).train(), few)
    seconds = time_step(replace(run, config=few, task=task, step_module=task, embedder=None, average=None)) / FEW
    seconds *= given.train.epochs * (len(run.records) + run.held_out / 4)  # a backward pass costs the most
    about = f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"
    return f"; --full would train everything, in about {about}"


def _try_features(run: Run) -> float:
    """Seconds of all that a frozen run does beside its steps; its loaders then ship features that mean nothing."""
    embedder, few = run.embedder, run.records[:AT_ONCE]
    assert embedder is not None
    seconds = time_again(run, lambda: embedder.fill([Features(few)], ignore)) / len(few)
    seconds *= len(run.records) + run.held_out
    for loader in filter(None, (run.loader, run.val_loader)):
        dataset = loader.batches.dataset
        assert isinstance(dataset, Features)
        dataset.kept = torch.rand(
            embedder.find_shape(dataset), dtype=torch.float16, generator=torch.Generator().manual_seed(0)
        )
    began = time.perf_counter()
    if run.task.folds:
        tune_folds(run, progress=ignore)
    return seconds + time.perf_counter() - began


def find_peak() -> int:
    """The most bytes of RAM that this process has used at once."""
    try:
        import resource
    except ImportError:  # not on Windows, which tells it itself
        return int(psutil.Process().memory_info().peak_wset)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


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
    if run.embedder is not None:
        return time_again(run, lambda: score_unseen(run, run.task.model, progress=ignore))
    device, model = run.accelerator.device, run.model.eval()
    with torch.inference_mode(), torch.autocast(device.type, run.dtype, enabled=run.dtype != torch.float32):
        return time_again(run, lambda: score_images(model, batch.images.to(device))) * len(loader)
