"""A model's convolutions and what follows them, traced and fused into fewer passes over memory."""

import operator
from typing import Any, cast

from timm.layers import BlurPool2d
from torch import fx, nn

from pivotpatch.accel.passes import Finish, FusedConvolution, Kernel, QuickPool, describe_activation
from pivotpatch.accel.quick_layers import FoldedPixels
from pivotpatch.accel.rewrites import are_square, copy_layer, is_blur, is_maximum


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Folding looks at sizes, which tracing does not know, and so do timm's convolutions that pad by them."""
        return isinstance(m, FoldedPixels | nn.Conv2d | BlurPool2d) or super().is_leaf_module(m, module_qualified_name)


def fuse_activations(network: nn.Module) -> nn.Module:
    """A model for inference on a GPU whose convolutions are finished in as few passes over memory as can be.

    cuDNN takes in a ReLU, and a sum that stands before it; where the other term of the sum is a convolution too, its
    bias goes with it. All other weights are those of the model that is given. That one is returned where torch cannot
    trace it, or where there is nothing to do.

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
    done = 0
    for change in (_fuse, _finish_activation, _finish_gate, _finish_bias, _replace_pool):
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
    return found if _is_asked_once(graph, found, held) else None


def _is_asked_once(graph: fx.Graph, module: nn.Module, held: dict[str, Any]) -> bool:
    return sum(_find(each, held) is module for each in graph.nodes) == 1


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
    activation = describe_activation(_find(node, held))
    if activation is None:
        return False
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
    _put(graph, taken, Finish(bias=bias, activation=activation), (x, gate, added), held)
    return True


def _finish_gate(graph: fx.Graph, node: fx.Node, held: dict[str, Any]) -> bool:
    """Have a gate that is left be a pass of ours; whether it was one."""
    gated = _find_gate(node, held)
    if gated is not None:
        _put(graph, [node], Finish(), gated, held)
    return gated is not None


def _finish_bias(graph: fx.Graph, node: fx.Node, held: dict[str, Any]) -> bool:
    """Have a bias that is left be a pass of ours; whether it was a convolution with one."""
    convolution = _find(node, held)
    if not isinstance(convolution, nn.Conv2d) or convolution.bias is None:
        return False
    if not _is_asked_once(graph, convolution, held):
        return False
    held[str(node.target)] = _give_bias(convolution, None)
    with graph.inserting_after(node):
        finished = graph.call_module(_name(held, Finish(bias=convolution.bias)), (node,))
    node.replace_all_uses_with(finished, delete_user_cb=lambda user: user is not finished)
    return True


def _replace_pool(_graph: fx.Graph, node: fx.Node, held: dict[str, Any]) -> bool:
    """Have what halves a feature map be a pass of ours; whether it was one."""
    pool = _find(node, held)
    kind = _name_kernel(pool)
    if kind is not None:
        held[str(node.target)] = QuickPool(pool, kind=kind)
    return kind is not None


def _name_kernel(pool: Any) -> Kernel | None:
    if is_maximum(pool):
        return "take_largest"
    if type(pool) is nn.AvgPool2d and pool.divisor_override is None:
        return "take_mean" if are_square((pool.kernel_size, pool.stride, pool.padding), (2, 2, 0)) else None
    return "blur" if is_blur(pool) else None


def _put(graph: fx.Graph, taken: list[fx.Node], finish: Finish, given: tuple[Any, ...], held: dict[str, Any]) -> None:
    """Put a pass in the place of nodes, of which each is used by the one before it alone."""
    with graph.inserting_before(taken[0]):
        finished = graph.call_module(_name(held, finish), given)
    taken[0].replace_all_uses_with(finished)
    for node in taken:
        graph.erase_node(node)


def _name(held: dict[str, Any], finish: Finish) -> str:
    """Hold a pass by a name of its own."""
    name = f"finish_{sum(isinstance(module, Finish) for module in held.values())}"
    held[name] = finish
    return name


def _can_fuse(convolution: nn.Conv2d) -> bool:
    zeros = isinstance(convolution.padding, tuple) and convolution.padding_mode == "zeros"
    return type(convolution) is nn.Conv2d and zeros and convolution.bias is not None
