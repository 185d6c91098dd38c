"""Open a checkpoint folder, whatever kind of model it holds; how it is written is in `saving`."""

from pathlib import Path

from pivotpatch.models.classifier import Classifier, IndependentClassifier, MultiLabelClassifier
from pivotpatch.models.named import find_bundled
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.saving import (
    CARD,
    DESCRIPTION,
    WEIGHTS,
    Kind,
    fingerprint,
    read_description,
    save_checkpoint,
    write_checkpoint,
)

__all__ = ["CARD", "DESCRIPTION", "WEIGHTS", "fingerprint", "load_checkpoint", "save_checkpoint", "write_checkpoint"]

_KINDS: dict[Kind, type[Classifier]] = {
    "MultiLabelClassifier": MultiLabelClassifier,
    "PatchClassifier": PatchClassifier,
    "IndependentClassifier": IndependentClassifier,
}


def load_checkpoint(folder: str | Path) -> Classifier:
    """Build the model that a checkpoint folder describes, in evaluation mode, on the CPU, in float32.

    Args:
        folder: of the checkpoint, or the name of a bundled model.
    """
    folder = find_bundled(str(folder)) or Path(folder)
    described = read_description(folder)
    return _KINDS[described.kind].build_described(described, folder)
