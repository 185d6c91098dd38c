"""What a user may name: a run, a checkpoint, a model by name or a file of scores, images, and a policy."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from pivotpatch.audit.evaluation import Policy
from pivotpatch.cli.console import tell
from pivotpatch.core.policies import Fixed, PriorMatched, TopK
from pivotpatch.data.address import open_records
from pivotpatch.data.check import count_shared
from pivotpatch.data.records import RecordSet, keep_common_labels
from pivotpatch.errors import InputError, choose_one_of
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.score_file import SUFFIXES, read_scores
from pivotpatch.inference.scores import Scores
from pivotpatch.inference.scoring import get_classifier, score_pictures
from pivotpatch.models.checkpoint import DESCRIPTION
from pivotpatch.models.classifier import Architecture, Classifier
from pivotpatch.models.open import find_bundled, find_checkpoint, open_model, open_weights
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.checks import BUNDLED, is_named
from pivotpatch.runtime.files import read_names
from pivotpatch.training.config import RunConfig, find_recipe, list_recipes, load_config
from pivotpatch.training.folder import CONFIG, open_run_records
from pivotpatch.training.images import open_loader, open_training_records
from pivotpatch.training.processes import choose_dtype, gather_named, make_accelerator, own_settings

POLICIES = ("fixed", "best-fixed", "top", "prior", "target", "fitted")


class Source(NamedTuple):
    """Where scores come from: a model, perhaps of a run, or a file."""

    path: Path  # what the user named
    model: Classifier | None = None  # None for a file of scores
    config: RunConfig | None = None  # of the run, where it is one
    checkpoint: Path | None = None  # the model's folder; None for one on the hub, or somebody else's


class Scored(NamedTuple):
    """Scores, and what was wrong with images that have none, by name."""

    scores: Scores
    not_read: dict[str, str]


def open_given(what: str | Path, *, architecture: str | None, labels: Path | None) -> Classifier:
    """A model by name, or a file of weights whose architecture and labels a user says; see `open_weights`."""
    names = None if labels is None else read_names(labels)
    if architecture is None:
        return open_model(what, labels=names)
    if not architecture.endswith(".toml") and architecture not in [recipe.name for recipe in list_recipes()]:
        return open_weights(what, architecture, labels=names)
    config = load_config(find_recipe(architecture))
    said = config.model.model_dump(include={"backbone", "head", "image_size", "backbone_options", "head_options"})
    return open_weights(
        what,
        Architecture(**said),
        labels=names,
        patching=config.task.patching,
        regions=config.task.regions,
        normalise=config.model.normalise,
    )


def open_source(what: str | Path, *, architecture: str | None = None, labels: Path | None = None) -> Source:
    """A run's best model, a checkpoint, a model as in `open_given`, or a file of scores, which is not read yet."""
    path = find_bundled(str(what)) or Path(what)
    if path.suffix.lower() in SUFFIXES and not path.is_dir() and not is_named(str(what)):
        if not path.exists():  # it is read later, perhaps after work that would be lost
            raise InputError(str(what), "there is no such file", "check the path")
        return Source(path)
    if is_named(str(what)) or architecture is not None or labels is not None:
        return Source(path, open_given(what, architecture=architecture, labels=labels))
    checkpoint = find_checkpoint(what)
    configured = checkpoint != path and (path / CONFIG).is_file()
    ours = (checkpoint / DESCRIPTION).exists()
    model, config = open_model(checkpoint), load_config(path / CONFIG) if configured else None
    return Source(path, model, config, checkpoint if ours else None)


def open_pictures(words: list[str]) -> RecordSet | None:
    """The images that the word behind a source names; None where there is none."""
    if len(words) > 1:
        raise InputError(f"{words[1]!r}", "a third word", "give a model or scores, then the images")
    return open_records(words[0]) if words else None


def find_trained(source: Source, records: RecordSet) -> str | None:
    """Of how many images a run was trained on, in words; None for none, and where its images cannot be found."""
    if source.config is None:
        return None
    try:
        own = open_run_records(source.path, source.config, strict=False)
    except InputError:  # a run may have moved away from its images, and can be used all the same
        return None
    found, changed = count_shared(own.train, records)[0], own.val is None and source.config.data.val_fraction > 0
    among = "may be among" if changed else "are among"
    return f"{found:,} of its {len(records):,} images {among} those that the run was trained on" if found else None


def warn_of_trained(source: Source, records: RecordSet) -> None:
    """Say on stderr where images are judged that the run was trained on."""
    found = find_trained(source, records)
    if found is not None:
        tell(f"{records.name}: {found}, which flatters it; name others to see what it is worth")


def keep_known_labels(records: RecordSet, model: Classifier) -> RecordSet:
    """Images with the labels that a model knows, told on stderr where the images lack some of them."""
    return keep_common_labels(records, model.labels, whose="the model", tell=tell)


def read_policy(text: str, labels: Sequence[str], *, config: RunConfig | None = None) -> Policy:
    """The policy that a word names: the same words for all verbs.

    `prior` counts the shares of `labels` in DATA, or in the training images of the run that `config` is of.
    """
    name, _, value = text.partition(":")
    if text in ("fitted", "target", "best-fixed"):
        return text  # type: ignore[return-value]
    if name not in POLICIES:
        raise InputError("--policy", f"unknown policy {text!r}", choose_one_of(name, POLICIES))
    try:
        if name == "fixed":
            return Fixed(float(value))
        if name == "top":
            chosen = TopK(int(value))
            if not 1 <= chosen.k <= len(labels):
                raise InputError("--policy", f"{text!r} for {len(labels)} labels", f"give top:1 to top:{len(labels)}")
            return chosen
    except InputError as error:  # which does not know of options
        raise InputError("--policy", *error.parts[1:]) from None
    except ValueError:
        raise InputError("--policy", f"{text!r} has no number", "write for example fixed:0.5 or top:3") from None
    if value:
        return PriorMatched.from_target(open_records(value).keep_labels(labels).target())
    if config is None:
        wrong = f"{text!r} does not say of which training images"
        raise InputError("--policy", wrong, "write prior:DATA, or target for the shares of these images")
    return PriorMatched.from_target(open_training_records(config).train.keep_labels(labels).target())


def score_source(
    model: Classifier | PatchInference,
    records: RecordSet,
    *,
    config: RunConfig,
    size: int | None = None,
    keep_patches: bool,
    closer_size: int | None = None,
    progress: Callable[[int, int | None], None],
) -> Scored:
    """Score images with a model, or PAT-I around one, in all processes together; each gets the scores of all.

    `config` says how: workers, batch size, dtype and what a broken image does; `progress` is told batches that are
    done, of how many; `size` of the images is what the model wants by default. All else is as in `score_pictures`.
    """
    if not records.count_labels().any():
        raise InputError(records.name, "no image has any of the labels", "give images that have some")
    accelerator = make_accelerator(config)
    model = model.to(accelerator.device)
    if config.precision.channels_last:
        model = model.to(memory_format=torch.channels_last)
    inner = get_classifier(model, records.name)
    with own_settings(accelerator.device):
        loader = open_loader(records, config, model=inner, accelerator=accelerator, size=size)
        scores = score_pictures(
            model,
            loader,
            accelerator=accelerator,
            dtype=choose_dtype(config, accelerator.device),
            keep_patches=keep_patches,
            closer_size=closer_size,
            progress=lambda _what, done, total: progress(done, total),
        )
    not_read = {failure.name: str(failure.error) for failure in loader.failures}
    return Scored(scores, dict(sorted(gather_named(not_read, accelerator).items())))


def check_closer(model: Classifier, size: int) -> None:
    """Refuse a closer look that a model cannot take."""
    if not isinstance(model, PatchClassifier) or model.patch_only:
        raise InputError("--closer", "the model was not trained on images and patches (PAT-T)", "leave it out")
    try:
        model.closer_cost(size)
    except InputError as error:
        raise InputError("--closer", *error.parts[1:]) from None


def read_score_file(
    path: Path,
    *,
    records: RecordSet | None = None,
    like: Scores | None = None,
    tags_alone: bool = False,
    quiet: bool = False,
) -> Scores:
    """Read scores as `read_scores` does, and unless `quiet` tell on stderr what of them may surprise."""
    if path.is_dir() or str(path) in BUNDLED or is_named(str(path)):
        todo = f"make some first: pivotpatch evaluate {path} DATA --save x.parquet --keep-patches"
        raise InputError(str(path), f"is a {'folder' if path.is_dir() else 'model'}, not a file of scores", todo)
    told = (lambda _: None) if quiet else tell
    return read_scores(path, records=records, like=like, tags_alone=tags_alone, tell=told)
