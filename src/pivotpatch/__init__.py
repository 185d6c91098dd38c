"""pivotpatch: multi-label image classification that does not let one object vouch for another.

`PatchInference` wraps any trained model (PAT-I); `PatchClassifier` is the model of PAT-T. What
lies deeper, one function per equation, is in `pivotpatch.core`.
"""

from typing import TYPE_CHECKING

from pivotpatch.faces import make_face

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pivotpatch.core.counterfactual import CounterfactualLogits as CounterfactualLogits
    from pivotpatch.core.losses import AsymmetricLoss as AsymmetricLoss
    from pivotpatch.core.losses import BinaryCrossEntropyLoss as BinaryCrossEntropyLoss
    from pivotpatch.core.metrics import average_precision as average_precision
    from pivotpatch.core.metrics import precision_recall as precision_recall
    from pivotpatch.core.policies import Fixed as Fixed
    from pivotpatch.core.policies import PerLabel as PerLabel
    from pivotpatch.core.policies import PriorMatched as PriorMatched
    from pivotpatch.core.policies import TopK as TopK
    from pivotpatch.errors import InputError as InputError
    from pivotpatch.inference.patch_inference import PatchInference as PatchInference
    from pivotpatch.models.checkpoint import save_checkpoint as save_checkpoint
    from pivotpatch.models.classifier import MultiLabelClassifier as MultiLabelClassifier
    from pivotpatch.models.open import load_checkpoint as load_checkpoint
    from pivotpatch.models.patch_classifier import PatchClassifier as PatchClassifier
    from pivotpatch.runtime.prediction import Prediction as Prediction
    from pivotpatch.runtime.predictor import Predictor as Predictor
    from pivotpatch.runtime.values import Patching as Patching

_HOMES = {
    "core.counterfactual": "CounterfactualLogits",
    "core.losses": "AsymmetricLoss BinaryCrossEntropyLoss",
    "core.metrics": "average_precision precision_recall",
    "core.policies": "Fixed PerLabel PriorMatched TopK",
    "errors": "InputError",
    "inference.patch_inference": "PatchInference",
    "models.checkpoint": "save_checkpoint",
    "models.classifier": "MultiLabelClassifier",
    "models.open": "load_checkpoint",
    "models.patch_classifier": "PatchClassifier",
    "runtime.prediction": "Prediction",
    "runtime.predictor": "Predictor",
    "runtime.values": "Patching",
}
__all__ = sorted(" ".join(_HOMES.values()).split())
__getattr__ = make_face(__name__, _HOMES)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
