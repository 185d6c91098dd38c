"""From a configuration to everything a run needs: records, loaders, model, task, optimiser."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from pivotpatch.data.address import open_records
from pivotpatch.data.check import doubt_labels, find_unreadable
from pivotpatch.data.loading import Loader, count_held_bytes, hold_images, make_loader
from pivotpatch.data.records import RecordSet, Tell
from pivotpatch.data.split import split_records
from pivotpatch.errors import InputError, shorten
from pivotpatch.models.classifier import (
    Architecture,
    Classifier,
    IndependentClassifier,
    MultiLabelClassifier,
    SharedClassifier,
    load_relabelled,
)
from pivotpatch.models.foreign import ForeignClassifier
from pivotpatch.models.open import load_checkpoint, open_model
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.peers.label_priors import LabelPrior, WordVectors, read_vectors
from pivotpatch.peers.mcar import MCARClassifier
from pivotpatch.process import count_workers
from pivotpatch.training.config import RunConfig, TaskSection
from pivotpatch.training.optimiser import make_optimiser
from pivotpatch.training.processes import Place, choose_dtype, choose_hold, measure_free_memory
from pivotpatch.training.task import Task, make_task

SPLIT_SEED = 0  # the same images are held out whatever the seed of the run, so that runs can be compared
Progress = Callable[[str, int, int | None], None]
"""Told a stage, how much of it is done, and of how much."""
Kind = TypeVar("Kind", bound=SharedClassifier)
_NAMED = 10  # labels in a line about a model or about images
_FAULTS = 5  # faults that are told in a line each


def ignore(*_: object) -> None:
    """Hear nothing."""


@dataclass
class Run:
    """A run that is ready to go."""

    config: RunConfig
    accelerator: Accelerator
    records: RecordSet  # the training images
    loader: Loader  # of this process's share of them
    val_loader: Loader | None  # of its share of the validation images
    tests: dict[str, RecordSet]  # by address, opened now so that a wrong one is known before days of training
    task: Task  # model and loss
    step_module: nn.Module  # the task as it is called in training: the same, or wrapped for several processes
    average: ModelEmaV3 | None  # the running average of the model, where one is kept
    optimiser: torch.optim.Adam
    dtype: torch.dtype  # of autocast
    held_bytes: int  # of the images that stay decoded
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
    def model(self) -> Classifier:
        """The model that is evaluated and kept: the average, where there is one."""
        return self.task.model if self.average is None else self.average.module


def build_run(
    config: RunConfig,
    accelerator: Accelerator,
    *,
    saved: Path | None = None,
    decode: bool = True,
    progress: Progress = ignore,
    tell: Tell = ignore,
) -> Run:
    """Build a run; the model's first weights depend on the configuration alone.

    Args:
        config: what to build.
        accelerator: device and processes.
        saved: a checkpoint of this very run, to build the model from instead.
        decode: decode the images that are to be held; else each is decoded when it is needed.
        progress: told how many of these are done.
        tell: as in `make_model`; told what is odd about labels and images, too.
    """
    records, val, tests = open_data(config, look=saved is None, progress=progress, tell=tell)
    # Every process draws the same weights, whatever was drawn before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = make_model(config, records.labels.names, tell=tell) if saved is None else load_checkpoint(saved)
    if saved is None:
        teach_counts(model, records)
    if config.precision.channels_last:
        model = model.to(memory_format=torch.channels_last)
    task = make_task(model.to(accelerator.device).train(), config)
    step_module: nn.Module = accelerator.prepare_model(task) if accelerator.num_processes > 1 else task
    average = None
    if config.ema.decay:  # not before, for the wrapper may move the weights
        average = ModelEmaV3(task.model, decay=config.ema.decay, use_warmup=config.ema.warmup)
    count = len(records) + (0 if val is None else len(val))
    image_bytes = count_held_bytes(count, (model.picture_size, model.picture_size))
    hold, why = config.data.hold, ""
    if hold == "auto":
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
        loader=load(records, training=True),
        val_loader=None if val is None else load(val),
        tests=tests,
        task=task,
        step_module=step_module,
        average=average,
        optimiser=make_optimiser(task.model, config.optimiser),
        dtype=choose_dtype(config, accelerator.device),
        held_bytes=0 if hold == "nothing" else image_bytes,
        choices={"data.hold": f"data.hold is {hold}{why}"},
    )


class RunRecords(NamedTuple):
    """All images of a run; the test sets by address."""

    train: RecordSet
    val: RecordSet | None
    tests: dict[str, RecordSet]


def open_data(config: RunConfig, *, look: bool = True, progress: Progress = ignore, tell: Tell = ignore) -> RunRecords:
    """Read all that a run will need; whatever is wrong with any of it is told together, before any work is done.

    Args:
        config: names the images.
        look: see whether they are there and can be read, unless `data.on_error` is to skip those that cannot.
        progress: told how many are looked at.
        tell: told each fault where there are several, and what is odd about labels.
    """
    data, faults, opened, tests = config.data, dict[str, InputError](), list[RecordSet](), dict[str, RecordSet]()
    train, val, lines = None, None, list[str]()

    def note(fault: InputError) -> None:
        faults.setdefault(str(fault), fault)

    try:
        train, val = open_training_records(config)
        opened += [train] if val is None else [train, val]
    except InputError as error:
        note(error)
    for address in (*data.test, *([data.val] if train is None and data.val is not None else [])):
        try:
            tests[address] = open_aligned(address, None if train is None else train.labels.names)
        except InputError as error:
            note(error)
    opened += tests.values()
    for each in opened[1:]:
        if not each.count_labels().any():
            note(InputError(each.name, "no image has any of the labels, so nothing can be ranked", "give others"))
    if train is not None:
        if val is None and config.evaluation.patience is not None:
            todo = "give data.val or data.val_fraction, or leave it out"
            note(InputError("evaluation.patience", "there are no validation images to judge by", todo))
        counts, names = train.count_labels(), train.labels.names
        held = val.count_labels() if val is not None and data.val is None else 0
        lines = [*dict.fromkeys(line for each in opened for line in each.notes), *doubt_labels(names, counts + held)]
        never = [name for name, count in zip(names, counts, strict=True) if not count]
        if never:
            left = f"no training image has {len(never)} of {len(names)} labels, so none is learned"
            lines.append(f"{left}: {shorten(never, limit=_NAMED)}")
    if look and data.on_error == "error":
        for fault in find_unreadable(opened, progress=progress):
            note(fault)
    for line in (*(islice(faults, _FAULTS) if len(faults) > 1 else ()), *lines):
        tell(line)
    if train is None or faults:
        where, wrong, todo = next(iter(faults.values())).parts
        more = f" (the first of {len(faults):,} faults that were found)" if len(faults) > 1 else ""
        raise InputError(where, wrong + more, todo)
    return RunRecords(train, val, tests)


class TrainingRecords(NamedTuple):
    """The images that are trained on, and those that choose the model, where there are any."""

    train: RecordSet
    val: RecordSet | None


def open_training_records(config: RunConfig) -> TrainingRecords:
    """Read the training images and hold the validation part out of them, or read that too."""
    data = config.data
    if data.train is None:
        raise InputError("data.train", "no images are named", "give an address, such as table:photos.csv")
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
    hold: Place = "nothing",
    progress: Progress = ignore,
) -> Loader:
    """A loader of this process's share of some images, at the size that a model wants or at another."""
    data, side = config.data, size or model.picture_size
    held = None
    if hold != "nothing":
        device = accelerator.device if hold == "device" else torch.device("cpu")
        held = hold_images(records, size=(side, side), device=device, on_error=data.on_error, progress=progress)
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
    """The error of a record set all of whose images were skipped."""
    return InputError(records.name, "none of the images could be read", "see pivotpatch data check")


def make_model(config: RunConfig, labels: tuple[str, ...], *, tell: Tell = ignore) -> Classifier:
    """The model of a configuration: new, or from a checkpoint.

    Args:
        config: says which.
        labels: of the images.
        tell: told in one line which of them a checkpoint with other labels knows already.
    """
    section, task = config.model, config.task
    for name in ("closer_size", "regions"):
        if getattr(task, name) and task.kind != "patch":
            raise InputError(f"task.{name}", f"task.kind is {task.kind}", "leave it out, or train task.kind=patch")
    vectors = None if section.vectors is None else read_vectors(Path(section.vectors), labels)
    if section.start_from is not None:
        model = _continue(section.start_from, config, labels, tell=tell)
        if vectors is not None:
            teach_vectors(model, vectors)
        return model
    said = section.head_options if vectors is None else {"vector_width": vectors.shape[1], **section.head_options}
    architecture = Architecture(section.backbone, section.head, section.image_size, section.backbone_options, said)
    options: dict[str, Any] = {"pretrained": section.pretrained and not section.weights, "weights": section.weights}
    kinds: dict[str, type[Classifier]] = {"independent": IndependentClassifier, "crops": MCARClassifier}
    kind = kinds.get(task.kind, MultiLabelClassifier)
    if task.kind in ("patch", "patch_only"):
        kind, options = PatchClassifier, options | _say_patching(task)
    model = kind(architecture, labels, **options)
    if model.left_out is not None:
        tell(model.left_out)
    if vectors is not None:
        teach_vectors(model, vectors)
    if not section.normalise:
        model.preprocessing = replace(model.preprocessing, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return model


def teach_vectors(model: Classifier, vectors: Tensor) -> None:
    """Give the word vectors (L,V) of its labels to a model that uses some."""
    parts = model.members if isinstance(model, IndependentClassifier) else [model]
    for part, rows in zip(parts, vectors.split(len(vectors) // len(parts)), strict=True):
        for words in (each for each in part.modules() if isinstance(each, WordVectors)):
            words.take(rows)


def teach_counts(model: Classifier, records: RecordSet) -> None:
    """Tell a model that uses it how often the labels of training images occur together."""
    priors = [each for each in model.modules() if isinstance(each, LabelPrior)]
    if priors and not isinstance(model, IndependentClassifier):  # one label occurs with no other
        counts = torch.from_numpy(records.count_pairs())
        for prior in priors:
            prior.learn_counts(counts)


def _say_patching(task: TaskSection) -> dict[str, Any]:
    """What a task says of patches, as `PatchClassifier` takes it."""
    return {**task.model_dump(exclude={"kind"}), "patch_only": task.kind == "patch_only"}


def _continue(start: str, config: RunConfig, labels: tuple[str, ...], *, tell: Tell) -> Classifier:
    """Train a checkpoint's model further, for other labels too; PAT-T may start from an ordinary one."""
    section, task = config.model, config.task
    model = open_model(start)
    if isinstance(model, ForeignClassifier):
        raise InputError(start, "is a model of another library, which cannot be trained", "give a checkpoint of ours")
    model.thresholds = model.calibration = model.adaptive = None  # they belong to the weights that they were fitted to
    said = section.model_dump(exclude={"start_from", "pretrained", "vectors"}, exclude_defaults=True)
    for name, value in said.items():
        if getattr(model.architecture, name, None) != value:
            todo = f"leave it out, or write model.{name}= after a recipe that says it"
            raise InputError(f"model.{name}", f"is {value!r}, but {start} decides it", todo)
    patches = task.kind in ("patch", "patch_only")
    if isinstance(model, MultiLabelClassifier) and task.kind != "independent":
        kind = MCARClassifier if task.kind == "crops" else MultiLabelClassifier
        again = _take_over(kind(model.architecture, labels), model, tell=tell)
        return PatchClassifier.from_classifier(again, **_say_patching(task)) if patches else again
    if isinstance(model, PatchClassifier) and patches:
        return _take_over(PatchClassifier(model.architecture, labels, **_say_patching(task)), model, tell=tell)
    if isinstance(model, IndependentClassifier) and task.kind == "independent" and model.labels == labels:
        return model
    wrong = f"it is a {type(model).__name__}, which task.kind={task.kind} cannot train for these {len(labels)} labels"
    raise InputError(start, wrong, "choose another checkpoint or task")


def _take_over(model: Kind, trained: Kind, *, tell: Tell) -> Kind:
    """A model with what another of its kind has learned, see `load_relabelled`."""
    model.preprocessing = trained.preprocessing
    known = load_relabelled(model, trained)
    if set(model.labels) != set(trained.labels):
        new = [name for name in model.labels if name not in trained.labels]
        taken = f": {shorten(known, limit=_NAMED)}" if known else ""
        anew = f"; new: {shorten(new, limit=_NAMED)}" if new else ""
        tell(f"starting from a model that knows {len(known)} of {len(model.labels)} labels{taken}{anew}")
    return model
