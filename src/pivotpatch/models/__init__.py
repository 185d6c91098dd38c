"""Models: timm's backbones in, logits out. `open_model` opens any of them by name, folder or run."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pivotpatch.models.classifier import Architecture, Classifier, IndependentClassifier
    from pivotpatch.models.foreign import ForeignClassifier, load_timm, load_transformers
    from pivotpatch.models.hub import Card
    from pivotpatch.models.open import open_model
    from pivotpatch.models.patch_classifier import PatchClassifier
    from pivotpatch.models.preprocessing import Preprocessing

# Imported when first used: names and limits are asked for where nobody should wait for torch.
_HOMES = {
    "Architecture": "classifier",
    "Card": "hub",
    "Classifier": "classifier",
    "ForeignClassifier": "foreign",
    "IndependentClassifier": "classifier",
    "PatchClassifier": "patch_classifier",
    "Preprocessing": "preprocessing",
    "load_timm": "foreign",
    "load_transformers": "foreign",
    "open_model": "open",
}

__all__ = [
    "Architecture",
    "Card",
    "Classifier",
    "ForeignClassifier",
    "IndependentClassifier",
    "PatchClassifier",
    "Preprocessing",
    "load_timm",
    "load_transformers",
    "open_model",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pivotpatch.models' has no attribute {name!r}")
    return getattr(import_module(f"pivotpatch.models.{_HOMES[name]}"), name)
