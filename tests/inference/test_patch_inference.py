from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch
from made_networks import make_graph, make_plain
from torch import Tensor, nn

from pivotpatch import CounterfactualLogits, PatchInference
from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.core.patches import cut_patches
from pivotpatch.errors import InputError


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
    model: Callable[[Tensor], Tensor], images: Tensor, source: Tensor | None = None, overlap: float = 0.0, **mixing: Any
) -> CounterfactualLogits:
    """One call for the images and one for each patch, as in the paper's pseudocode."""
    size = (images.shape[2], images.shape[3])
    patches = cut_patches(images if source is None else source, grid=2, overlap=overlap, size=size)
    return combine_logits(model(images), torch.stack([model(patches[:, j]) for j in range(4)], dim=1), **mixing)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"overlap": 0.5}, {"lam": 0.3, "temperature": 0.2, "normalised": False}], ids=str
)
def test_equals_the_papers_pseudocode(options: Any, native: bool, model: nn.Module, images: Tensor) -> None:
    source = torch.rand(2, 3, 60, 70, generator=torch.Generator().manual_seed(2)) if native else None
    images.requires_grad_()
    out = PatchInference(model, **options)(images, source=source)
    torch.testing.assert_close(out, by_hand(model, images, source, **options))
    out.tde_logits.sum().backward()
    assert images.grad is not None
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("chunk_size", [1, 3, 99])
def test_chunks_change_nothing_but_the_batch(model: nn.Module, images: Tensor, chunk_size: int) -> None:
    sizes: list[int] = []
    expected = PatchInference(model)(images)
    model.register_forward_hook(lambda _model, given, _out: sizes.append(len(given[0])))
    torch.testing.assert_close(PatchInference(model, chunk_size=chunk_size)(images).tde_logits, expected.tde_logits)
    assert max(sizes) <= chunk_size
    assert sum(sizes) == 10


@pytest.mark.parametrize("training", [False, True])
def test_the_model_and_the_caller_are_left_alone(model: nn.Module, images: Tensor, training: bool) -> None:
    """Of a model in training mode is warned, once."""
    wrapped = PatchInference(model.train(training))
    state = torch.random.get_rng_state()
    told = "the model is in training mode, .*; call model.eval"
    with torch.set_grad_enabled(training):
        with pytest.warns(UserWarning, match=told) if training else nullcontext() as warned:
            out = wrapped(images)
        out = wrapped(images)  # another warning would be an error
        assert torch.is_grad_enabled() is training
    assert all(module.training is training for module in model.modules())
    assert out.tde_logits.requires_grad is training
    assert training or torch.equal(torch.random.get_rng_state(), state)
    assert [each.filename for each in warned or ()] == [__file__] * training


def test_autocast_runs_the_model_in_the_dtype_and_the_equations_in_float32(model: nn.Module, images: Tensor) -> None:
    seen: list[torch.dtype] = []
    expected = PatchInference(model)(images)
    model.register_forward_hook(lambda _model, _given, logits: seen.append(logits.dtype))
    out = PatchInference(model, autocast=torch.bfloat16)(images)
    assert (seen, out.tde_logits.dtype) == ([torch.bfloat16], torch.float32)
    torch.testing.assert_close(out.tde_logits, expected.tde_logits, atol=0.05, rtol=0.05)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("batch", ["any", 4])
def test_an_onnx_session(batch: str | int, images: Tensor) -> None:
    """For any batch, or for a fixed one."""
    model, graph = make_graph(batch, 24, 32)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = PatchInference(model)(images)
    torch.testing.assert_close(PatchInference(session)(images), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kinds", "outputs", "message"),
    [
        (["float", "float"], ["logits"], "its inputs are 0 tensor.float., 1 tensor.float.; give a model"),
        (["uint8"], ["logits"], "images are torch.float32, which the model does not take; give uint8 pixels"),
        (["float"], ["x", "y"], "its outputs are x, y; name the one to use 'logits'"),
    ],
)
def test_an_unsuitable_session_is_named(kinds: list[str], outputs: list[str], message: str) -> None:
    inputs = [SimpleNamespace(name=str(n), type=f"tensor({kind})", shape=["b"]) for n, kind in enumerate(kinds)]
    named = [SimpleNamespace(name=name) for name in outputs]
    session: Any = SimpleNamespace(run=print, get_inputs=lambda: inputs, get_outputs=lambda: named)
    with pytest.raises(InputError, match=f"ONNX session: {message}"):
        PatchInference(session)(torch.rand(1, 3, 8, 8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_works_under_compile_without_a_graph_break(model: nn.Module, images: Tensor) -> None:
    pat = PatchInference(model, overlap=0.3)
    compiled = torch.compile(pat, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(tuple(compiled(images)), tuple(pat(images)))
        source = torch.nn.functional.interpolate(images, size=(48, 64))
        torch.testing.assert_close(compiled(images, source=source).probs, pat(images, source=source).probs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("head", ["linear", "query2label", "ml_decoder"])
def test_works_under_export_for_any_batch(head: str) -> None:
    pat, batch = PatchInference(make_plain(head=head)), torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(pat, (torch.rand(3, 3, 32, 32),), dynamic_shapes={"images": {0: batch}})
    for size in (2, 5):
        other = torch.rand(size, 3, 32, 32)
        torch.testing.assert_close(tuple(program.module()(other)), tuple(pat(other)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda x: x, {}, r"returned shape \(10, 3, 24, 32\) for 10 views; wrap it in a function that returns logits"),
        (lambda x: x.mean((2, 3))[:4], {}, r"returned shape \(4, 3\) for 10 views"),
        (lambda x: (x, x), {}, "returned a tuple for 10 views"),
        ("resnet18", {}, "the model is 'resnet18', which cannot be called"),
        (lambda x: x.mean((2, 3)) > 0, {}, "the model returned torch.bool; give logits"),
        (Small().eval(), {"chunk_size": 0}, "chunk_size is 0"),
        (Small().eval(), {"chunk_size": 2.5}, "chunk_size is 2.5"),
        (Small().eval(), {"channels": 1}, "images have 3 channels"),
    ],
)
def test_what_will_not_do_is_named(model: Any, options: dict[str, Any], message: str, images: Tensor) -> None:
    with pytest.raises(InputError, match=message):
        PatchInference(model, **options)(images)
