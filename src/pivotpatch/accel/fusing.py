"""A model's convolutions and what follows them, traced and fused into fewer passes over memory.

cuDNN takes in a sum and a ReLU, though torch does not ask it to; leaky ReLUs, gates and blurs have kernels of our own.
"""

import operator
from typing import Any, cast

import torch
from timm.layers import BlurPool2d
from torch import Tensor, fx, nn
from torch.nn import functional

from pivotpatch.accel.device import can_run
from pivotpatch.accel.rewrites import FoldedPixels, copy_layer

_LARGE = 1 << 20  # elements of a feature map from which on launching a kernel of ours costs less than it saves


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Folding looks at sizes, which tracing does not know, and so do timm's convolutions that pad by them."""
        return isinstance(m, FoldedPixels | nn.Conv2d | BlurPool2d) or super().is_leaf_module(m, module_qualified_name)


def fuse_activations(network: nn.Module) -> nn.Module:
    """A model for inference on a GPU whose convolutions are finished in as few passes over memory as can be.

    Where a sum before a ReLU has a convolution for its other term too, that one's bias goes with the first. All other
    weights are those of the model that is given. That one is returned where torch cannot trace it, or where there is
    nothing to do.

    Args:
        network: a timm model in evaluation mode, its batch norms folded (`fold_norms`), for they would stand between.
    """
    tracer = _Tracer()
    tracer.traced_func_name = "forward_features"
    try:
        graph = tracer.trace(network)
    except (fx.proxy.TraceError, TypeError, RuntimeError, AttributeError, NameError):  # it branches on what it is given
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
    done = 0
    for change in (_fuse, _finish_activation, _finish_gate, _replace_blur):
        done += sum(change(graph, node, held) for node in list(graph.nodes))
    if done == 0:
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
    if not (isinstance(node, fx.Node) and isinstance(found, nn.Conv2d) and len(node.users) == 1):
        return None
    return found if sum(_find(each, held) is found for each in graph.nodes) == 1 else None


def _give_bias(convolution: nn.Conv2d, bias: nn.Parameter | None) -> nn.Conv2d:
    """A convolution with the same weight and another bias."""
    given = copy_layer(convolution)
    given.bias = bias
    return given


def _fuse(graph: fx.Graph, relu: fx.Node, held: dict[str, Any]) -> bool:
    """Put a fused convolution in the place of a ReLU and of what it takes in; whether there was one."""
    if not isinstance(_find(relu, held), nn.ReLU):
        return False
    before = relu.all_input_nodes[0]
    for node, z in _list_terms(before) or [(before, None)]:
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


def _list_terms(node: fx.Node) -> list[tuple[Any, Any]]:
    """Both orders of the terms of a sum that nobody else uses; none where it is no such sum."""
    if node.target not in (operator.add, operator.iadd) or len(node.users) != 1:
        return []
    one, other = node.args
    return [(one, other), (other, one)]


def _find_gate(node: object, held: dict[str, Any]) -> tuple[Any, Any] | None:
    """What is gated, and its gate, of a product that is a gated feature map."""
    if not isinstance(node, fx.Node) or node.target not in (operator.mul, operator.imul):
        return None
    for x, gate in (node.args, node.args[::-1]):
        if not (isinstance(x, fx.Node) and isinstance(gate, fx.Node)):
            continue
        if gate.target == "sigmoid" or isinstance(_find(gate, held), nn.Sigmoid | nn.Hardsigmoid):
            return x, gate
    return None


def _finish_activation(graph: fx.Graph, node: fx.Node, held: dict[str, Any]) -> bool:
    """Have an activation, and the sum, gate and bias before it, done at once; whether it was one, and had any."""
    activation = _find(node, held)
    if type(activation) is not nn.ReLU and not isinstance(activation, nn.LeakyReLU):
        return False
    slope = getattr(activation, "negative_slope", 0.0)
    x, gate, added, bias, taken = node.all_input_nodes[0], None, None, None, [node]
    for one, other in _list_terms(x):
        if _find_gate(one, held) is not None or _find_own(graph, one, held) is not None:
            taken.append(x)
            x, added = one, other
            break
    gated = _find_gate(x, held)
    if gated is not None and len(x.users) == 1:
        taken.append(x)
        x, gate = gated
    convolution = _find_own(graph, x, held)
    if convolution is not None and convolution.bias is not None:
        bias, held[str(x.target)] = convolution.bias, _give_bias(convolution, None)
    if bias is None and len(taken) == 1:
        return False
    _put(graph, taken, Finish(bias=bias, slope=slope), (x, gate, added), held)
    return True


def _finish_gate(graph: fx.Graph, node: fx.Node, held: dict[str, Any]) -> bool:
    """Have a gate that is left be a pass of ours; whether it was one."""
    gated = _find_gate(node, held)
    if gated is not None:
        _put(graph, [node], Finish(), gated, held)
    return gated is not None


def _put(graph: fx.Graph, taken: list[fx.Node], finish: "Finish", given: tuple[Any, ...], held: dict[str, Any]) -> None:
    """Put a pass in the place of nodes, of which each is used by the one before it alone."""
    name = f"finish_{sum(isinstance(module, Finish) for module in held.values())}"
    held[name] = finish
    with graph.inserting_before(taken[0]):
        finished = graph.call_module(name, given)
    taken[0].replace_all_uses_with(finished)
    for node in taken:
        graph.erase_node(node)


def _replace_blur(_graph: fx.Graph, node: fx.Node, held: dict[str, Any]) -> bool:
    """Have a TResNet's blur be a pass of ours; whether it was one."""
    pool = _find(node, held)
    known = type(pool) is BlurPool2d and (pool.filt_size, pool.stride, pool.pad_mode) == (3, 2, "reflect")
    if known:
        held[str(node.target)] = QuickBlur(pool)
    return known


def _can_fuse(convolution: nn.Conv2d) -> bool:
    zeros = isinstance(convolution.padding, tuple) and convolution.padding_mode == "zeros"
    return type(convolution) is nn.Conv2d and zeros and convolution.bias is not None


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


class Finish(nn.Module):
    """act((x + bias) gate + added), where act(y) is slope y below 0 and y above it."""

    bias: nn.Parameter | None

    def __init__(self, *, bias: Tensor | None = None, slope: float = 1.0) -> None:
        """Nothing by default, but what `forward` is given."""
        super().__init__()
        self.register_parameter("bias", cast("nn.Parameter | None", bias))
        self.slope = slope

    def forward(self, x: Tensor, gate: Tensor | None = None, added: Tensor | None = None) -> Tensor:
        """Of x (B,C,H,W), a gate (B,C,1,1) and what can be added to x, or nothing."""
        alike = added is None or (added.shape, added.dtype) == (x.shape, x.dtype)
        usual = gate is None or gate.shape == (*x.shape[:2], 1, 1)
        if _is_large(x) and alike and usual:
            from pivotpatch.accel.kernels import finish

            return finish(x, bias=self.bias, gate=gate, added=added, slope=self.slope)
        x = x if self.bias is None else x + self.bias.to(x.dtype)[:, None, None]
        x = x if gate is None else x * gate
        x = x if added is None else x + added
        return x if self.slope == 1 else functional.leaky_relu(x, self.slope)


class QuickBlur(nn.Module):
    """A TResNet's blur pool."""

    def __init__(self, pool: nn.Module) -> None:
        """Take the layer, for feature maps that the kernel does not take."""
        super().__init__()
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """Of x (B,C,H,W)."""
        if not _is_large(x):
            return self.pool(x)
        from pivotpatch.accel.kernels import blur

        return blur(x)


def _is_large(x: Tensor) -> bool:
    """Whether kernels of our own can take a feature map, and are worth it."""
    large = x.numel() >= max(_LARGE, 1024 * len(x))  # 1,024 elements an image are the least that they take
    known = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return x.is_cuda and large and known and can_run(_try_kernel, x.device)


def _try_kernel(device: torch.device) -> None:
    from pivotpatch.accel.kernels import finish

    finish(torch.zeros(1, 8, 16, 16, device=device))
