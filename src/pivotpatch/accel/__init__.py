"""GPU craft behind two doors: `quicken_training(model)` and `quicken_inference(backbone, ...)`."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pivotpatch.accel.inference import quicken_inference
    from pivotpatch.accel.rewrites import quicken_training

__all__ = ["quicken_inference", "quicken_training"]
_HOMES = {"quicken_inference": "inference", "quicken_training": "rewrites"}


def __getattr__(name: str) -> object:  # loaded when first used: `accel.device` needs no timm
    if name not in _HOMES:
        raise AttributeError(f"module 'pivotpatch.accel' has no attribute {name!r}")
    return getattr(import_module(f"pivotpatch.accel.{_HOMES[name]}"), name)
