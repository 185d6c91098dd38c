"""KSSNet between the stages of a backbone, one image, place and label at a time."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from reference.peers import kssnet, kssnet_edges, kssnet_injected

from pivotpatch import PatchClassifier
from pivotpatch.accel.fusing import fuse_activations
from pivotpatch.accel.inference import fold_norms
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import Architecture, MultiLabelClassifier

LABELS = ("cat", "dog", "cup")
COUNTS = torch.tensor([[90, 6, 0], [6, 80, 1], [0, 1, 30]])


def make(backbone: str = "test_resnet", kind: type[Any] = MultiLabelClassifier) -> Any:
    torch.manual_seed(0)
    model = kind(Architecture(backbone, "kssnet", 64, head_options={"vector_width": 6}), LABELS).eval()
    model.head.graph.learn_counts(COUNTS)
    with torch.no_grad():
        for lateral in model.head.laterals:
            lateral.normal_(std=0.05)
    return model


def test_labels_are_injected_behind_every_stage_but_the_last() -> None:
    model, images = make().double(), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    state = {key: value.numpy() for key, value in model.head.state_dict().items()}
    network = model.backbone.network
    with torch.no_grad():
        logits = model(images)
        for image, found in zip(images, logits, strict=True):
            features = network.maxpool(network.act1(network.bn1(network.conv1(image[None]))))
            for stage in range(4):
                features = getattr(network, f"layer{stage + 1}").forward(features)  # its hooks left out
                if stage < 3:
                    features = torch.from_numpy(kssnet_injected(state, features[0].numpy(), stage))[None]
            expected = [kssnet(state, features[0].numpy(), label) for label in range(len(LABELS))]
            assert found.tolist() == pytest.approx(expected, rel=1e-6)
        for lateral in model.head.laterals:
            lateral.zero_()
        assert (model(images) - logits).abs().max() > 1e-3


def test_the_graph_is_co_occurrence_and_a_label_itself() -> None:
    edges = make().head.graph.edges
    torch.testing.assert_close(edges, torch.from_numpy(kssnet_edges(COUNTS.double().numpy())).float())
    assert edges[0, 1] > 0
    assert edges[0, 2] == edges[1, 2] == 0  # one dog in 80 images with a cup in 30: less than 0.03


def test_it_begins_as_the_backbone_was() -> None:
    torch.manual_seed(0)
    model = MultiLabelClassifier(Architecture("test_resnet", "kssnet", 64), LABELS).eval()
    plain = MultiLabelClassifier("test_resnet", LABELS, image_size=64).eval()
    plain.backbone.load_state_dict(model.backbone.state_dict())
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model.backbone(images), plain.backbone(images))


@pytest.mark.parametrize("kind", [MultiLabelClassifier, PatchClassifier])
def test_a_copy_is_connected_to_its_own_labels(kind: type[Any]) -> None:
    model, images = make(kind=kind), torch.randn(1, 3, 64, 64)
    copies = [deepcopy(model)]
    if kind is MultiLabelClassifier:
        copies.append(PatchClassifier.from_classifier(model))
    for copy in copies:
        with torch.no_grad():
            before = copy.backbone(images)
            torch.testing.assert_close(before, model.backbone(images))
            model.head.laterals[0].add_(1)
            torch.testing.assert_close(copy.backbone(images), before)
            copy.head.laterals[0].add_(1)
            torch.testing.assert_close(copy.backbone(images), model.backbone(images))
            model.head.laterals[0].sub_(1)


@pytest.mark.parametrize("backbone", ["test_resnet", "tf_efficientnet_lite0"])
def test_what_is_made_faster_says_the_same(backbone: str) -> None:
    model, images = make(backbone), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model.backbone(images)
        folded = fold_norms(model.backbone, side=64)
        folded.network = fuse_activations(folded.network)
        hooks = [hook for part in folded.modules() for hook in part._forward_hooks.values()]
        assert all(hook.func.__self__ is model.head for hook in hooks)  # which moves to a GPU with the model
        torch.testing.assert_close(folded(images), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("backbone", ["test_vit", "swin_tiny_patch4_window7_224"])
def test_backbones_without_maps_between_stages_are_refused(backbone: str) -> None:
    with pytest.raises(InputError, match="KSSNet: the stages of a .* give no maps that labels could be injected into"):
        MultiLabelClassifier(Architecture(backbone, "kssnet"), LABELS)
