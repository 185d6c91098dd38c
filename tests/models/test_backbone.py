import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from pivotpatch import MultiLabelClassifier
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import Architecture

LABELS = ["cat", "dog"]
SHARED_WEIGHTS = Path(__file__).parents[2].parent / "shared" / "weights"


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


@pytest.mark.skipif(not SHARED_WEIGHTS.is_dir(), reason="the weights are not part of the project")
@pytest.mark.parametrize(
    ("backbone", "name"),
    [("resnet50", "resnet50_v1_in1k.fp16"), ("tf_efficientnet_lite0", "tf_efficientnet_lite0_in1k.fp16")],
)
def test_published_weights_match_key_by_key(backbone: str, name: str) -> None:
    model = MultiLabelClassifier(backbone, LABELS, weights=SHARED_WEIGHTS / f"{name}.safetensors").eval()
    with torch.inference_mode():
        assert torch.isfinite(model(torch.rand(1, 3, 64, 64))).all()


@pytest.mark.parametrize(
    ("name", "size", "form"),
    [("test_resnet", 64, form) for form in ("safetensors", "state_dict", "model", "module.", "bare")]
    + [("levit_128s", 224, "bare"), ("convnext_atto", 64, "bare")],
)
def test_local_weights_are_loaded_and_the_classifier_left_out(name: str, size: int, form: str, tmp_path: Path) -> None:
    full = timm.create_model(name, pretrained=False, num_classes=10)
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    state = full.state_dict()
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


def authors_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A TResNet's weights as its authors wrote them: layers by number, and InPlaceABN, which counts no batches.

    Convolutions followed by a blur lie one level deeper; its norm takes a weight's absolute value.
    """
    renamed = {}
    for key, value in state.items():
        deep = re.search(r"layer2\.0\.conv1|layer[34]\.0\.conv2", key) is not None
        key = re.sub(r"(conv\d|downsample\.\d)\.conv", r"\1.0.0" if deep else r"\1.0", key)
        name = re.sub(r"(conv\d|downsample\.\d)\.bn", r"\1.0.1" if deep else r"\1.1", key)
        if not name.endswith("num_batches_tracked"):
            renamed[name] = -value if re.search(r"(conv\d(\.0)?|downsample\.\d)\.1\.weight", name) else value
    return renamed


@pytest.mark.parametrize("wrapper", [None, "model"])
def test_weights_in_their_authors_names_are_converted(wrapper: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    full = timm.create_model("tresnet_m", pretrained=False, num_classes=10).eval()
    old = authors_names(full.state_dict())
    assert {"body.conv1.0.weight", "body.layer2.0.conv1.0.0.weight", "body.layer2.0.downsample.1.1.bias"} <= old.keys()
    torch.save(old if wrapper is None else {wrapper: old}, tmp_path / "w.pth")
    model = MultiLabelClassifier("tresnet_m", LABELS, weights=tmp_path / "w.pth").eval()
    images = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        expected = full.forward_features(images)
        torch.testing.assert_close(model.backbone(images), expected, rtol=1e-2, atol=1e-3)  # weights gain 1e-5
    del old["body.layer4.1.conv1.0.weight"]
    torch.save(old, tmp_path / "less.pth")
    with pytest.raises(InputError, match=r"do not fit the model: 1 missing \(body.layer4.1.conv1.conv.weight\); give"):
        MultiLabelClassifier("tresnet_m", LABELS, weights=tmp_path / "less.pth")


def test_weights_that_fit_are_never_converted(tmp_path: Path) -> None:
    network = timm.create_model("tresnet_m", pretrained=False, num_classes=10)
    state = {key: torch.randn_like(value) if value.ndim == 1 else value for key, value in network.state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    loaded = MultiLabelClassifier("tresnet_m", LABELS, weights=tmp_path / "w.pth").backbone.network.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in loaded.items())


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    state = timm.create_model("test_resnet", pretrained=False, num_classes=0).state_dict()
    state["extra.weight"] = torch.zeros(1)
    state["conv1.0.weight"] = torch.zeros(1, 2)
    removed = next(key for key in state if key.startswith("layer1"))
    del state[removed]
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=rf"1 missing \({removed}\), 1 extra \(extra.weight\), 1 misshapen \(conv1.0"):
        MultiLabelClassifier("test_resnet", LABELS, weights=tmp_path / "w.safetensors")


@pytest.mark.slow
def test_weights_that_cannot_be_fetched_are_explained(tmp_path: Path) -> None:
    code = (
        "from pivotpatch import InputError, MultiLabelClassifier\n"
        "try: MultiLabelClassifier('test_resnet', ['a'], pretrained=True)\n"
        "except InputError as error: print(error)"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=offline)
    assert "backbone 'test_resnet': its weights cannot be fetched" in done.stdout
    assert "check the connection or give a local file with weights=" in done.stdout


@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained_cfg", "in_chans", "num_classes"])
def test_options_that_are_not_the_callers_are_refused(option: str) -> None:
    with pytest.raises(InputError, match=f"option '{option}' is not yours to set; leave it out"):
        MultiLabelClassifier(Architecture("test_resnet", backbone_options={option: "x"}), LABELS)


def test_pickled_code_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": Path("x")}, tmp_path / "evil.pth")
    with pytest.raises(InputError, match="evil.pth: cannot be read as plain tensors .*; save its state_dict"):
        MultiLabelClassifier("test_resnet", LABELS, weights=tmp_path / "evil.pth")


@pytest.mark.parametrize(
    ("backbone", "value", "message"),
    [
        ("resnet18", True, "stride_in_conv1 is set, and it has no bottleneck block .*; leave the option out"),
        ("test_vit3", True, "backbone 'test_vit3': stride_in_conv1 is set, and it has no bottleneck block"),
        ("resnetaa50", True, "that strides in its second convolution; leave the option out or choose a ResNet"),
    ],
)
def test_strides_that_cannot_be_moved_are_named(backbone: str, value: bool, message: str) -> None:
    with pytest.raises(InputError, match=message):
        MultiLabelClassifier(Architecture(backbone, backbone_options={"stride_in_conv1": value}), LABELS)


@pytest.mark.parametrize("backbone", ["levit_128s", "mobilenetv3_small_050", "cait_xxs24_224"])
def test_other_kinds_of_backbone_give_a_map(backbone: str) -> None:
    model = MultiLabelClassifier(backbone, LABELS).eval()
    size = model.preprocessing.image_size
    with torch.inference_mode():
        features = model.backbone(torch.rand(1, 3, size, size))
    assert features.shape[:2] == (1, model.backbone.features)
    assert features.ndim == 4
