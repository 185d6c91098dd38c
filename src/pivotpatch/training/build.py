"""From a configuration to everything a run needs: records, loaders, network, task, optimiser."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from pivotpatch.accel import quicken_training
from pivotpatch.accel.device import has_bfloat16
from pivotpatch.data.address import open_records
from pivotpatch.data.augment import AugmentPolicy
from pivotpatch.data.loading import Loader, hold_pictures, make_loader
from pivotpatch.data.records import RecordSet, Tell
from pivotpatch.data.split import split_records
from pivotpatch.errors import InputError, shorten
from pivotpatch.models.checkpoint import load_checkpoint
from pivotpatch.models.classifier import (
    Architecture,
    Classifier,
    IndependentClassifier,
    MultiLabelClassifier,
    SharedClassifier,
    load_relabelled,
)
from pivotpatch.models.foreign import ForeignClassifier
from pivotpatch.models.open import open_model
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.config import ModelSection, RunConfig, TaskSection
from pivotpatch.training.optimiser import WeightAverage, make_average, make_optimiser
from pivotpatch.training.task import PatchOnlyTask, PatchTask, Task, WholeImageTask, make_loss

SPLIT_SEED = 0  # the same pictures are held out whatever the seed of the run, so that runs can be compared
Progress = Callable[[str, int, int | None], None]
Kind = TypeVar("Kind", bound=SharedClassifier)
_NAMED = 10  # labels in a line that tells of a network or of pictures


@dataclass
class Run:
    """A run that is ready to go.

    Attributes:
        config: what it was built from.
        accelerator: device and processes.
        records: the training pictures.
        loader: of this process's share of them.
        val_loader: of its share of the validation pictures, where there are any.
        tests: the test sets by address, opened now so that a wrong address is known before days of training.
        task: network and loss.
        step_module: the task as it is called in training: the same, or wrapped for several processes.
        average: the running average of the network, where one is kept.
        optimiser: over the network's weights.
        policy: of augmentation.
        dtype: of autocast.
    """

    config: RunConfig
    accelerator: Accelerator
    records: RecordSet
    loader: Loader
    val_loader: Loader | None
    tests: dict[str, RecordSet]
    task: Task
    step_module: nn.Module
    average: WeightAverage | None
    optimiser: torch.optim.Adam
    policy: AugmentPolicy
    dtype: torch.dtype

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the training pictures."""
        return self.loader.epoch_sampler.batches

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.train.epochs * self.steps_per_epoch

    @property
    def model(self) -> Classifier:
        """The network that is evaluated and kept: the average, where there is one."""
        return self.task.model if self.average is None else self.average.module


def build_run(
    config: RunConfig,
    accelerator: Accelerator,
    *,
    saved: Path | None = None,
    progress: Progress | None = None,
    tell: Tell | None = None,
) -> Run:
    """Build a run; the network's first weights depend on the configuration alone.

    Args:
        config: what to build.
        accelerator: device and processes.
        saved: a checkpoint of this very run, to build the network from instead.
        progress: told what is done while pictures are decoded to be held.
        tell: as in `make_model`; told which labels no picture has, too.
    """
    records, val = open_training_records(config)
    tests = {address: open_aligned(address, records.labels.names) for address in config.data.test}
    for scored in (*tests.values(), *([] if val is None else [val])):
        if len(scored.positive.indices) == 0:
            raise InputError(scored.name, "no picture has any of the labels, so nothing can be ranked", "give others")
    never = np.flatnonzero(np.bincount(records.positive.indices, minlength=len(records.labels)) == 0)
    if tell is not None and len(never):
        named = shorten([records.labels.names[place] for place in never], limit=_NAMED)
        tell(f"no picture to train on has {len(never)} of {len(records.labels)} labels, so nothing finds them: {named}")
    if val is None and config.evaluation.patience is not None:
        todo = "give data.val or data.val_fraction, or leave it out"
        raise InputError("evaluation.patience", "there are no validation pictures to judge by", todo)
    # Every process draws the same weights, whatever was drawn before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = make_model(config, records.labels.names, tell=tell) if saved is None else load_checkpoint(saved)
    if config.precision.channels_last:
        model = model.to(memory_format=torch.channels_last)
    task = make_task(model.to(accelerator.device).train(), config)
    step_module: nn.Module = accelerator.prepare_model(task) if accelerator.num_processes > 1 else task
    average = make_average(task.model, config.ema)  # not before, for the wrapper may move the weights
    optimiser = make_optimiser(task.model, config.optimiser)
    if config.precision.compile:
        step_module.compile(dynamic=False)
        if accelerator.device.type == "cuda":  # last, for it keeps the names of weights, but not the types of layers
            quicken_training(task.model)
    return Run(
        config=config,
        accelerator=accelerator,
        records=records,
        loader=open_loader(records, config, model=model, accelerator=accelerator, training=True, progress=progress),
        val_loader=None
        if val is None
        else open_loader(val, config, model=model, accelerator=accelerator, progress=progress),
        tests=tests,
        task=task,
        step_module=step_module,
        average=average,
        optimiser=optimiser,
        policy=AugmentPolicy(**config.augment.model_dump()),
        dtype=choose_dtype(config, accelerator.device),
    )


class TrainingRecords(NamedTuple):
    """The pictures that are trained on, and those that choose the network, where there are any."""

    train: RecordSet
    val: RecordSet | None


def open_training_records(config: RunConfig) -> TrainingRecords:
    """Read the training pictures and hold the validation part out of them, or read that too."""
    data = config.data
    if data.train is None:
        raise InputError("data.train", "no pictures are named", "name them, for example data.train=table:photos.csv")
    train = open_aligned(data.train, data.labels)
    if data.val is not None:
        return TrainingRecords(train, open_aligned(data.val, train.labels.names))
    if data.val_fraction == 0:
        return TrainingRecords(train, None)
    shares = {"train": 1 - data.val_fraction, "val": data.val_fraction}
    parts = split_records(train, shares, generator=np.random.default_rng(SPLIT_SEED))
    return TrainingRecords(train.select(parts["train"]), train.select(parts["val"]))


def open_aligned(address: str, labels: Sequence[str] | None) -> RecordSet:
    """Read a data set with its labels in a given order; all of them must be known there."""
    records = open_records(address)
    if labels is None or tuple(labels) == records.labels.names:
        return records
    try:
        return records.keep_labels(labels)
    except InputError as error:
        raise InputError(records.name, *error.parts[1:]) from None


def open_loader(
    records: RecordSet,
    config: RunConfig,
    *,
    model: Classifier,
    accelerator: Accelerator,
    training: bool = False,
    size: int | None = None,
    progress: Progress | None = None,
) -> Loader:
    """A loader of this process's share of some pictures, at the size that a network wants or at another."""
    data, side = config.data, size or model.picture_size
    held = None
    if data.hold != "nothing":
        device = accelerator.device if data.hold == "device" else torch.device("cpu")
        held = hold_pictures(records, size=(side, side), device=device, on_error=data.on_error, progress=progress)
    return make_loader(
        records,
        size=(side, side),
        batch_size=config.train.batch_size if training else config.evaluation.batch_size,
        shuffle=training,
        seed=config.train.seed,
        num_workers=count_workers() if data.workers is None else data.workers,
        on_error=data.on_error,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        every_batch=True,
        held=held,
    )


def none_read(records: RecordSet) -> InputError:
    """The error of a record set all of whose pictures were skipped."""
    return InputError(records.name, "none of the pictures could be read", "see pivotpatch data check")


def count_workers() -> int:
    """This process's share of the cores that it may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 12), 1)


def make_model(config: RunConfig, labels: tuple[str, ...], *, tell: Tell | None = None) -> Classifier:
    """The network of a configuration: new, or from a checkpoint.

    Args:
        config: says which.
        labels: of the pictures.
        tell: told in one line which of them a checkpoint with other labels knows already.
    """
    section, task = config.model, config.task
    if section.start_from is not None:
        return _continue(section, task, labels, tell=tell)
    architecture = Architecture(
        section.backbone, section.head, section.image_size, section.backbone_options, section.head_options
    )
    pretrained = section.pretrained and section.weights is None
    if task.kind in ("patch", "patch_only"):
        return PatchClassifier(
            architecture, labels, pretrained=pretrained, weights=section.weights, **_say_patching(task)
        )
    kind = IndependentClassifier if task.kind == "independent" else MultiLabelClassifier
    return kind(architecture, labels, pretrained=pretrained, weights=section.weights)


def _say_patching(task: TaskSection) -> dict[str, Any]:
    """What a task says of patches, as `PatchClassifier` takes it."""
    return {**task.model_dump(exclude={"kind"}), "patch_only": task.kind == "patch_only"}


def _continue(section: ModelSection, task: TaskSection, labels: tuple[str, ...], *, tell: Tell | None) -> Classifier:
    """Train a checkpoint's network further, for other labels too; PAT-T may start from an ordinary one."""
    assert section.start_from is not None
    start = section.start_from
    model = open_model(start)
    if isinstance(model, ForeignClassifier):
        raise InputError(start, "is somebody else's network, which is asked, not trained", "give a checkpoint of ours")
    model.thresholds = model.calibration = model.adaptive = None  # they belong to the weights that they were fitted to
    said = section.model_dump(exclude={"start_from", "pretrained"}, exclude_defaults=True)
    for name, value in said.items():
        if getattr(model.architecture, name, None) != value:
            wrong = f"is {value!r}, but {section.start_from} decides it"
            raise InputError(
                f"model.{name}", wrong, f"leave it out, or write model.{name}= after a recipe that says it"
            )
    if model.labels != labels and isinstance(model, IndependentClassifier):
        wrong = f"it has a network for each of its {len(model.labels)} labels, and the pictures have others"
        raise InputError(section.start_from, wrong, "give pictures with the same labels in the same order")
    if task.kind in ("patch", "patch_only"):
        patching = _say_patching(task)
        if isinstance(model, MultiLabelClassifier):
            again = _take_over(MultiLabelClassifier(model.architecture, labels), model, tell=tell)
            return PatchClassifier.from_classifier(again, **patching)
        if isinstance(model, PatchClassifier):
            return _take_over(PatchClassifier(model.architecture, labels, **patching), model, tell=tell)
    elif task.kind == "independent" and isinstance(model, IndependentClassifier):
        return model
    elif task.kind == "image" and isinstance(model, MultiLabelClassifier):
        return _take_over(MultiLabelClassifier(model.architecture, labels), model, tell=tell)
    wrong = f"it is a {type(model).__name__}, which the task {task.kind!r} cannot train"
    raise InputError(section.start_from, wrong, "choose another checkpoint or task")


def _take_over(model: Kind, trained: Kind, *, tell: Tell | None) -> Kind:
    """A network with what another of its kind has learnt, see `load_relabelled`."""
    model.preprocessing = trained.preprocessing
    known = load_relabelled(model, trained)
    if tell is not None and set(model.labels) != set(trained.labels):
        new = [name for name in model.labels if name not in trained.labels]
        taken = f": {shorten(known, limit=_NAMED)}" if known else ""
        anew = f"; new: {shorten(new, limit=_NAMED)}" if new else ""
        tell(f"starting from a network that knows {len(known)} of {len(model.labels)} labels{taken}{anew}")
    return model


def make_task(model: Classifier, config: RunConfig) -> Task:
    """The task that a configuration names, around a network."""
    loss = make_loss(config.loss)
    if not isinstance(model, PatchClassifier):
        return WholeImageTask(model, loss)
    if config.task.kind == "patch_only":
        return PatchOnlyTask(model, loss)
    return PatchTask(model, loss)


def choose_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """The dtype of autocast, float32 for none."""
    choice = config.precision.dtype
    if choice == "auto":
        choice = "bfloat16" if has_bfloat16(device) else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[choice]
