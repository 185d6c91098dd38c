import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from timm.layers import DropPath
from torch import Tensor

from pivotpatch import MultiLabelClassifier
from pivotpatch.data.loading import resize_quickly
from pivotpatch.errors import InputError
from pivotpatch.models.backbone import Backbone, Cvt, Preprocessing
from pivotpatch.models.classifier import Architecture

LABELS = ["cat", "dog"]


@pytest.mark.parametrize(("name", "size"), [("test_vit3", 64), ("swin_tiny_patch4_window7_224", 128)])
def test_a_transformers_map_keeps_its_rows_and_columns(name: str, size: int) -> None:
    """Changing the right half of an image changes the right half of the map most."""
    torch.manual_seed(0)
    backbone = MultiLabelClassifier(name, LABELS, image_size=size).backbone.eval()
    images = torch.rand(1, 3, size, size)
    other = images.clone()
    other[..., size // 2 :] = torch.rand(1, 3, size, size // 2)
    with torch.inference_mode():
        change = (backbone(images) - backbone(other)).abs().sum((0, 1, 2))
    assert change[2:].sum() > 1.5 * change[:2].sum()


def test_cvt_is_transformers_but_for_what_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another activation its map is that of transformers; its paths are dropped in training, and it learns."""
    torch.manual_seed(0)
    model = MultiLabelClassifier("test_cvt", LABELS).eval()
    network, images = model.backbone.network, torch.rand(2, 3, 64, 64)
    with torch.inference_mode():
        faster = model.backbone(images)
        theirs = transformers.CvtModel(network.body.config).eval()
        theirs.load_state_dict(network.body.state_dict())
        for layer in network.modules():
            if type(layer).__name__ == "QuickGELUActivation":
                monkeypatch.setattr(layer, "forward", torch.nn.functional.gelu)
        expected = network.norm(theirs(images).last_hidden_state.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        torch.testing.assert_close(model.backbone(images), expected)
    assert 1e-6 < (faster - expected).abs().max() < 0.1
    assert [drop.drop_prob for drop in network.modules() if isinstance(drop, DropPath)] == [0.0] * 8 + [0.05] * 2 + [
        0.1
    ] * 2
    model.train()(images).sum().backward()
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "cls_token" not in name)


def test_cvt_w24_has_the_published_size_and_needs_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        network = Cvt("cvt_w24")
    assert sum(weight.numel() for weight in network.parameters()) / 1e6 == pytest.approx(277, abs=1.5)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"^transformers: is not installed; pip install .*\[transformers\]"):
        MultiLabelClassifier("cvt_w24", LABELS)


@pytest.mark.parametrize("first", [True, False])
def test_stride_in_the_first_convolution_sees_every_second_pixel(first: bool) -> None:
    """A 1 x 1 convolution with stride 2 skips pixels; a 3 x 3 one sees them all."""
    torch.manual_seed(0)
    chosen = Architecture("resnet26", backbone_options={"stride_in_conv1": first, "zero_init_last": False})
    network = MultiLabelClassifier(chosen, LABELS).eval().backbone.network
    assert network.state_dict().keys() == timm.create_model("resnet26", num_classes=0).state_dict().keys()
    for stage in (network.layer2, network.layer3, network.layer4):
        features = torch.rand(1, stage[0].conv1.in_channels, 8, 8)
        other = torch.rand_like(features)
        other[..., ::2, ::2] = features[..., ::2, ::2]
        with torch.inference_mode():
            assert torch.equal(stage(features), stage(other)) is first
            assert stage(features).shape[2:] == (4, 4)


@pytest.mark.parametrize(
    ("name", "size", "form"),
    [
        *(("test_resnet", 64, form) for form in ("safetensors", "model", "module.")),
        ("levit_128s", 224, "bare"),
        ("convnext_atto", 64, "bare"),
    ],
)
def test_local_weights_are_loaded_and_the_classifier_left_out(name: str, size: int, form: str, tmp_path: Path) -> None:
    full = timm.create_model(name, pretrained=False, num_classes=10)
    path, state = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth"), full.state_dict()
    if form == "safetensors":
        save_file(state, path)
    elif form == "module.":
        torch.save({f"module.{key}": value for key, value in state.items()}, path)
    else:
        torch.save(state if form == "bare" else {form: state}, path)
    model = MultiLabelClassifier(name, LABELS, weights=path)
    images = torch.rand(1, 3, size, size)
    expected = full.eval().forward_features(images)
    if name == "levit_128s":
        expected = expected.transpose(1, 2).unflatten(2, (4, 4))
    torch.testing.assert_close(model.eval().backbone(images), expected)


@pytest.mark.parametrize(
    ("backbone", "option", "value", "message"),
    [
        ("test_resnet", "checkpoint_path", "x.pth", "option 'checkpoint_path' is not yours to set"),
        ("test_vit", "num_heads", -1, "option 'num_heads' is -1; give a number from 0 on"),  # timm would build it
        ("resnet18", "stride_in_conv1", True, "stride_in_conv1 is set, and it has no bottleneck block"),
        ("resnetaa50", "stride_in_conv1", True, "that strides in its second convolution"),
    ],
)
def test_options_that_cannot_be_set_are_refused(backbone: str, option: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        MultiLabelClassifier(Architecture(backbone, backbone_options={option: value}), LABELS)


PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8))


def test_a_picture_is_squashed_scaled_and_normalised() -> None:
    ready = Preprocessing(16, mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3))(PICTURE)
    resized = np.asarray(PICTURE.resize((16, 16), Image.Resampling.BILINEAR), dtype=np.float32) / 255
    expected = torch.from_numpy((resized - [0.5, 0.4, 0.3]) / [0.1, 0.2, 0.3]).permute(2, 0, 1).float()
    assert (ready - expected).abs().max() <= 1 / 255 / 0.1 + 1e-5
    pixels = torch.from_numpy(np.asarray(PICTURE).copy()).permute(2, 0, 1)
    for given in (pixels, torch.stack([pixels, pixels])):
        bicubic = Preprocessing(16, interpolation="bicubic")
        torch.testing.assert_close(bicubic(given).reshape(-1, 3, 16, 16)[-1], bicubic(PICTURE))


def test_bytes_are_rounded_as_by_the_loader_on_every_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's resize does not, without AVX2 and, before 0.24, with AVX512."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    pixels = np.asarray(PICTURE)
    ready = Preprocessing(16, mean=(0.0,) * 3, std=(1.0,) * 3)(torch.from_numpy(pixels.copy()).permute(2, 0, 1))
    assert ((ready * 255).round().permute(1, 2, 0).numpy() == resize_quickly(pixels, (16, 16))).all()


def test_wrong_channels_are_named() -> None:
    for pixels in (torch.zeros(30, 50, 3), torch.zeros(3, 30, 50, dtype=torch.int64)):
        with pytest.raises(InputError, match=r"Preprocessing: pixels are torch.\w+ of shape .*; give \(3, H, W\)"):
            Preprocessing(8)(pixels)


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
def test_two_stages_are_the_maps_that_both_have_alone(name: str) -> None:
    torch.manual_seed(0)
    backbone = Backbone(name, image_size=64, options={"two_stages": True}).eval()
    last, images = Backbone(name, image_size=64).eval(), torch.rand(2, 3, 64, 64)
    last.load_state_dict(backbone.state_dict())  # it has no weights of its own
    both = backbone(images)
    before = backbone.network.feature_info[-2]["num_chs"]
    found: list[Tensor] = []
    stage = last.network.get_submodule(backbone.network.feature_info[-2]["module"])
    stage.register_forward_hook(lambda _module, _given, made: found.append(made))
    expected = last(images)
    assert both.shape == (2, backbone.features, 4, 4)
    torch.testing.assert_close(both[:, :before], found[0])
    torch.testing.assert_close(both[:, before:], expected.repeat_interleave(2, 2).repeat_interleave(2, 3))
