"""Engines around other people's multi-label networks, with PAT-I unless told otherwise."""

import os
from collections.abc import Sequence

import torch

from pivotpatch.inference.engine import TorchEngine
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.foreign import ForeignClassifier, load_timm, load_transformers
from pivotpatch.models.limits import check_views
from pivotpatch.models.preprocessing import Preprocessing


def open_transformers(
    name_or_folder: str | os.PathLike[str],
    *,
    labels: Sequence[str] | None = None,
    multi_label: bool = False,
    preprocessing: Preprocessing | None = None,
    pat: bool = True,
    device: str | torch.device | None = None,
    revision: str | None = None,
) -> TorchEngine:
    """An engine around an image classifier of transformers.

    Args:
        name_or_folder: see `load_transformers`, also for `labels`, `multi_label` and `revision`.
        labels: names of the L labels, in place of those that its configuration states.
        multi_label: say that it was trained for several labels per image where its configuration does not.
        preprocessing: what is done to images, in place of what its processor's configuration states.
        pat: look at 2 x 2 patches too, cut from the picture at twice the network's size (PAT-I), for five times the
            work. On by default: it is what this package adds to a network, it needs no training, and it says where a
            label comes from; nobody has fitted thresholds that it could spoil.
        device: where to run; the CPU by default.
        revision: a branch, tag or commit of the hub's.
    """
    model = load_transformers(
        name_or_folder, labels=labels, multi_label=multi_label, preprocessing=preprocessing, revision=revision
    )
    return open_foreign(model, pat=pat, device=device)


def open_timm(
    name_or_folder: str | os.PathLike[str],
    *,
    labels: Sequence[str] | None = None,
    pat: bool = True,
    device: str | torch.device | None = None,
    revision: str | None = None,
) -> TorchEngine:
    """An engine around a whole timm model whose logits are those of a sigmoid.

    Args:
        name_or_folder: see `load_timm`, also for `labels` and `revision`.
        labels: names of the L labels, in place of those that its configuration states.
        pat: see `open_transformers`.
        device: where to run; the CPU by default.
        revision: a branch, tag or commit of the hub's.
    """
    return open_foreign(load_timm(name_or_folder, labels=labels, revision=revision), pat=pat, device=device)


def open_foreign(
    model: ForeignClassifier, *, pat: bool = True, device: str | torch.device | None = None
) -> TorchEngine:
    """An engine around somebody else's network that is open already; the arguments are those of `open_transformers`."""
    if not pat:
        return TorchEngine(model, device=device)
    wrapped, seen = PatchInference(model), model.preprocessing.image_size
    sizes = {"source_size": wrapped.grid * seen, "patch_size": seen}
    check_views(seen, grid=wrapped.grid, overlap=wrapped.overlap, **sizes, where=model.called)
    model.source_size = sizes["source_size"]
    return TorchEngine(wrapped, device=device)
