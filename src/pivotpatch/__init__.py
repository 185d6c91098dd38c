"""pivotpatch: multi-label image classification that does not let one object vouch for another.

`PatchInference` wraps any trained model (PAT-I); `PatchClassifier` is the model of PAT-T. What
lies deeper, one function per equation, is in `pivotpatch.core`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from pivotpatch.errors import explain_missing

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pivotpatch.core.counterfactual import CounterfactualLogits
    from pivotpatch.core.losses import AsymmetricLoss, BinaryCrossEntropyLoss
    from pivotpatch.core.metrics import average_precision, precision_recall
    from pivotpatch.core.policies import Fixed, PerLabel, PriorMatched, TopK
    from pivotpatch.errors import InputError
    from pivotpatch.inference.patch_inference import PatchInference
    from pivotpatch.models.checkpoint import save_checkpoint
    from pivotpatch.models.classifier import MultiLabelClassifier
    from pivotpatch.models.open import load_checkpoint
    from pivotpatch.models.patch_classifier import PatchClassifier
    from pivotpatch.runtime.prediction import Prediction
    from pivotpatch.runtime.predictor import Predictor

# Imported when first used: `pivotpatch --help` must not wait for torch.
_HOMES = {
    "AsymmetricLoss": "core.losses",
    "BinaryCrossEntropyLoss": "core.losses",
    "CounterfactualLogits": "core.counterfactual",
    "Fixed": "core.policies",
    "InputError": "errors",
    "MultiLabelClassifier": "models.classifier",
    "PatchClassifier": "models.patch_classifier",
    "PatchInference": "inference.patch_inference",
    "PerLabel": "core.policies",
    "Prediction": "runtime.prediction",
    "Predictor": "runtime.predictor",
    "PriorMatched": "core.policies",
    "TopK": "core.policies",
    "average_precision": "core.metrics",
    "load_checkpoint": "models.open",
    "precision_recall": "core.metrics",
    "save_checkpoint": "models.checkpoint",
}

__all__ = [
    "AsymmetricLoss",
    "BinaryCrossEntropyLoss",
    "CounterfactualLogits",
    "Fixed",
    "InputError",
    "MultiLabelClassifier",
    "PatchClassifier",
    "PatchInference",
    "PerLabel",
    "Prediction",
    "Predictor",
    "PriorMatched",
    "TopK",
    "average_precision",
    "load_checkpoint",
    "precision_recall",
    "save_checkpoint",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pivotpatch' has no attribute {name!r}")
    try:
        return getattr(import_module(f"pivotpatch.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"pivotpatch.{name}: {explain_missing(error)}", name=error.name) from None


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
