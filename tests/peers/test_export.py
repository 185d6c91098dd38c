"""Every head of another system as an ONNX file says what it says in torch."""

from pathlib import Path

import pytest
import torch
from made_networks import PEER_OPTIONS, make_pictures

from pivotpatch.export.onnx import export_onnx
from pivotpatch.models.classifier import Architecture
from pivotpatch.models.heads import PEERS
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.peers.label_priors import LabelPrior


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PEERS))
def test_an_exported_system_agrees_with_torch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = PatchClassifier(Architecture("test_resnet", name, 96, head_options=PEER_OPTIONS[name]), ("a", "b", "c"))
    for part in model.modules():
        if isinstance(part, LabelPrior):
            part.learn_counts(torch.tensor([[4, 2, 0], [2, 3, 1], [0, 1, 5]]))
    images = model.eval().preprocessing(make_pictures(4, 96, 96))
    with torch.no_grad():  # logits of about 1, so that a difference would be seen
        logits = model.forward_images(images)
        for weight in model.head.project.parameters():
            weight.mul_(1 / logits.std().clamp(min=1e-3).item() if name != "csra" else 1)
    assert export_onnx(model, tmp_path / "model.onnx").difference < 1e-4
