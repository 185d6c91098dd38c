"""From a configuration to the model of a run: a new one, or a checkpoint that is trained further."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from pivotpatch.data.records import RecordSet, Tell
from pivotpatch.errors import InputError, shorten
from pivotpatch.inference.scoring import evaluating
from pivotpatch.models.classifier import (
    Architecture,
    Classifier,
    IndependentClassifier,
    MultiLabelClassifier,
    SharedClassifier,
    describe_weights,
    load_relabelled,
)
from pivotpatch.models.foreign import ForeignClassifier
from pivotpatch.models.heads import LinearHead, find_head
from pivotpatch.models.limits import WORDED
from pivotpatch.models.open import open_model
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.peers.hcp import HCPClassifier
from pivotpatch.peers.label_priors import LabelPrior, WordVectors, read_vectors
from pivotpatch.peers.mcar import MCARClassifier
from pivotpatch.process import ignore
from pivotpatch.training.config import ModelSection, RunConfig, TaskSection

Kind = TypeVar("Kind", bound=SharedClassifier)
KINDS: Mapping[str, Any] = {
    "independent": IndependentClassifier,
    "crops": MCARClassifier,
    "windows": HCPClassifier,
}
"""Kinds of model by task.kind; all others are plain ones, or have patches."""
_NAMED = 10  # labels in a line about a model or about images


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
    said = {**list_head_options(section), **width}
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


def check_regions(model: PatchClassifier) -> None:
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


def list_head_options(section: ModelSection) -> dict[str, Any]:
    """Options of a new head: what is said; else those of the head in `model.weights`, or of its first logits."""
    described = None if section.weights is None else describe_weights(Path(section.weights))
    if described is not None and described.architecture.head == section.head:
        return {**described.architecture.head_options, **section.head_options}
    learned = section.pretrained or section.weights is not None
    small = section.first_logits == "small" or (section.first_logits == "auto" and learned)
    return {**(find_head(section.head).small if small else {}), **section.head_options}


def settle_model(config: RunConfig, *, tell: Tell = ignore) -> RunConfig:
    """Write down the options of a new head; or what a run takes from the checkpoint that it starts from.

    That is its architecture, and its patches where nothing is said. A closer look is trained where it is asked for
    alone, for it costs as much as the rest.
    """
    section, task = config.model, config.task
    if section.start_from is None:
        options = {"head_options": list_head_options(section)}
        return config.model_copy(update={"model": section.model_copy(update=options)})
    model = open_model(section.start_from)
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
