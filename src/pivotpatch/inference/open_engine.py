"""The engine of a model that needs torch, opened by its name and prepared for its device."""

import os
from dataclasses import replace

import torch

from pivotpatch.accel import quicken_inference
from pivotpatch.accel.device import has_bfloat16
from pivotpatch.errors import InputError
from pivotpatch.inference.engine import TorchEngine
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.classifier import Classifier, SharedClassifier
from pivotpatch.models.foreign import ForeignClassifier
from pivotpatch.models.open import open_model
from pivotpatch.runtime.predictor import TAGGER
from pivotpatch.runtime.values import check_views

_TRIED = 512  # rows and columns of images on which folding is tried, at most: more would only take longer


def open_engine(
    name: str | os.PathLike[str] | Classifier,
    *,
    device: str | torch.device | None = None,
    effort: float = 1.0,
    fold: bool = True,
) -> TorchEngine:
    """As `Predictor.load`, for what is no ONNX file."""
    chosen = _choose_device(device)
    model = name if isinstance(name, Classifier) else open_model(os.fspath(name))
    if isinstance(model, ForeignClassifier):
        if 0 < effort < 1:
            wrong = f"is {effort:g}, but PAT-I looks at the patches of all images or of none"
            raise InputError("effort", wrong, "give 1 or 0")
        return _wrap_foreign(model, pat=effort == 1, device=chosen)
    engine = prepare_engine(model, device=chosen, effort=effort, fold=fold)
    engine.exported = TAGGER if name == "tagger" else None
    return engine


def _choose_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        reason = str(error).partition("\n")[0]
        raise InputError("device", f"{device!r} cannot be used ({reason})", "choose cpu or another") from None


def prepare_engine(model: Classifier, *, device: torch.device, effort: float = 1.0, fold: bool = True) -> TorchEngine:
    """An engine for a model that nobody else holds, which is changed into what the device is fastest with.

    Args:
        model: the model, on any device.
        device: where to run.
        effort: as in `Predictor.load`.
        fold: likewise.
    """
    model.eval()
    half = torch.bfloat16 if has_bfloat16(device) else torch.float16
    dtype = half if device.type == "cuda" else torch.float32
    if fold and isinstance(model, SharedClassifier):
        seen = model.preprocessing.image_size
        side = seen if model.backbone.fixed_size else min(seen, _TRIED)
        model.backbone = quicken_inference(model.backbone, side=side, device=device, dtype=dtype)
    return TorchEngine(model.to(memory_format=torch.channels_last), device=device, dtype=dtype, effort=effort)


def _wrap_foreign(model: ForeignClassifier, *, pat: bool, device: torch.device) -> TorchEngine:
    """An engine around somebody else's model, with PAT-I or without: no fitted thresholds are there to spoil."""
    if not pat:
        return TorchEngine(model, device=device)
    wrapped, seen = PatchInference(model), model.preprocessing.image_size
    model.source_size = wrapped.patching.grid * seen
    check_views(seen, replace(wrapped.patching, source_size=model.source_size), where=model.called)
    return TorchEngine(wrapped, device=device)
