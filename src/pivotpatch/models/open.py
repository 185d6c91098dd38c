"""Open a model by whatever a user calls it."""

import os
from collections.abc import Callable
from pathlib import Path

from pivotpatch.errors import InputError, choose_one_of
from pivotpatch.models.checkpoint import load_checkpoint
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.foreign import load_timm, load_transformers
from pivotpatch.models.hub import fetch_folder
from pivotpatch.models.named import BUNDLED, correct_scheme, find_bundled, is_named
from pivotpatch.models.saving import CARD, DESCRIPTION, WEIGHTS

_RUN = ("config.toml", "best", "last")  # what a run's folder holds


def open_model(name: str | os.PathLike[str]) -> Classifier:
    """Open a model in evaluation mode, on the CPU.

    Args:
        name: a bundled model ("tagger"), the folder of a checkpoint, or of a run, whose best model is taken. "hub:",
            "timm:" or "transformers:" stand before a folder or before `owner/name` on the Hugging Face hub, behind
            which a revision may stand: "hub:owner/name@v2". The last two are other people's models, which become a
            `ForeignClassifier`.
    """
    name = os.fspath(name)
    return _open_named(name) if is_named(name) else load_checkpoint(find_checkpoint(name))


def find_checkpoint(name: str | os.PathLike[str]) -> Path:
    """The checkpoint folder of a bundled model, or that a run or checkpoint folder holds."""
    bundled, path = find_bundled(os.fspath(name)), Path(name)
    if bundled is not None:
        return bundled
    if not path.is_dir():
        known = f"{correct_scheme(str(path))}{choose_one_of(str(path), BUNDLED)}"
        wrong = "is a file" if path.exists() else "is neither a bundled model nor a folder or file that is there"
        raise InputError(str(path), wrong, f"{known}; or give the folder of a run or checkpoint, or an .onnx file")
    if (path / DESCRIPTION).exists() or not any((path / part).exists() for part in _RUN):
        return path
    if not (path / "best").is_dir():
        raise InputError(str(path), "the run has no best model yet", f"train on, or give {path / 'last'}")
    return path / "best"


def _open_named(name: str) -> Classifier:
    scheme, _, whole = name.partition(":")
    place, _, tail = (whole, "", "") if Path(whole).exists() else whole.partition("@")
    loaders: dict[str, Callable[..., Classifier]]
    loaders = {"hub": _load_hub, "timm": load_timm, "transformers": load_transformers}
    try:
        model = loaders[scheme](place, revision=tail or None)
    except InputError as error:
        where, wrong, todo = error.parts
        itself = any(said.rstrip("/").endswith(where) for said in (place, whole))  # a file of it keeps its own name
        raise InputError(name if itself else where, wrong, todo) from error
    model.origin = name
    return model


def _load_hub(place: str, *, revision: str | None) -> Classifier:
    return load_checkpoint(fetch_folder(place, needed=DESCRIPTION, also=(WEIGHTS, CARD), revision=revision))
