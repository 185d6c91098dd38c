"""What verbs look at: a run, a checkpoint or a file of scores, and the pictures behind it."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pivotpatch.errors import InputError

if TYPE_CHECKING:
    from pivotpatch.core.calibration import Calibration
    from pivotpatch.core.policies import PerLabel
    from pivotpatch.data.records import RecordSet
    from pivotpatch.inference.patch_inference import PatchInference
    from pivotpatch.inference.score_file import Scale
    from pivotpatch.inference.scores import Scores
    from pivotpatch.models.classifier import Classifier
    from pivotpatch.training.config import RunConfig

LISTED = 20  # pictures that could not be read


class Source(NamedTuple):
    """Where scores come from: a network, perhaps of a run, or a file.

    Attributes:
        path: what the user named.
        model: the network; None for a file of scores.
        config: of the run, where it is one.
        checkpoint: the network's folder; None for one on the hub, or somebody else's.
    """

    path: Path
    model: "Classifier | None" = None
    config: "RunConfig | None" = None
    checkpoint: Path | None = None


class Fitted(NamedTuple):
    """How a network decides, where that was fitted: thresholds, of calibrated probabilities where there are such."""

    policy: "PerLabel"
    calibration: "Calibration | None"


class Scored(NamedTuple):
    """Scores, and what was wrong with pictures that have none, by name."""

    scores: "Scores"
    not_read: dict[str, str]


def open_source(what: str | Path) -> Source:
    """A run's best network, a checkpoint, a network by name, or a file of scores, which is not read yet.

    Args:
        what: its path, or the name of a model as in `open_model`.
    """
    from pivotpatch.inference.score_file import SUFFIXES
    from pivotpatch.models.named import correct_scheme, find_bundled, is_named

    path = find_bundled(str(what)) or Path(what)
    if path.suffix.lower() in SUFFIXES and not path.is_dir() and not is_named(str(what)):
        if not path.exists():  # it is read later, perhaps after work that would be lost
            raise InputError(str(what), "there is no such file", f"{correct_scheme(str(what))}check the path")
        return Source(path)
    from pivotpatch.models.open import find_checkpoint, open_model
    from pivotpatch.training.config import load_config
    from pivotpatch.training.folder import CONFIG

    if is_named(str(what)):
        return Source(path, open_model(what))
    checkpoint = find_checkpoint(what)
    configured = checkpoint != path and (path / CONFIG).is_file()
    return Source(path, open_model(checkpoint), load_config(path / CONFIG) if configured else None, checkpoint)


def find_pictures(words: list[str]) -> str | None:
    """The address that the word behind a source names; None where there is none."""
    if not words:
        return None
    from pivotpatch.data.address import read_address

    address = read_address(words[0])
    if address is None:
        raise InputError(f"{words[0]!r}", "is neither an address nor a table or folder that is there", "check the path")
    return address


def open_pictures(words: list[str]) -> "RecordSet | None":
    """The pictures that the word behind a source names; None where there is none."""
    from pivotpatch.data.address import open_records

    address = find_pictures(words)
    return None if address is None else open_records(address)


def keep_known_labels(records: "RecordSet", model: "Classifier") -> "RecordSet":
    """Pictures with the labels that a network knows, told on stderr where the pictures lack some of them."""
    from pivotpatch.data.records import keep_common_labels

    return keep_common_labels(records, model.labels, whose="the network", tell=tell)


def find_fitted(model: "Classifier", labels: Sequence[str], *, closer_size: int | None) -> Fitted | None:
    """How a network decides about some of its labels; None where no thresholds were fitted.

    Args:
        model: the network.
        labels: some of its own.
        closer_size: as in `Classifier.find_calibration`.
    """
    from pivotpatch.core.policies import PerLabel

    if model.thresholds is None:
        return None
    places = [model.labels.index(name) for name in labels]
    calibration = model.find_calibration(closer_size=closer_size)
    chosen = None if calibration is None else calibration.select(places)
    return Fitted(PerLabel(tuple(model.thresholds[place] for place in places)), chosen)


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
    """Score pictures with a network, in all processes together; each gets the scores of all.

    Args:
        model: a network, or PAT-I around one.
        records: the pictures, with labels that the network knows.
        config: says how: workers, batch size, dtype and what a broken picture does.
        size: rows and columns of the pictures; those that the network wants by default.
        keep_patches: keep logits and weights of each patch.
        closer_size: look at whole pictures again at so many pixels a side, not at patches; see `check_closer`.
        progress: told batches that are done, of how many.
    """
    import torch

    from pivotpatch.inference.patch_inference import PatchInference
    from pivotpatch.inference.scoring import score_pictures
    from pivotpatch.models.classifier import Classifier
    from pivotpatch.training.build import choose_dtype, open_loader
    from pivotpatch.training.processes import gather_named, make_accelerator, own_settings

    accelerator = make_accelerator(config)
    model = model.to(accelerator.device)
    if config.precision.channels_last:
        model = model.to(memory_format=torch.channels_last)
    network = model.model if isinstance(model, PatchInference) else model
    assert isinstance(network, Classifier)
    with own_settings(accelerator.device):
        loader = open_loader(records, config, model=network, accelerator=accelerator, size=size)
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
    """Refuse a closer look that a network cannot take."""
    from pivotpatch.models.patch_classifier import PatchClassifier

    if not isinstance(model, PatchClassifier) or model.patch_only:
        raise InputError("--closer", "the network was not trained on images and patches (PAT-T)", "leave it out")
    try:
        model.closer_cost(size)
    except InputError as error:
        raise InputError("--closer", *error.parts[1:]) from None


def read_score_file(
    path: Path, *, records: "RecordSet | None" = None, like: "Scores | None" = None, scale: "Scale" = "auto"
) -> "Scores":
    """Read scores as `read_scores` does, and tell on stderr what of them may surprise."""
    from pivotpatch.inference.score_file import read_scores
    from pivotpatch.models.named import BUNDLED, is_named

    if path.is_dir() or str(path) in BUNDLED or is_named(str(path)):
        todo = f"make some first: pivotpatch evaluate {path} DATA --save x.parquet --keep-patches"
        raise InputError(str(path), f"is a {'folder' if path.is_dir() else 'network'}, not a file of scores", todo)
    return read_scores(path, records=records, like=like, scale=scale, tell=tell)


def list_not_read(not_read: Mapping[str, str], *, rest: str = ", --json lists all") -> None:
    """Tell on stderr which pictures have no scores; the first few of many, and where the rest is told."""
    for wrong in list(not_read.values())[:LISTED]:
        tell(f"not read: {wrong}")
    if len(not_read) > LISTED:
        tell(f"not read: {len(not_read) - LISTED} more{rest}")


def tell(line: str) -> None:
    """Say a line on stderr, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
