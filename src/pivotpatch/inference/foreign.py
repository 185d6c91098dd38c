"""Engines around other people's multi-label models, with PAT-I unless told otherwise."""

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
    """An engine around an image classifier of transformers; see `load_transformers` and `open_foreign`."""
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
    """An engine around a whole timm model whose logits are those of a sigmoid; see `load_timm` and `open_foreign`."""
    return open_foreign(load_timm(name_or_folder, labels=labels, revision=revision), pat=pat, device=device)


def open_foreign(
    model: ForeignClassifier, *, pat: bool = True, device: str | torch.device | None = None
) -> TorchEngine:
    """An engine around somebody else's model.

    Args:
        model: from `load_transformers` or `load_timm`.
        pat: look at 2 x 2 patches too, cut from the image at twice the model's size (PAT-I), for five times the
            work. It needs no training and says where a label comes from; no fitted thresholds are there to spoil.
        device: where to run; the CPU by default.
    """
    if not pat:
        return TorchEngine(model, device=device)
    wrapped, seen = PatchInference(model), model.preprocessing.image_size
    cut = wrapped.patching
    model.source_size = cut.grid * seen
    sizes = {"source_size": model.source_size, "patch_size": seen}
    check_views(seen, grid=cut.grid, overlap=cut.overlap, **sizes, where=model.called)
    return TorchEngine(wrapped, device=device)
