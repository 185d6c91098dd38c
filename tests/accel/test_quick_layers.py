"""What a compiler is told by the layers; that they compute the same is tested with the networks that hold them."""

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch._functorch.partitioners import min_cut_rematerialization_partition

from pivotpatch.accel.quick_layers import QuickNorm, SharedReLU, _normalise, _rectify

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def compile_and_look(network: Callable[..., torch.Tensor], images: torch.Tensor) -> list[fx.Graph]:
    """The graphs of the way there and the way back that a compiler is given."""
    found: list[fx.Graph] = []

    def look(graph: fx.GraphModule, _inputs: object) -> Callable[..., object]:
        found.append(graph.graph)
        boxed: Callable[..., object] = make_boxed_func(graph.forward)
        return boxed

    backend = aot_autograd(fw_compiler=look, partition_fn=min_cut_rematerialization_partition)
    torch.compile(network, backend=backend)(images).sum().backward()
    return found


def count_calls(graphs: list[fx.Graph], name: str) -> list[int]:
    """How often each graph calls the operator of that name; what is given to a graph has the name of what made it."""
    called = [[str(node.target).split(".") for node in graph.nodes if node.op == "call_function"] for graph in graphs]
    return [sum(name in parts for parts in each) for each in called]


@needs_gpu
def test_a_compiler_for_a_gpu_is_told_what_to_hold_and_what_to_write() -> None:
    # torch 2.11 forgets that it compiles in what is not traced
    network = nn.Sequential(nn.Conv2d(3, 8, 3), QuickNorm(nn.BatchNorm2d(8)), SharedReLU()).cuda()
    graphs = compile_and_look(network, torch.rand(2, 3, 8, 8).cuda())
    assert count_calls(graphs, "hold") == [1, 1]
    assert count_calls(graphs, "as_strided") == [0, 1]


@pytest.mark.parametrize("held", [False, True])
def test_a_compiler_keeps_no_more_of_a_norm_than_what_it_was_given(held: bool) -> None:
    # Neither a mask of where its activation bends nor, where no convolution needs it, its result.
    weight, bias, center = torch.rand(8, requires_grad=True), torch.rand(8, requires_grad=True), torch.rand(8)

    def gate(images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        out, _, _ = _normalise(images * images, weight, bias, center, 1e-5, 0.1, held)
        return out * out.mean((2, 3), keepdim=True).sigmoid()

    images = torch.randn(2, 8, 16, 16, requires_grad=True)
    there, back = compile_and_look(gate, images)
    assert count_calls([there, back], "hold") == [held, held]
    (result,) = (node.args[0] for node in there.nodes if node.op == "output")
    kept = [node.meta["val"] for node in result[1:] if node.meta["val"].numel() >= images.numel()]
    assert [value.dtype for value in kept] == [torch.float32]


@pytest.mark.parametrize("written", [False, True])
def test_a_gradient_that_is_written_is_the_same(written: bool) -> None:
    images = torch.randn(2, 8, 4, 6, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: _rectify(given, written), (images,))
    assert torch.equal(_rectify(images, written), images.relu())
    graphs = compile_and_look(lambda given: _rectify(given * given, written).square(), images)
    assert count_calls(graphs, "as_strided") == [0, int(written)]
    assert count_calls(graphs, "hold") == [0, 0]
    found, images.grad = images.grad, None
    (images * images).relu().square().sum().backward()
    torch.testing.assert_close(found, images.grad)
