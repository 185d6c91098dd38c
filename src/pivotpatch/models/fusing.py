"""A convolution, a sum and a ReLU in one pass over memory, which cuDNN can and torch does not ask it for."""

import operator
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from pivotpatch.models.rewrites import FoldedPixels, copy_layer


class FusedConvolution(nn.Module):
    """max(0, convolution(x) + z)."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        """Take a convolution's weights, which must have a bias and zeros for padding."""
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Of x (B,C,H,W) and z that can be added to the result, or nothing; in the dtype of the weights on a GPU."""
        held = self.convolution
        if not x.is_cuda or (z is not None and z.shape != self.find_shape(x)):  # cuDNN does not stretch z
            out = held(x)
            return functional.relu(out if z is None else out + z)
        weight, rest = held.weight, cast("Any", (held.bias, held.stride, held.padding, held.dilation, held.groups))
        x = x.to(weight.dtype)
        if z is None:
            fused: Tensor = torch.cudnn_convolution_relu(x, weight, *rest)
        else:
            fused = torch.cudnn_convolution_add_relu(x, weight, z.to(weight.dtype), 1.0, *rest)
        return fused

    def find_shape(self, x: Tensor) -> tuple[int, ...]:
        """The result's shape (B,O,h,w)."""
        held = self.convolution
        padding = cast("tuple[int, ...]", held.padding)
        spans = zip(x.shape[2:], padding, held.dilation, held.kernel_size, held.stride, strict=True)
        sides = ((side + 2 * pad - gap * (size - 1) - 1) // step + 1 for side, pad, gap, size, step in spans)
        return (x.shape[0], held.out_channels, *sides)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Folding looks at sizes, which tracing does not know."""
        return isinstance(m, FoldedPixels) or super().is_leaf_module(m, module_qualified_name)


def fuse_activations(network: nn.Module) -> nn.Module:
    """A network for inference whose convolutions take in the ReLU behind them, and a sum that stands between.

    Where the other term of the sum is a convolution too, its bias is taken in with it: torch would add it in a pass
    over memory of its own. All other weights are those of the network that is given. That one is returned where torch
    cannot trace it, or where there is nothing to fuse.

    Args:
        network: a timm model in evaluation mode, its batch norms folded (`fold_norms`), for they would stand between.
    """
    tracer = _Tracer()
    tracer.traced_func_name = "forward_features"
    try:
        graph = tracer.trace(network)
    except (fx.proxy.TraceError, TypeError, RuntimeError, AttributeError):  # it branches on what it is given
        return network
    held: dict[str, Any] = {
        **dict(network.named_modules()),
        **dict(network.named_parameters()),
        **dict(network.named_buffers()),
    }
    for node in graph.nodes:
        if isinstance(_find(node, held), nn.Identity):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    relus = [node for node in graph.nodes if isinstance(_find(node, held), nn.ReLU)]
    if sum(_fuse(graph, relu, held) for relu in relus) == 0:
        return network
    fused: Any = fx.GraphModule(held, graph)
    fused.forward_features = fused.forward
    return cast("nn.Module", fused)


def _find(node: object, held: dict[str, Any]) -> Any:
    """The module that a node calls; None where it does something else."""
    return held[str(node.target)] if isinstance(node, fx.Node) and node.op == "call_module" else None


def _find_own(graph: fx.Graph, node: object, held: dict[str, Any]) -> nn.Conv2d | None:
    """The convolution whose output a node is, if nobody else asks it or uses that output."""
    found = _find(node, held)
    if not (isinstance(node, fx.Node) and type(found) is nn.Conv2d and len(node.users) == 1):
        return None
    return found if sum(_find(each, held) is found for each in graph.nodes) == 1 else None


def _give_bias(convolution: nn.Conv2d, bias: nn.Parameter | None) -> nn.Conv2d:
    """A convolution with the same weight and another bias."""
    given = copy_layer(convolution)
    given.bias = bias
    return given


def _fuse(graph: fx.Graph, relu: fx.Node, held: dict[str, Any]) -> bool:
    """Put a fused convolution in the place of a ReLU and of what it takes in; whether there was one."""
    before = relu.all_input_nodes[0]
    terms: list[tuple[Any, Any]] = [(before, None)]
    if before.target in (operator.add, operator.iadd) and len(before.users) == 1:
        one, other = before.args
        terms = [(one, other), (other, one)]
    for node, z in terms:
        convolution = _find_own(graph, node, held)
        if convolution is None or not _can_fuse(convolution):
            continue
        added = _find_own(graph, z, held)
        if added is not None and added.bias is not None and added.out_channels == convolution.out_channels:
            assert convolution.bias is not None
            convolution = _give_bias(convolution, nn.Parameter(convolution.bias + added.bias, requires_grad=False))
            held[str(z.target)] = _give_bias(added, None)
        name = str(node.target)
        held[name] = FusedConvolution(convolution)
        with graph.inserting_before(relu):
            fused = graph.call_module(name, (node.args[0],) if z is None else (node.args[0], z))
        relu.replace_all_uses_with(fused)
        for done in (relu, node) if z is None else (relu, before, node):
            graph.erase_node(done)
        return True
    return False


def _can_fuse(convolution: nn.Conv2d) -> bool:
    zeros = isinstance(convolution.padding, tuple) and convolution.padding_mode == "zeros"
    return zeros and convolution.bias is not None
