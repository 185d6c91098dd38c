"""What a user may name: a run, a checkpoint, a model by name or a file of scores, images, and a policy."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pivotpatch.errors import InputError, choose_one_of, quote_fault

if TYPE_CHECKING:
    import argparse

    from pivotpatch.audit.evaluation import Policy
    from pivotpatch.data.records import RecordSet
    from pivotpatch.inference.patch_inference import PatchInference
    from pivotpatch.inference.scores import Scores
    from pivotpatch.models.classifier import Classifier
    from pivotpatch.training.config import RunConfig

LISTED = 20  # images that could not be read
POLICIES = ("fixed", "best-fixed", "top", "prior", "target", "fitted")
POLICY_HELP = (
    "what decides: fixed:P, best-fixed (of 0.5, 0.55 .. 0.95), top:K, prior (as often as in training; prior:DATA where "
    "that is no run's), target (as often as in these images) or fitted (the model's own thresholds)"
)


class Source(NamedTuple):
    """Where scores come from: a model, perhaps of a run, or a file."""

    path: Path  # what the user named
    model: "Classifier | None" = None  # None for a file of scores
    config: "RunConfig | None" = None  # of the run, where it is one
    checkpoint: Path | None = None  # the model's folder; None for one on the hub, or somebody else's


class Scored(NamedTuple):
    """Scores, and what was wrong with images that have none, by name."""

    scores: "Scores"
    not_read: dict[str, str]


def refuse_first(*rules: tuple[object, str, str, str]) -> None:
    """Raise the error of the first rule that holds: whether it does, where, what is wrong, what to do."""
    for holds, where, wrong, todo in rules:
        if holds:
            raise InputError(where, wrong, todo)


def add_weights_options(parser: "argparse.ArgumentParser") -> None:
    """Add what a file of weights does not say of itself."""
    parser.add_argument(
        "--architecture",
        metavar="A",
        help="of a file of weights or an ONNX graph: a recipe, or BACKBONE+HEAD@SIZE such as resnet101+query2label@448",
    )
    parser.add_argument("--labels", type=Path, metavar="FILE", help="names of its labels: a line each, or a JSON list")


def open_given(what: str | Path, *, architecture: str | None, labels: Path | None) -> "Classifier":
    """A model by name, or a file of weights whose architecture and labels a user says; see `open_weights`."""
    from pivotpatch.models.classifier import Architecture
    from pivotpatch.models.open import open_model, open_weights
    from pivotpatch.training.config import find_recipe, list_recipes, load_config

    names = None if labels is None else read_names(labels)
    if architecture is None:
        return open_model(what, labels=names)
    if not architecture.endswith(".toml") and architecture not in [recipe.name for recipe in list_recipes()]:
        return open_weights(what, architecture, labels=names)
    config = load_config(find_recipe(architecture))
    said = config.model.model_dump(include={"backbone", "head", "image_size", "backbone_options", "head_options"})
    patching = config.task.model_dump(exclude={"kind"})
    normalise = config.model.normalise
    return open_weights(what, Architecture(**said), labels=names, patching=patching, normalise=normalise)


def read_names(path: Path) -> list[str]:
    """Names of labels from a file: a JSON list, or a line each."""
    try:
        text = path.read_text("utf-8")
        names = json.loads(text) if path.suffix == ".json" else [*filter(None, map(str.strip, text.splitlines()))]
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(str(path), f"cannot be read ({quote_fault(error)})", "give a name a line") from None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InputError(str(path), "holds no list of names", "give a name a line, or a JSON list of names")
    return names


def open_source(what: str | Path, *, architecture: str | None = None, labels: Path | None = None) -> Source:
    """A run's best model, a checkpoint, a model as in `open_given`, or a file of scores, which is not read yet."""
    from pivotpatch.inference.score_file import SUFFIXES
    from pivotpatch.models.open import find_bundled, find_checkpoint, is_named, open_model

    path = find_bundled(str(what)) or Path(what)
    if path.suffix.lower() in SUFFIXES and not path.is_dir() and not is_named(str(what)):
        if not path.exists():  # it is read later, perhaps after work that would be lost
            raise InputError(str(what), "there is no such file", "check the path")
        return Source(path)
    from pivotpatch.models.checkpoint import DESCRIPTION
    from pivotpatch.training.config import load_config
    from pivotpatch.training.folder import CONFIG

    if is_named(str(what)) or architecture is not None or labels is not None:
        return Source(path, open_given(what, architecture=architecture, labels=labels))
    checkpoint = find_checkpoint(what)
    configured = checkpoint != path and (path / CONFIG).is_file()
    ours = (checkpoint / DESCRIPTION).exists()
    model, config = open_model(checkpoint), load_config(path / CONFIG) if configured else None
    return Source(path, model, config, checkpoint if ours else None)


def open_pictures(words: list[str]) -> "RecordSet | None":
    """The images that the word behind a source names; None where there is none."""
    from pivotpatch.data.address import open_records, read_address

    if not words:
        return None
    if len(words) > 1:
        raise InputError(f"{words[1]!r}", "a third word", "give a model or scores, then the images")
    address = read_address(words[0])
    if address is None:
        raise InputError(f"{words[0]!r}", "is neither an address nor a table or folder that is there", "check the path")
    return open_records(address)


def keep_known_labels(records: "RecordSet", model: "Classifier") -> "RecordSet":
    """Images with the labels that a model knows, told on stderr where the images lack some of them."""
    from pivotpatch.cli.console import tell
    from pivotpatch.data.records import keep_common_labels

    return keep_common_labels(records, model.labels, whose="the model", tell=tell)


def read_policy(text: str, labels: Sequence[str], *, config: "RunConfig | None" = None) -> "Policy":
    """The policy that a word names: the same words for all verbs.

    `prior` counts the shares of `labels` in DATA, or in the training images of the run that `config` is of.
    """
    from pivotpatch.core.policies import Fixed, PriorMatched, TopK
    from pivotpatch.training.build import open_aligned, open_training_records

    name, _, value = text.partition(":")
    if text in ("fitted", "target", "best-fixed"):
        return text  # type: ignore[return-value]
    if name not in POLICIES:
        raise InputError("--policy", f"unknown policy {text!r}", choose_one_of(name, POLICIES))
    try:
        if name == "fixed":
            return Fixed(float(value))
        if name == "top":
            return TopK(int(value))
    except InputError:
        raise
    except ValueError:
        raise InputError("--policy", f"{text!r} has no number", "write for example fixed:0.5 or top:3") from None
    if value:
        return PriorMatched.from_target(open_aligned(value, labels).target())
    if config is None:
        wrong = f"{text!r} does not say of which training images"
        raise InputError("--policy", wrong, "write prior:DATA, or target for the shares of these images")
    return PriorMatched.from_target(open_training_records(config).train.keep_labels(labels).target())


def score_source(
    model: "Classifier | PatchInference",
    records: "RecordSet",
    *,
    config: "RunConfig",
    size: int | None = None,
    keep_patches: bool,
    closer_size: int | None = None,
    progress: Callable[[int, int | None], None],
) -> Scored:
    """Score images with a model, or PAT-I around one, in all processes together; each gets the scores of all.

    `config` says how: workers, batch size, dtype and what a broken image does; `progress` is told batches that are
    done, of how many; `size` of the images is what the model wants by default. All else is as in `score_pictures`.
    """
    import torch

    from pivotpatch.inference.scoring import get_classifier, score_pictures
    from pivotpatch.training.build import open_loader
    from pivotpatch.training.processes import choose_dtype, gather_named, make_accelerator, own_settings

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


def check_closer(model: "Classifier", size: int) -> None:
    """Refuse a closer look that a model cannot take."""
    from pivotpatch.models.patch_classifier import PatchClassifier

    if not isinstance(model, PatchClassifier) or model.patch_only:
        raise InputError("--closer", "the model was not trained on images and patches (PAT-T)", "leave it out")
    try:
        model.closer_cost(size)
    except InputError as error:
        raise InputError("--closer", *error.parts[1:]) from None


def read_score_file(
    path: Path,
    *,
    records: "RecordSet | None" = None,
    like: "Scores | None" = None,
    tags_alone: bool = False,
    quiet: bool = False,
) -> "Scores":
    """Read scores as `read_scores` does, and unless `quiet` tell on stderr what of them may surprise."""
    from pivotpatch.cli.console import tell
    from pivotpatch.inference.score_file import read_scores
    from pivotpatch.models.open import BUNDLED, is_named

    if path.is_dir() or str(path) in BUNDLED or is_named(str(path)):
        todo = f"make some first: pivotpatch evaluate {path} DATA --save x.parquet --keep-patches"
        raise InputError(str(path), f"is a {'folder' if path.is_dir() else 'model'}, not a file of scores", todo)
    told = (lambda _: None) if quiet else tell
    return read_scores(path, records=records, like=like, tags_alone=tags_alone, tell=told)


def list_not_read(not_read: Mapping[str, str], *, rest: str = ", --json lists all") -> None:
    """Tell on stderr which images have no scores; the first few of many, and where the rest is told."""
    from pivotpatch.cli.console import tell

    for wrong in list(not_read.values())[:LISTED]:
        tell(f"not read: {wrong}")
    if len(not_read) > LISTED:
        tell(f"not read: {len(not_read) - LISTED} more{rest}")
