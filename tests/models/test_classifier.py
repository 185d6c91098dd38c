import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pivotpatch import MultiLabelClassifier, PatchClassifier, PatchInference, load_checkpoint, save_checkpoint
from pivotpatch.core.errors import InputError
from pivotpatch.models.classifier import Architecture
from pivotpatch.models.heads import HeadOption

LABELS = ["cat", "dog", "straße", "日本"]
SMALL: dict[str, dict[str, HeadOption]] = {
    "linear": {},
    "query2label": {"width": 32, "feedforward": 64},
    "ml_decoder": {"width": 32, "groups": 3},
}
BACKBONES = {
    "resnet101": None,
    "tresnet_l": None,
    "tresnet_v2_l": None,
    "swin_large_patch4_window12_384": 96,
    "vit_tiny_patch16_224": 64,
    "test_resnet": None,
}
SHARED_WEIGHTS = Path(__file__).parents[2].parent / "shared" / "weights"


def small(backbone: str = "test_resnet", head: str = "linear") -> Architecture:
    return Architecture(backbone, head, BACKBONES.get(backbone), head_options=SMALL[head])


@pytest.mark.parametrize("head", SMALL)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_backbone_with_every_head(backbone: str, head: str, tmp_path: Path) -> None:
    """Builds, runs forward and backward in one pass over all views, and survives a round trip."""
    torch.manual_seed(0)
    model = PatchClassifier(small(backbone, head), LABELS)
    size = BACKBONES[backbone] or 64
    images = torch.rand(1, 3, size, size)
    out = model.eval()(images)
    assert out.patch_logits.shape == (1, 4, 4)
    (out.image_logits.sum() + out.pooled_logits.sum()).backward()
    lazy = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert lazy == []
    save_checkpoint(model, tmp_path / "model")
    loaded = load_checkpoint(tmp_path / "model")
    with torch.inference_mode():
        assert torch.equal(loaded(images).tde_logits, model(images).tde_logits)
    assert (loaded.labels, loaded.preprocessing) == (model.labels, model.preprocessing)
    assert isinstance(loaded, PatchClassifier)


@pytest.mark.parametrize("head", SMALL)
def test_one_pass_over_all_views_equals_a_pass_for_each(head: str) -> None:
    torch.manual_seed(0)
    model = PatchClassifier(small(head=head), LABELS, lam=0.5, temperature=2.0).eval()
    images, patches = torch.rand(2, 3, 64, 64), torch.rand(2, 4, 3, 64, 64)
    with torch.inference_mode():
        out = model.forward_views(images, patches)
        whole = model.head.embed(model.backbone(images))
        parts = [model.head.embed(model.backbone(patches[:, j])) for j in range(4)]
        q = torch.stack([model.patch_projection(part) for part in parts], dim=1)
        w = torch.stack([model.weight_projection(part) for part in parts], dim=1)
        expected = model.head.project(whole) + 0.5 * (torch.softmax(w / 2, dim=1) * q).sum(1)
    torch.testing.assert_close(out.tde_logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.patch_logits, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", SMALL)
def test_from_classifier_starts_as_pat_i(head: str) -> None:
    torch.manual_seed(0)
    trained = MultiLabelClassifier(small(head=head), LABELS).eval()
    trained.preprocessing = replace(trained.preprocessing, mean=(0.1, 0.2, 0.3))
    before = {key: value.clone() for key, value in trained.state_dict().items()}
    state = torch.random.get_rng_state()
    model = PatchClassifier.from_classifier(trained, lam=0.5, temperature=0.7)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.preprocessing == trained.preprocessing
    images = torch.rand(2, 3, 64, 64)
    expected = PatchInference(trained, lam=0.5, temperature=0.7)(images)
    for ours, theirs in zip(model(images), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not model.training
    heads = [model.head.project, model.patch_projection, model.weight_projection, trained.head.project]
    assert len({id(parameter) for head in heads for parameter in head.parameters()}) == 8
    model(images).tde_logits.sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(value, before[key]) for key, value in trained.state_dict().items())


def test_the_three_projections_are_independent() -> None:
    model = PatchClassifier(small(), LABELS)
    heads = [model.head.project, model.patch_projection, model.weight_projection]
    assert len({id(p) for head in heads for p in head.parameters()}) == 6
    out = model(torch.rand(1, 3, 64, 64))
    (gradient,) = torch.autograd.grad(out.pooled_logits.sum(), model.weight_projection.get_parameter("weight"))
    assert gradient.abs().sum() > 0  # the weight head is not detached


def test_native_patches_reach_the_network() -> None:
    model = PatchClassifier(small(), LABELS).eval()
    source = torch.rand(1, 3, 128, 128)
    images = torch.nn.functional.interpolate(source, size=(64, 64), mode="bilinear", antialias=True)
    with torch.inference_mode():
        native, paper = model(images, source=source), model(images)
    assert torch.equal(native.image_logits, paper.image_logits)
    assert not torch.allclose(native.patch_logits, paper.patch_logits)


def test_preprocessing_is_timms() -> None:
    assert MultiLabelClassifier("tresnet_l", LABELS).preprocessing.mean == (0.0, 0.0, 0.0)
    lite = MultiLabelClassifier("tf_efficientnet_lite0", LABELS).preprocessing
    assert (lite.image_size, lite.mean, lite.interpolation) == (224, (0.5, 0.5, 0.5), "bicubic")
    assert MultiLabelClassifier("test_vit3", LABELS, image_size=64).preprocessing.image_size == 64
    tagged = MultiLabelClassifier("tresnet_l.miil_in1k_448", LABELS).preprocessing
    assert tagged.image_size == 448


@pytest.mark.parametrize(
    "backbone", ["convnext_atto", "test_vit3", "levit_128s", "mobilenetv3_small_050", "cait_xxs24_224"]
)
def test_other_kinds_of_backbone_give_a_map(backbone: str) -> None:
    model = MultiLabelClassifier(backbone, LABELS).eval()
    size = model.preprocessing.image_size
    with torch.inference_mode():
        features = model.backbone(torch.rand(1, 3, size, size))
    assert features.shape[:2] == (1, model.backbone.features)
    assert features.ndim == 4


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


@pytest.mark.skipif(not SHARED_WEIGHTS.is_dir(), reason="the weights are not part of the project")
@pytest.mark.parametrize(
    ("backbone", "name"),
    [("resnet50", "resnet50_v1_in1k.fp16"), ("tf_efficientnet_lite0", "tf_efficientnet_lite0_in1k.fp16")],
)
def test_published_weights_match_key_by_key(backbone: str, name: str) -> None:
    model = MultiLabelClassifier(backbone, LABELS, weights=SHARED_WEIGHTS / f"{name}.safetensors").eval()
    with torch.inference_mode():
        assert torch.isfinite(model(torch.rand(1, 3, 64, 64))).all()


@pytest.mark.parametrize("form", ["safetensors", "state_dict", "model", "module.", "bare"])
@pytest.mark.parametrize(("name", "size"), [("test_resnet", 64), ("levit_128s", 224), ("convnext_atto", 64)])
def test_local_weights_are_loaded_and_the_classifier_left_out(name: str, size: int, form: str, tmp_path: Path) -> None:
    import timm
    from safetensors.torch import save_file

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


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    import timm
    from safetensors.torch import save_file

    state = timm.create_model("test_resnet", pretrained=False, num_classes=0).state_dict()
    state["extra.weight"] = torch.zeros(1)
    state["conv1.0.weight"] = torch.zeros(1, 2)
    removed = next(key for key in state if key.startswith("layer1"))
    del state[removed]
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=rf"1 missing \({removed}\), 1 extra \(extra.weight\), 1 misshapen \(conv1.0"):
        MultiLabelClassifier("test_resnet", LABELS, weights=tmp_path / "w.safetensors")


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


def test_images_that_do_not_suit_the_network_are_named() -> None:
    vit = MultiLabelClassifier("test_vit3", LABELS, image_size=64)
    with pytest.raises(InputError, match="images are 32 x 32 pixels; resize them to 64, or build the network with"):
        vit(torch.rand(1, 3, 32, 32))
    with pytest.raises(InputError, match="backbone: images are torch.uint8; preprocess them first"):
        vit(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    flexible = Architecture("test_vit3", image_size=64, backbone_options={"dynamic_img_size": True})
    assert MultiLabelClassifier(flexible, LABELS)(torch.rand(1, 3, 32, 96)).shape == (1, 4)
    with pytest.raises(InputError, match="it gives a (list|tuple), no map; choose another backbone"):
        MultiLabelClassifier("crossvit_9_240", LABELS)(torch.rand(1, 3, 240, 240))
    with pytest.raises(InputError, match="source is 32 x 64 pixels, smaller than the images' 64 x 64"):
        PatchClassifier(small(), LABELS)(torch.rand(1, 3, 64, 64), source=torch.rand(1, 3, 32, 64))


@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained_cfg", "in_chans", "num_classes"])
def test_options_that_are_not_the_callers_are_refused(option: str) -> None:
    with pytest.raises(InputError, match=f"option '{option}' is not yours to set; leave it out"):
        MultiLabelClassifier(Architecture("test_resnet", backbone_options={option: "x"}), LABELS)


def test_what_an_architecture_says_is_not_said_again() -> None:
    with pytest.raises(
        InputError, match="PatchClassifier: an Architecture is given, and head 'ml_decoder' .* besides; say"
    ):
        PatchClassifier(small(), LABELS, head="ml_decoder")
    with pytest.raises(
        InputError, match="MultiLabelClassifier: an Architecture is given, .* image_size 64 besides; say"
    ):
        MultiLabelClassifier(small(), LABELS, image_size=64)


def test_bad_patching_is_named() -> None:
    for options, message in [
        ({"grid": 0}, "grid is 0"),
        ({"lam": -1.0}, "lam is -1.0"),
        ({"temperature": 0}, "temperature"),
    ]:
        with pytest.raises(InputError, match=f"PatchClassifier: {message}"):
            PatchClassifier(small(), LABELS, **options)  # type: ignore[arg-type]


def test_pickled_code_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": Path("x")}, tmp_path / "evil.pth")
    with pytest.raises(InputError, match="evil.pth: cannot be read as plain tensors .*; save its state_dict"):
        MultiLabelClassifier("test_resnet", LABELS, weights=tmp_path / "evil.pth")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: MultiLabelClassifier("resnet_101", LABELS),
            r"timm has no model 'resnet_101'; did you mean 'resnet101'\?",
        ),
        (
            lambda: MultiLabelClassifier("test_resnet", LABELS, head="lineal"),
            "unknown head 'lineal'; did you mean 'linear'",
        ),
        (lambda: MultiLabelClassifier("test_resnet", ["a", "a"]), "are not different names; give a list"),
        (lambda: MultiLabelClassifier("test_resnet", "cat"), "'cat' are not different names; give a list"),
        (
            lambda: MultiLabelClassifier("tresnet_l.miil_in1k_488", LABELS),
            r"timm has no weights 'tresnet_l.miil_in1k_488'; did you mean 'tresnet_l.miil_in1k_448'\?",
        ),
        (lambda: MultiLabelClassifier("test_resnet", LABELS, weights="no.safetensors"), "there is no such file; check"),
        (
            lambda: MultiLabelClassifier("test_resnet", LABELS, pretrained=True, weights="w"),
            "both pretrained and weights are given; give one of them",
        ),
        (
            lambda: MultiLabelClassifier(Architecture("test_resnet", backbone_options={"colour": 1}), LABELS),
            "backbone 'test_resnet': cannot be built with {'colour': 1}: .*; change what it does not take",
        ),
    ],
)
def test_bad_choices_are_named(build, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=message):
        build()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 4, 64, 64), r"backbone: images have 4 channels; give RGB, \(B, 3, H, W\)"),
        ((3, 64, 64), r"images have shape \(3, 64, 64\); add the batch dimension"),
        ((0, 3, 64, 64), "the batch is empty"),
    ],
)
def test_bad_images_are_named(shape: tuple[int, ...], message: str) -> None:
    for kind in (MultiLabelClassifier, PatchClassifier):
        with pytest.raises(InputError, match=message):
            kind(small(), LABELS)(torch.rand(shape))
