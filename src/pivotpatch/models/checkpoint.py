"""A checkpoint is a folder: model.safetensors holds the tensors, model.json explains them."""

import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pivotpatch import __version__
from pivotpatch.core.errors import InputError, choose_one_of
from pivotpatch.models.classifier import Architecture, Classifier, MultiLabelClassifier, PatchClassifier
from pivotpatch.models.preprocessing import Preprocessing
from pivotpatch.models.weights import load_exactly, read_weights

SCHEMA = 1
WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
_KINDS: dict[str, type[Classifier]] = {
    "MultiLabelClassifier": MultiLabelClassifier,
    "PatchClassifier": PatchClassifier,
}
_KEYS = ("kind", "architecture", "labels", "preprocessing", "thresholds", "patching")


def save_checkpoint(model: Classifier, folder: str | Path, *, overwrite: bool = False) -> None:
    """Write a network as a checkpoint folder, whole or not at all.

    Args:
        model: a `MultiLabelClassifier` or `PatchClassifier`.
        folder: where to; it must not exist unless `overwrite`.
        overwrite: replace what is there. The old folder stays until the new one is complete; a
            crash in between leaves it beside as `<folder>.old`.
    """
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise InputError(str(folder), "exists already", "choose another folder or allow overwriting")
    description = {
        "schema": SCHEMA,
        "pivotpatch": __version__,
        "kind": type(model).__name__,
        "architecture": model.architecture.to_dict(),
        "labels": list(model.labels),
        "preprocessing": asdict(model.preprocessing),
        "thresholds": None if model.thresholds is None else list(model.thresholds),
        "patching": {"grid": model.grid, "lam": model.lam, "temperature": model.temperature}
        if isinstance(model, PatchClassifier)
        else None,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
        save_file(state, scratch / WEIGHTS, metadata={"format": "pt"})
        (scratch / DESCRIPTION).write_text(json.dumps(description, indent=2, ensure_ascii=False) + "\n", "utf-8")
        for name in (WEIGHTS, DESCRIPTION):
            _flush(scratch / name)
        scratch.chmod(0o755)
        _put_in_place(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load_checkpoint(folder: str | Path) -> Classifier:
    """Build the network that a checkpoint folder describes, in evaluation mode, on the CPU."""
    folder = Path(folder)
    where = str(folder / DESCRIPTION)
    description = _read_description(folder)
    kind = description["kind"]
    if kind not in _KINDS:
        raise InputError(where, f"unknown kind {kind!r}", choose_one_of(str(kind), _KINDS))
    try:
        with torch.random.fork_rng(devices=[]):  # the weights drawn here are replaced at once
            model = _KINDS[kind](
                Architecture(**description["architecture"]), description["labels"], **(description["patching"] or {})
            )
        stated = description["preprocessing"]
        model.preprocessing = Preprocessing(**{**stated, "mean": tuple(stated["mean"]), "std": tuple(stated["std"])})
    except (TypeError, KeyError) as error:
        raise InputError(where, f"does not describe a network ({error})", "save the checkpoint again") from error
    thresholds = description["thresholds"]
    if thresholds is not None:
        if len(thresholds) != len(model.labels):
            raise InputError(where, f"{len(thresholds)} thresholds for {len(model.labels)} labels", "fit them again")
        model.thresholds = tuple(thresholds)
    load_exactly(model, read_weights(folder / WEIGHTS), where=str(folder / WEIGHTS))
    return model.eval()


def _read_description(folder: Path) -> dict[str, Any]:
    """The description of a checkpoint, complete and of a schema that this version reads."""
    path = folder / DESCRIPTION
    if not path.is_file():
        old = folder.with_name(folder.name + ".old")
        todo = f"an interrupted save left the last one in {old}, rename it" if old.is_dir() else "check the path"
        raise InputError(str(folder), f"is no checkpoint, {DESCRIPTION} is missing", todo)
    try:
        description = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"is no JSON ({error})", "it is damaged, copy the checkpoint again") from error
    if not isinstance(description, dict) or not isinstance(description.get("schema"), int):
        raise InputError(str(path), "states no schema", "it is not a checkpoint of pivotpatch")
    if description["schema"] > SCHEMA:
        raise InputError(
            str(path),
            f"schema {description['schema']} is newer than {SCHEMA}, the newest that pivotpatch {__version__} reads",
            "upgrade pivotpatch",
        )
    missing = [key for key in _KEYS if key not in description]
    if missing:
        raise InputError(str(path), f"lacks {', '.join(missing)}", "save the checkpoint again")
    return description


def _flush(path: Path) -> None:
    """Wait until a file is on the disk, so that a rename can not outrun its content."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _put_in_place(scratch: Path, folder: Path) -> None:
    """Rename a complete folder to its final name; an old one steps aside first and is then removed."""
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    scratch.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
