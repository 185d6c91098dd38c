"""From a configuration to everything a run needs: records, loaders, model, task, optimiser."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import Dataset

from pivotpatch.data.address import open_records
from pivotpatch.data.check import count_shared, doubt_labels, find_unreadable
from pivotpatch.data.corrections import apply_corrections
from pivotpatch.data.loading import Batch, Loader, count_held_bytes, hold_images, make_loader
from pivotpatch.data.records import RecordSet, Tell
from pivotpatch.data.split import split_records
from pivotpatch.errors import InputError, shorten
from pivotpatch.inference.scoring import evaluating
from pivotpatch.models.classifier import (
    Architecture,
    Classifier,
    IndependentClassifier,
    MultiLabelClassifier,
    SharedClassifier,
    load_relabelled,
)
from pivotpatch.models.foreign import ForeignClassifier
from pivotpatch.models.heads import LinearHead, find_head
from pivotpatch.models.limits import WORDED
from pivotpatch.models.open import load_checkpoint, open_model
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.peers.hcp import HCPClassifier
from pivotpatch.peers.label_priors import LabelPrior, WordVectors, read_vectors
from pivotpatch.peers.mcar import MCARClassifier
from pivotpatch.process import Progress, count_workers, ignore
from pivotpatch.training.config import ModelSection, RunConfig, TaskSection, settle_config
from pivotpatch.training.features import Embedder, Features, Ordinary, find_ordinary
from pivotpatch.training.optimiser import make_optimiser
from pivotpatch.training.processes import Place, choose_dtype, choose_hold, measure_free_memory
from pivotpatch.training.task import Task, make_task

SPLIT_SEED = 0  # the same images are held out whatever the seed of the run, so that runs can be compared
Kind = TypeVar("Kind", bound=SharedClassifier)
KINDS: Mapping[str, Any] = {
    "independent": IndependentClassifier,
    "crops": MCARClassifier,
    "windows": HCPClassifier,
}
"""Kinds of model by task.kind; all others are plain ones, or have patches."""
LEAST_FOLDED = 50  # training images that folds are made of; too few say nothing
LEAST_IN_FOLD = 10  # of them in each fold: there are fewer folds rather than empty ones
_NAMED = 10  # labels in a line about a model or about images
_UNSCORED = "no image has any of the labels, so it is not scored"
_FAULTS = 5  # faults that are told in a line each


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
            _check_regions(model)
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


def _check_regions(model: PatchClassifier) -> None:
    """Refuse more regions than the feature map has places."""
    side, grid = model.preprocessing.image_size, model.patching.grid
    with evaluating(model.backbone), torch.no_grad():
        places = model.backbone(torch.zeros(1, 3, side, side)).shape[-1]
    if places < grid:
        wrong = f"is {grid}, and the feature map of {side} pixels has {places} x {places} places"
        raise InputError("task.grid", wrong, "lower it, or raise model.image_size")


def choose_frozen(config: RunConfig, model: Classifier, device: torch.device) -> tuple[bool, str]:
    """Whether the heads alone are trained, and why in a few words."""
    section, cannot = config.model, ""
    if not isinstance(model, SharedClassifier) or config.task.kind not in ("patch", "image"):
        cannot = f"task.kind is {config.task.kind}"
    elif not isinstance(model.head, LinearHead):
        cannot = f"the {model.architecture.head} head is more than a last step"
    elif config.mix.share or config.distil.teachers or config.distil.groups:
        cannot = "mix and distil look at images"
    if section.frozen is True and cannot:
        raise InputError("model.frozen", f"is true, and {cannot}", "give --full, which trains everything")
    if section.frozen != "auto":
        return section.frozen, ", as asked for"
    if device.type != "cpu":
        return False, ": there is a GPU"
    if section.start_from is None or cannot:
        return False, f": {cannot or 'model.start_from names no model whose backbone is trained already'}"
    return True, f": there is no GPU, and the backbone of {section.start_from} is trained already"


def draw_folds(records: RecordSet, folds: int) -> Tensor:
    """The fold (N,) of each record, each with its share of every label; always the same ones."""
    fold = torch.zeros(len(records), dtype=torch.int64)
    if folds:
        parts = {str(number): 1 / folds for number in range(folds)}
        for name, rows in split_records(records, parts, generator=np.random.default_rng(SPLIT_SEED)).items():
            fold[rows] = int(name)
    return fold


class RunRecords(NamedTuple):
    """The images that are trained on, those that choose the model, where there are any, and test sets by address."""

    train: RecordSet
    val: RecordSet | None
    tests: Mapping[str, RecordSet] = {}


def open_data(config: RunConfig, *, look: bool = True, progress: Progress = ignore, tell: Tell = ignore) -> RunRecords:
    """Read all that a run will need; whatever is wrong with any of it is told together, before any work is done.

    With `look`, and unless `data.on_error` is to skip them, images that are not there or cannot be read are wrong, too.
    """
    data, faults, opened, tests = config.data, list[InputError](), list[RecordSet](), dict[str, RecordSet]()
    train, val, lines = None, None, list[str]()
    try:
        train, val, _ = open_training_records(config)
        opened += [train] if val is None else [train, val]
    except InputError as error:
        faults.append(error)
    some = data.labels is not None  # which may be rare ones
    for address in (*data.test, *([data.val] if train is None and data.val is not None else [])):
        try:
            test = open_records(address)
            if some and train is not None and not {*test.labels.names} & {*train.labels.names}:
                lines.append(f"{test.name}: {_UNSCORED}")
                continue
            tests[address] = test if train is None else test.take_labels(train.labels.names, chosen=some)
        except InputError as error:
            faults.append(error)
    if some and val is not None and data.val is None and not val.count_labels().any():
        lines.append(f"{val.name}: no image that is held out has any of the labels, so the last model is kept")
        opened, val = [*opened[:1]], None
    silent = [address for address, test in tests.items() if some and not test.count_labels().any()]
    lines += [f"{tests.pop(address).name}: {_UNSCORED}" for address in silent]
    opened += tests.values()
    for each in opened[1:]:
        if not each.count_labels().any():
            wrong = "no image has any of the labels, so nothing can be ranked"
            faults.append(InputError(each.name, wrong, "give others"))
    if train is not None:
        if val is None and not data.val_fraction and config.evaluation.patience is not None:
            todo = "give data.val or data.val_fraction, or leave it out"
            faults.append(InputError("evaluation.patience", "there are no validation images to judge by", todo))
        counts, names = train.count_labels(), train.labels.names
        own = 2 if val is not None and data.val is None else 1  # the training images, with those held out of them
        lines += [*(line for each in opened for line in each.notes), *doubt_labels(*opened[:own])]
        others = opened[own:] if look else []
        for each, shared in zip(others, count_shared(train, *others), strict=True):
            if shared:
                too = "are training images too, so its metrics are too high; take them out of one"
                lines.append(f"{each.name}: {shared:,} of its {len(each):,} images {too}")
        lines = [*dict.fromkeys(lines)]
        never = [name for name, count in zip(names, counts, strict=True) if not count]
        if never:
            left = f"no training image has {len(never)} of {len(names)} labels, so none is learned"
            lines.append(f"{left}: {shorten(never, limit=_NAMED)}")
    if look and data.on_error == "error":
        faults += find_unreadable(opened, progress=progress)
    found = {str(fault): fault.parts for fault in faults}  # each once
    for line in (*(islice(found, _FAULTS) if len(found) > 1 else ()), *lines):
        tell(line)
    if train is None or found:
        where, wrong, todo = next(iter(found.values()))
        more = f" (the first of {len(found):,} faults that were found)" if len(found) > 1 else ""
        raise InputError(where, wrong + more, todo)
    return RunRecords(train, val, tests)


def open_training_records(config: RunConfig) -> RunRecords:
    """Read the training images and hold the validation part out of them, or read that too; then correct them.

    What is held out depends neither on corrections nor on `data.labels`: it is the same after each further correction,
    and for teachers of some of the labels as for their student.
    """
    data = config.data
    if data.train is None:
        raise InputError("data.train", "no images are named", "give an address, such as table:photos.csv")
    whole, val = open_records(data.train), None
    train = whole.keep_labels(data.labels)
    if data.val is not None:
        val = open_records(data.val).take_labels(train.labels.names, chosen=data.labels is not None)
    elif data.val_fraction:
        shares = {"train": 1 - data.val_fraction, "val": data.val_fraction}
        parts = split_records(whole, shares, generator=np.random.default_rng(SPLIT_SEED))
        train, val = train.select(parts["train"]), train.select(parts["val"])
    if data.corrections is not None:
        tests = [open_records(address) for address in data.test]
        sets, corrections = [train] if val is None else [train, val], open_records(data.corrections)
        told = set(corrections.labels.names)
        if told & set(train.labels.names) or not told & set(whole.labels.names):  # else they are of other labels
            train, *held_out = apply_corrections(sets, corrections, apart=tests)
            val = held_out[0] if held_out else None
    return RunRecords(train, val)


def open_loader(
    records: RecordSet,
    config: RunConfig,
    *,
    model: Classifier,
    accelerator: Accelerator,
    training: bool = False,
    size: int | None = None,
    hold: Place = "nothing",
    held: Dataset[Batch] | None = None,
    progress: Progress = ignore,
) -> Loader:
    """A loader of this process's share of some images, at the size that a model wants or at another.

    `held` is shipped in their place. On a CPU threads decode: worker processes would each hold a copy of this one.
    """
    data, side = config.data, size or model.picture_size
    own = 0 if accelerator.device.type == "cpu" else count_workers()
    workers = own if data.workers is None else data.workers
    if hold != "nothing":
        device = accelerator.device if hold == "device" else torch.device("cpu")
        held = hold_images(records, size=(side, side), device=device, on_error=data.on_error, progress=progress)
    return make_loader(
        records,
        size=(side, side),
        batch_size=config.train.batch_size if training else config.evaluation.batch_size,
        shuffle=training,
        seed=config.train.seed,
        num_workers=workers,
        on_error=data.on_error,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        every_batch=True,
        held=held,
        interpolation=model.preprocessing.interpolation,
    )


def none_read(records: RecordSet) -> InputError:
    """The error of a record set all of whose images were skipped."""
    return InputError(records.name, "none of the images could be read", "see pivotpatch data check")


def make_model(config: RunConfig, labels: tuple[str, ...], *, tell: Tell = ignore) -> Classifier:
    """The model of a configuration: new, or from a checkpoint; `tell` is told which labels that knows already."""
    section, task = config.model, config.task
    for name in ("closer_size", "regions"):
        if getattr(task, name) and task.kind != "patch":
            raise InputError(f"task.{name}", f"task.kind is {task.kind}", "leave it out, or train task.kind=patch")
    if section.start_from is not None:
        trained = _continue(section.start_from, config, labels, tell=tell)
        if (vectors := _open_vectors(section, trained.architecture.head, labels)) is not None:
            teach_vectors(trained, vectors)
        return trained
    vectors = _open_vectors(section, section.head, labels)
    width = {} if vectors is None else {"vector_width": vectors.shape[1]}
    learned = section.pretrained or section.weights is not None
    small = section.first_logits == "small" or (section.first_logits == "auto" and learned)
    said = {**(find_head(section.head).small if small else {}), **width, **section.head_options}
    architecture = Architecture(section.backbone, section.head, section.image_size, section.backbone_options, said)
    options: dict[str, Any] = {"pretrained": section.pretrained and not section.weights, "weights": section.weights}
    kind = KINDS.get(task.kind, MultiLabelClassifier)
    if task.kind in ("patch", "patch_only"):
        kind, options = PatchClassifier, options | _say_patching(task)
    model: Classifier = kind(architecture, labels, **options)
    if model.left_out is not None:
        tell(model.left_out)
    if vectors is not None:
        teach_vectors(model, vectors)
    if not section.normalise:
        model.preprocessing = replace(model.preprocessing, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return model


def settle_start(config: RunConfig, *, tell: Tell = ignore) -> RunConfig:
    """What a run that starts from a checkpoint takes from it: its architecture, and its patches where nothing is said.

    A closer look is trained where it is asked for alone, for it costs as much as the rest.
    """
    section, task = config.model, config.task
    model = None if section.start_from is None else open_model(section.start_from)
    if not isinstance(model, SharedClassifier):
        return config
    _check_said(section, model)
    update: dict[str, Any] = {"model": section.model_copy(update=asdict(model.architecture))}
    if isinstance(model, PatchClassifier) and task.kind in ("patch", "patch_only"):
        cut = {**asdict(model.patching), "regions": model.regions, "closer_size": task.closer_size}
        # Regions are cut from the feature map, and not seen alone: what is said against them takes them back, too.
        views, asked = {"source_size", "patch_size"}, task.model_fields_set
        left = asked | (views if "regions" in asked else set())
        left |= {"regions"} if task.kind == "patch_only" or views & asked else set()
        kept = {name: value for name, value in cut.items() if name not in left}
        update["task"] = task.model_copy(update=kept)
        said = [f"task.{name}={value}" for name, value in kept.items() if value != getattr(task, name)]
        if said:
            tell(f"patches are those of {section.start_from}, {' '.join(said)}; give others to change that")
    return config.model_copy(update=update)


def _check_said(section: ModelSection, model: Classifier) -> None:
    """Refuse what a checkpoint decides, where it is not the default, which takes back what a recipe says."""
    said = section.model_dump(
        exclude={"start_from", "pretrained", "frozen", "vectors", "first_logits"}, exclude_defaults=True
    )
    for name, value in said.items():
        if getattr(model.architecture, name, None) != value:
            default = ModelSection.model_fields[name].default
            todo = (
                f"leave it out, or write model.{name}={'' if default is None else default} after a recipe that says it"
            )
            raise InputError(f"model.{name}", f"is {value!r}, but {section.start_from} decides it", todo)


def open_start(config: RunConfig, labels: tuple[str, ...]) -> tuple[SharedClassifier | None, list[int]]:
    """The model that a run began as, and the places of labels that it knew; none where that is not there any more."""
    if config.model.start_from is None:
        return None, []
    try:
        known = set(open_model(config.model.start_from).labels)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.train.seed)
            model = make_model(config, labels)
    except InputError:
        return None, []
    assert isinstance(model, SharedClassifier)
    return model, [place for place, name in enumerate(labels) if name in known]


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


def _open_vectors(section: ModelSection, head: str, labels: tuple[str, ...]) -> Tensor | None:
    """The word vectors (L,V) that a configuration names, for a head that uses some."""
    if section.vectors is None:
        return None
    if head not in WORDED:
        todo = f"leave it out, or train one of {', '.join(WORDED)}"
        raise InputError("model.vectors", f"the {head} head uses no word vectors", todo)
    return read_vectors(Path(section.vectors), labels)


def _say_patching(task: TaskSection) -> dict[str, Any]:
    """What a task says of patches, as `PatchClassifier` takes it."""
    return {"patching": task.patching, "patch_only": task.kind == "patch_only", "regions": task.regions}


def _continue(start: str, config: RunConfig, labels: tuple[str, ...], *, tell: Tell) -> Classifier:
    """Train a checkpoint's model further, for other labels too; PAT-T may start from an ordinary one."""
    section, task = config.model, config.task
    model = open_model(start)
    if isinstance(model, ForeignClassifier):
        raise InputError(start, "is a model of another library, which cannot be trained", "give a checkpoint of ours")
    model.thresholds = model.calibration = model.adaptive = None  # they belong to the weights that they were fitted to
    _check_said(section, model)
    patches = task.kind in ("patch", "patch_only")
    if isinstance(model, MultiLabelClassifier) and task.kind != "independent":
        kind = KINDS.get(task.kind, MultiLabelClassifier)
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
