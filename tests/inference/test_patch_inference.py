from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from pivotpatch import CounterfactualLogits, MultiLabelClassifier, PatchInference
from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.core.patches import cut_patches
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import Architecture
from pivotpatch.models.heads import HeadOption


class Small(nn.Module):
    """A network with batch norm and dropout, so that mode and random state matter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
        self.last = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.last(self.body(images).mean((2, 3)))
        return logits


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture
def images() -> Tensor:
    return torch.rand(2, 3, 24, 32, generator=torch.Generator().manual_seed(1))


def by_hand(
    model: Callable[[Tensor], Tensor], images: Tensor, source: Tensor | None = None, overlap: float = 0.0
) -> CounterfactualLogits:
    """One call for the images and one for each patch, as in the paper's pseudocode."""
    size = (images.shape[2], images.shape[3])
    patches = cut_patches(images if source is None else source, grid=2, overlap=overlap, size=size)
    return combine_logits(model(images), torch.stack([model(patches[:, j]) for j in range(4)], dim=1))


def test_equals_the_papers_pseudocode(model: nn.Module, images: Tensor) -> None:
    for ours, expected in zip(PatchInference(model)(images), by_hand(model, images), strict=True):
        torch.testing.assert_close(ours, expected)


def test_options_reach_the_equations(model: nn.Module, images: Tensor) -> None:
    out = PatchInference(model, lam=0.3, temperature=0.2, normalised=False)(images)
    expected = combine_logits(out.image_logits, out.patch_logits, lam=0.3, temperature=0.2, normalised=False)
    torch.testing.assert_close(out.probs, expected.probs)
    torch.testing.assert_close(out.weights, expected.weights)
    assert not torch.allclose(out.probs, PatchInference(model)(images).probs)


def test_native_source(model: nn.Module, images: Tensor) -> None:
    source = torch.rand(2, 3, 60, 70, generator=torch.Generator().manual_seed(2))
    out = PatchInference(model)(images, source=source)
    torch.testing.assert_close(out.tde_logits, by_hand(model, images, source).tde_logits)


def test_overlapping_patches(model: nn.Module, images: Tensor) -> None:
    pat = PatchInference(model, overlap=0.5)
    torch.testing.assert_close(pat(images).tde_logits, by_hand(model, images, overlap=0.5).tde_logits)
    assert not torch.allclose(pat(images).tde_logits, by_hand(model, images).tde_logits)
    assert "overlap=0.5" in repr(pat)
    with pytest.raises(InputError, match="patches: overlap is 1.0; give a share"):
        PatchInference(model, overlap=1.0)


@pytest.mark.parametrize("chunk_size", [1, 3, 99])
def test_chunks_change_nothing_but_the_batch(model: nn.Module, images: Tensor, chunk_size: int) -> None:
    sizes: list[int] = []

    def watched(views: Tensor) -> Tensor:
        sizes.append(len(views))
        logits: Tensor = model(views)
        return logits

    out = PatchInference(watched, chunk_size=chunk_size)(images)
    torch.testing.assert_close(out.tde_logits, PatchInference(model)(images).tde_logits)
    assert max(sizes) <= chunk_size
    assert sum(sizes) == 10


@pytest.mark.parametrize(("training", "recording"), [(False, False), (True, True), (False, True)])
def test_the_model_and_the_caller_are_left_alone(
    model: nn.Module, images: Tensor, training: bool, recording: bool
) -> None:
    model.train(training)
    state = torch.random.get_rng_state()
    parameters = {key: value.clone() for key, value in model.named_parameters()}
    with torch.set_grad_enabled(recording):
        out = PatchInference(model)(images)
        assert torch.is_grad_enabled() is recording
    assert all(module.training is training for module in model.modules())
    assert out.tde_logits.requires_grad is recording
    assert all(torch.equal(value, parameters[key]) for key, value in model.named_parameters())
    if not training:
        assert torch.equal(torch.random.get_rng_state(), state)


def test_gradients_reach_model_and_images(model: nn.Module, images: Tensor) -> None:
    images.requires_grad_()
    PatchInference(model)(images).tde_logits.sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0
    assert all(p.grad is not None for p in model.parameters())


def test_autocast_runs_the_model_in_the_dtype_and_the_equations_in_float32(model: nn.Module, images: Tensor) -> None:
    seen: list[torch.dtype] = []

    def watched(views: Tensor) -> Tensor:
        logits: Tensor = model(views)
        seen.append(logits.dtype)
        return logits

    out = PatchInference(watched, autocast=torch.bfloat16)(images)
    assert seen == [torch.bfloat16]
    assert out.tde_logits.dtype == torch.float32
    torch.testing.assert_close(out.tde_logits, PatchInference(model)(images).tde_logits, atol=0.05, rtol=0.05)
    assert not torch.is_autocast_enabled("cpu")


def test_uint8_images_for_models_that_normalise_themselves(images: Tensor) -> None:
    pixels = (images * 255).to(torch.uint8)
    out = PatchInference(lambda views: views.float().mean((2, 3)) / 255)(pixels)
    exact = PatchInference(lambda views: views.mean((2, 3)))(pixels / 255)
    torch.testing.assert_close(out.tde_logits, exact.tde_logits, atol=2 / 255, rtol=0)


def test_a_timm_model(images: Tensor) -> None:
    network = timm.create_model("test_resnet", pretrained=False, num_classes=7).eval()
    torch.testing.assert_close(PatchInference(network)(images).tde_logits, by_hand(network, images).tde_logits)


def test_a_transformers_model() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=32,
        patch_size=8,
        problem_type="multi_label_classification",
        id2label=dict(enumerate("abcde")),
    )
    network = ViTForImageClassification(config).eval()
    images = torch.rand(2, 3, 32, 32)
    out = PatchInference(network)(images)
    torch.testing.assert_close(out.tde_logits, by_hand(lambda x: network(x).logits, images).tde_logits)


@pytest.fixture(params=["dynamic", "one", "four"])
def session(request: pytest.FixtureRequest, model: nn.Module, tmp_path: Path) -> Any:
    """The same network in ONNX Runtime, exported for any batch or for a fixed one."""
    import onnxruntime

    batch = {"dynamic": 2, "one": 1, "four": 4}[request.param]
    dynamic = {"images": {0: torch.export.Dim("batch")}} if request.param == "dynamic" else None
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        model,
        (torch.rand(batch, 3, 24, 32),),
        path,
        input_names=["images"],
        output_names=["logits"],
        dynamo=True,
        dynamic_shapes=dynamic,
        verbose=False,
    )
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.mark.filterwarnings("ignore")
def test_an_onnx_session(session: Any, model: nn.Module, images: Tensor) -> None:
    out = PatchInference(session)(images)
    expected = PatchInference(model)(images)
    torch.testing.assert_close(out.tde_logits, expected.tde_logits.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out.weights, expected.weights.detach(), atol=1e-5, rtol=1e-4)


def fake_session(inputs: list[tuple[str, str]], outputs: list[str]) -> Any:
    """The part of a session that is looked at before it runs."""
    return SimpleNamespace(
        run=print,
        get_inputs=lambda: [SimpleNamespace(name=n, type=t, shape=["b", 3, 8, 8]) for n, t in inputs],
        get_outputs=lambda: [SimpleNamespace(name=n) for n in outputs],
    )


def test_an_unsuitable_session_is_named() -> None:
    with pytest.raises(InputError, match="ONNX session: its inputs are a tensor.float., b tensor.float.; give a model"):
        PatchInference(fake_session([("a", "tensor(float)"), ("b", "tensor(float)")], ["logits"]))
    with pytest.raises(InputError, match="its inputs are a tensor.int64."):
        PatchInference(fake_session([("a", "tensor(int64)")], ["logits"]))
    with pytest.raises(InputError, match="it takes uint8 and images are torch.float32; give uint8 pixels"):
        PatchInference(fake_session([("a", "tensor(uint8)")], ["logits"]))(torch.rand(1, 3, 8, 8))
    with pytest.raises(InputError, match="its outputs are x, y; name the one to use 'logits'"):
        PatchInference(fake_session([("a", "tensor(float)")], ["x", "y"]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_works_under_compile_without_a_graph_break(model: nn.Module, images: Tensor) -> None:
    pat = PatchInference(model, overlap=0.3)
    compiled = torch.compile(pat, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for ours, expected in zip(compiled(images), pat(images), strict=True):
            torch.testing.assert_close(ours, expected)
        source = torch.nn.functional.interpolate(images, size=(48, 64))
        torch.testing.assert_close(compiled(images, source=source).probs, pat(images, source=source).probs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("backbone", "head"), [("test_resnet", "linear"), ("test_vit3", "query2label"), ("test_resnet", "ml_decoder")]
)
@pytest.mark.slow
def test_works_under_export_for_any_batch(backbone: str, head: str) -> None:
    options: dict[str, HeadOption] = {} if head == "linear" else {"width": 16}
    model = MultiLabelClassifier(Architecture(backbone, head, 64, head_options=options), list("abc")).eval()
    pat = PatchInference(model)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(pat, (torch.rand(3, 3, 64, 64),), dynamic_shapes={"images": {0: batch}})
    for size in (2, 5):
        other = torch.rand(size, 3, 64, 64)
        for ours, expected in zip(program.module()(other), pat(other), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda x: x, r"returned shape \(10, 3, 24, 32\) for 10 views; wrap it in a function that returns logits"),
        (lambda x: x.mean((2, 3))[:4], r"returned shape \(4, 3\) for 10 views"),
        (lambda x: (x, x), "the model returned a tuple for 10 views; wrap it in a function that returns logits"),
    ],
)
def test_a_model_that_gives_no_logits_is_named(bad: Callable[[Tensor], Any], message: str, images: Tensor) -> None:
    with pytest.raises(InputError, match="PatchInference: .*" + message):
        PatchInference(bad)(images)


def test_bad_input_is_named(model: nn.Module, images: Tensor) -> None:
    pat = PatchInference(model)
    for bad, message in [
        (images[0], r"PatchInference: images have shape \(3, 24, 32\); add the batch dimension with images\[None\]"),
        (images[:0], r"PatchInference: the batch is empty, shape \(0, 3, 24, 32\); give at least one image"),
        (images.permute(0, 2, 3, 1), r"have 24 channels and look channels-last; permute them to \(B, C, H, W\)"),
    ]:
        with pytest.raises(InputError, match=message):
            pat(bad)
    with pytest.raises(InputError, match="grid 25 is larger than the image, 24 x 32 pixels"):
        PatchInference(model, grid=25)(images)
    with pytest.raises(InputError, match="the model is 'resnet18', which cannot be called; give a module"):
        PatchInference("resnet18")  # type: ignore[arg-type]
    for options, message in [
        ({"chunk_size": 0}, "PatchInference: chunk_size is 0; give 1 or more"),
        ({"grid": 0}, "patches: grid is 0; give a whole number"),
        ({"lam": torch.ones(5)}, "patches: lam is tensor.*; give a finite number"),
        ({"temperature": 0.0}, "patches: temperature is 0.0; give a number above 0"),
    ]:
        with pytest.raises(InputError, match=message):
            PatchInference(model, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"images have 1 channels; give \(B, 3, H, W\), or set channels="):
        pat(images[:, :1])
    with pytest.raises(InputError, match="images are a ndarray; give a tensor"):
        pat(images.numpy())


def test_a_source_that_does_not_belong_is_named(model: nn.Module, images: Tensor) -> None:
    pat = PatchInference(model)
    for source, message in [
        (
            torch.rand(1, 3, 48, 64),
            r"source has shape \(1, 3, 48, 64\) and images \(2, 3, 24, 32\); give the same images",
        ),
        (torch.rand(2, 1, 48, 64), "with the same channels"),
        (torch.rand(2, 3, 12, 64), "source is 12 x 64 pixels, smaller than the images' 24 x 32; leave it out"),
        (torch.rand(2, 3, 48, 16), "source is 48 x 16 pixels, smaller"),
        (torch.rand(3, 48, 64), "images: source: images have shape"),
        (
            torch.rand(2, 3, 48, 64).double(),
            "source is torch.float64 on cpu and images are torch.float32 on cpu; prepr",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            pat(images, source=source)
