"""Models: timm's backbones in, logits out. `open_model` opens any of them by name, folder or run."""

from typing import TYPE_CHECKING

from pivotpatch.faces import make_face

if TYPE_CHECKING:
    from pivotpatch.models.backbone import Preprocessing as Preprocessing
    from pivotpatch.models.checkpoint import save_checkpoint as save_checkpoint
    from pivotpatch.models.classifier import Architecture as Architecture
    from pivotpatch.models.classifier import Classifier as Classifier
    from pivotpatch.models.classifier import Embeddings as Embeddings
    from pivotpatch.models.classifier import IndependentClassifier as IndependentClassifier
    from pivotpatch.models.classifier import MultiLabelClassifier as MultiLabelClassifier
    from pivotpatch.models.foreign import ForeignClassifier as ForeignClassifier
    from pivotpatch.models.foreign import load_timm as load_timm
    from pivotpatch.models.foreign import load_transformers as load_transformers
    from pivotpatch.models.hub import Card as Card
    from pivotpatch.models.open import load_checkpoint as load_checkpoint
    from pivotpatch.models.open import open_model as open_model
    from pivotpatch.models.open import open_weights as open_weights
    from pivotpatch.models.patch_classifier import PatchClassifier as PatchClassifier

__getattr__ = make_face(
    __name__,
    {
        "backbone": "Preprocessing",
        "checkpoint": "save_checkpoint",
        "classifier": "Architecture Classifier Embeddings IndependentClassifier MultiLabelClassifier",
        "foreign": "ForeignClassifier load_timm load_transformers",
        "hub": "Card",
        "open": "load_checkpoint open_model open_weights",
        "patch_classifier": "PatchClassifier",
    },
)
