"""From a configuration to everything a run needs: records, loaders, model, task, optimiser."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from pivotpatch.data.loading import Loader, count_held_bytes
from pivotpatch.data.records import RecordSet, Tell
from pivotpatch.models.classifier import (
    Classifier,
    SharedClassifier,
)
from pivotpatch.models.open import load_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.process import Progress, ignore
from pivotpatch.training.config import RunConfig, settle_config
from pivotpatch.training.features import Embedder, Features, Ordinary, find_ordinary
from pivotpatch.training.images import draw_folds, open_data, open_loader
from pivotpatch.training.model import check_regions, choose_frozen, make_model, teach_counts
from pivotpatch.training.optimiser import make_optimiser
from pivotpatch.training.processes import choose_dtype, choose_hold, measure_free_memory
from pivotpatch.training.task import Task, make_task

LEAST_FOLDED = 50  # training images that folds are made of; too few say nothing
LEAST_IN_FOLD = 10  # of them in each fold: there are fewer folds rather than empty ones


@dataclass
class Run:
    """A run that is ready to go."""

    config: RunConfig
    accelerator: Accelerator
    records: RecordSet  # the training images
    loader: Loader  # of this process's share of them
    val_loader: Loader | None  # of its share of the validation images
    tests: Mapping[str, RecordSet]  # by address, opened now so that a wrong one is known before days of training
    task: Task  # model and loss
    step_module: nn.Module  # the task as it is called in training: the same, or wrapped for several processes
    average: ModelEmaV3 | None  # the running average of the model, where one is kept
    optimiser: torch.optim.Optimizer
    dtype: torch.dtype  # of autocast
    held_bytes: int  # of the images that stay decoded
    folds: Tensor  # (N,) the fold of each training image, where the backbone is frozen
    embedder: Embedder | None  # makes the features that loaders then ship in the place of images
    ordinary: Ordinary | None  # features of other images, which heads learn from too
    choices: dict[str, str]  # what "auto" was decided to be, and why in a line, by the name of the setting
    compiled: bool = False  # whether steps are, see `compile_run`

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the training images."""
        return self.loader.epoch_sampler.batches

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.train.epochs * self.steps_per_epoch

    @property
    def val(self) -> RecordSet | None:
        """The validation images, where there are any."""
        return None if self.val_loader is None else self.val_loader.records

    @property
    def held_out(self) -> int:
        """How many validation images there are."""
        return 0 if self.val is None else len(self.val)

    @property
    def model(self) -> Classifier:
        """The model that is evaluated and kept: the average, where there is one."""
        return self.task.model if self.average is None else self.average.module


def build_run(
    config: RunConfig,
    accelerator: Accelerator,
    *,
    saved: Path | None = None,
    decode: bool = True,
    keep: Path | None = None,
    progress: Progress = ignore,
    tell: Tell = ignore,
) -> Run:
    """Build a run and settle its configuration; the model's first weights depend on that alone.

    Or the model is that of a checkpoint of this very run, `saved`. Without `decode` images to be held are decoded when
    they are needed; `keep` is the folder of the features of a frozen backbone, None for memory alone. `tell` is told
    what is odd about labels and images, and what `make_model` tells.
    """
    records, val, tests = open_data(config, look=saved is None, progress=progress, tell=tell)
    # Every process draws the same weights, whatever was drawn before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = make_model(config, records.labels.names, tell=tell) if saved is None else load_checkpoint(saved)
    if saved is None:
        teach_counts(model, records)
        if isinstance(model, PatchClassifier) and model.regions:
            check_regions(model)
    frozen, why_frozen = choose_frozen(config, model, accelerator.device)
    config = settle_config(config, frozen=frozen)
    if config.precision.channels_last:
        model = model.to(memory_format=torch.channels_last)
    task = make_task(model.to(accelerator.device).train(), config)
    if frozen:
        folds = min(config.frozen.folds, len(records) // LEAST_IN_FOLD)
        task.freeze(folds=folds if len(records) >= LEAST_FOLDED else 0)
    step_module: nn.Module = accelerator.prepare_model(task) if accelerator.num_processes > 1 else task
    average = None
    if config.ema.decay:  # not before, for the wrapper may move the weights
        average = ModelEmaV3(task.model, decay=config.ema.decay, use_warmup=config.ema.warmup)
    count = len(records) + (0 if val is None else len(val))
    image_bytes = count_held_bytes(count, (task.picture_size, task.picture_size))
    hold, why, dtype = config.data.hold, "", choose_dtype(config, accelerator.device)
    held: list[Features | None] = [None, None]
    embedder = ordinary = None
    if frozen:
        hold, why = "nothing", ": the backbone is frozen, so that each image is read only once"
        embedder = Embedder(task, keep, accelerator, dtype, config.data.on_error)
        assert isinstance(model, SharedClassifier)
        ordinary = find_ordinary(model, records, share=config.frozen.ordinary)
        if ordinary is not None:
            number, new = len(ordinary.seen.image), int(ordinary.absent.isfinite().sum())
            why_frozen += f"; {number:,} ordinary images are taken to show none of {new} new labels (frozen.ordinary)"
        held = [Features(records), None if val is None else Features(val)]
    elif hold == "auto":
        free = measure_free_memory(accelerator)
        hold = choose_hold(image_bytes, epochs=config.train.epochs, free=free)
        sizes = [f"{size / 1e9:.3g} GB" for size in (image_bytes, *free)]
        why = ": images take {} and may fill a quarter of {} of GPU memory or half of {} of RAM".format(*sizes)
        why = ": each image is read only once" if config.train.epochs == 1 else why
    place = hold if decode else "nothing"
    load = partial(open_loader, config=config, model=model, accelerator=accelerator, hold=place, progress=progress)
    return Run(
        config=config,
        accelerator=accelerator,
        records=records,
        loader=load(records, training=True, size=task.picture_size, held=held[0]),
        val_loader=None if val is None else load(val, held=held[1]),
        tests=tests,
        task=task,
        step_module=step_module,
        average=average,
        optimiser=make_optimiser(task, config.optimiser),
        dtype=dtype,
        held_bytes=image_bytes if hold != "nothing" else 0,
        folds=draw_folds(records, len(task.folds)),
        embedder=embedder,
        ordinary=ordinary,
        choices={
            "data.hold": f"data.hold is {hold}{why}",
            "model.frozen": f"model.frozen is {str(frozen).lower()}{why_frozen}",
        },
    )
