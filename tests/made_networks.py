"""Small networks with answers that depend on the picture, for tests that compare answers."""

from typing import Any, TypeVar

import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from pivotpatch.models.backbone import Backbone
from pivotpatch.models.classifier import Architecture, Classifier, MultiLabelClassifier, SharedClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.engine import Answer, Engine
from pivotpatch.runtime.values import Calibration, Patching

Made = TypeVar("Made", bound=SharedClassifier)
LABELS = ("cat", 'a "quoted", comma', "Köln 猫 \n\\")
HEADS: dict[str, dict[str, int]] = {
    "linear": {},
    "query2label": {"width": 16, "feedforward": 32, "attention_heads": 2, "decoder_layers": 1},
    "ml_decoder": {"width": 16, "groups": 2},
}

PEER_OPTIONS: dict[str, dict[str, int]] = {
    "csra": {},
    "ml_gcn": {"width": 12, "vector_width": 6},
    "add_gcn": {"width": 12},
    "ssgrl": {"width": 10, "attention_width": 9, "vector_width": 6},
    "ms_cma": {"width": 8},
    "ida": {"feedforward": 24},
    "c_tran": {"feedforward": 24},
    "kssnet": {"vector_width": 6},
    "cnn_rnn": {"width": 8, "hidden": 12},
    "rdal": {"hidden": 20},
    "rarl": {"hidden": 20},
    "fev_lv": {"centres": 3, "exemplars": 7},
    "svm": {},
}

TINY = (
    "model.backbone=test_resnet",
    "model.pretrained=false",
    "model.image_size=64",
    "data.workers=0",
    "output.trackers=[]",
)


def make_network(*, head: str = "linear", image_size: int = 32, **cut: Any) -> PatchClassifier:
    """A model for `LABELS` with drawn weights, whose logits vary by about 1 between images."""
    torch.manual_seed(0)
    built = Architecture("test_resnet", head, image_size, head_options=HEADS[head])
    return _spread(PatchClassifier(built, LABELS, patching=Patching(**cut)))


def make_plain(*, head: str = "linear") -> MultiLabelClassifier:
    """The like without patches."""
    torch.manual_seed(0)
    return _spread(MultiLabelClassifier(Architecture("test_resnet", head, 32, head_options=HEADS[head]), LABELS))


def _spread(model: Made) -> Made:
    model.eval()
    with torch.no_grad():
        embedding = model.head.embed(model.backbone(model.preprocessing(make_pictures(16, 32, 32))))
        for name, part in model.named_modules():
            if name.endswith(("project", "projection")):
                spread = part(embedding).std(dim=0).mean()
                for weight in part.parameters():
                    weight.div_(spread)
                part.get_parameter("bias").sub_(part(embedding).mean(dim=0))
    return model


def make_pictures(count: int, height: int, width: int) -> Tensor:
    """Different pictures (B,3,H,W) uint8, each of a few colours and some noise."""
    generator = torch.Generator().manual_seed(count)
    colours = torch.randint(0, 236, (count, 3, 4, 4), generator=generator).float()
    large = nn.functional.interpolate(colours, size=(height, width))
    return (large + torch.randint(0, 20, large.shape, generator=generator)).to(torch.uint8)


def ask(engine: Engine, images: Tensor) -> Answer[Tensor]:
    """What an engine says of images (B,3,H,W) uint8, as tensors."""
    answer = engine.ask(images.permute(0, 2, 3, 1).contiguous().numpy())
    return Answer._make(None if part is None else torch.from_numpy(part) for part in answer)


def fit_made_up(model: Classifier) -> None:
    """Give a model thresholds and, where it has patches, another mixture and a calibration."""
    if isinstance(model, PatchClassifier):
        model.set_mixing(lam=0.5, temperature=0.3)
        model.calibration = Calibration("tde", "platt", (0.5, 1.5, -1.0), (0.3, -0.2, 0.1))
    model.thresholds = (0.1, 0.25, 1 / 3)
    model.preferences = {"precision": (0.2, 0.5, 2 / 3)}


def make_backbone(name: str) -> Backbone:
    """A backbone whose norms have seen something."""
    backbone = Backbone(name, image_size=64)
    generator = torch.Generator().manual_seed(0)
    for norm in backbone.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.copy_(0.1 * torch.randn(norm.num_features, generator=generator))
            norm.running_var.copy_(0.5 + torch.rand(norm.num_features, generator=generator))
    return backbone.eval()


def make_graph(batch: str | int, height: int, width: int, *, sigmoid: bool = False) -> tuple[nn.Module, bytes]:
    """A model of 5 labels without a name, and its ONNX graph for any batch, or for one of a size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    held = [numpy_helper.from_array(value.detach().numpy(), name) for name, value in model[0].named_parameters()]
    steps = {"Conv": "images weight bias", "GlobalAveragePool": "Conv", "Flatten": "GlobalAveragePool"}
    steps |= {"Sigmoid": "Flatten", "Identity": "Sigmoid"} if sigmoid else {}
    nodes = [helper.make_node(name, given.split(), [name]) for name, given in steps.items()]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, height, width])
    said = helper.make_tensor_value_info(list(steps)[-1], TensorProto.FLOAT, [batch, 5])
    graph = helper.make_graph(nodes, "graph", [images], [said], held)
    written = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return model, written.SerializeToString()
