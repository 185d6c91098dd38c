"""Parts of a model replaced by such as a GPU computes faster, with the same result (`quick_layers`, `pooling`).

Each was slow for a reason of its own in a profile of training (benchmarks/README.md): a first convolution over three
channels has products with short rows, the compiler's statistics of a batch norm divide for every pixel, its backward
pass of a max pool does sums for every pixel, torch takes a blur in another order of memory, cuDNN copies what has no
multiple of 8 channels, and the gradient behind a block's last ReLU was computed anew for all that it is given to.

For training (`quicken_training`) a model keeps its weights and their names; for inference (`rewrite_for_inference`) new
weights are computed from them once.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

from timm.layers import BatchNormAct2d, BlurPool2d
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.tresnet import BasicBlock as TResNetBasicBlock
from timm.models.tresnet import Bottleneck as TResNetBottleneck
from timm.models.tresnet import TResNet
from torch import Tensor, nn
from torch.nn import functional

from pivotpatch.accel.device import can_run
from pivotpatch.accel.quick_layers import (
    STEM_CHANNELS,
    FoldedPixels,
    FoldedStem,
    PaddedConvolution,
    QuickNorm,
    SharedReLU,
    fold_weight,
    pad_channels,
    round_up,
)

Layer = TypeVar("Layer", bound=nn.Module)
Rewrite = Callable[[nn.Module], None]
_LAST_ACTIVATIONS = {BasicBlock: "act2", Bottleneck: "act3", TResNetBasicBlock: "act", TResNetBottleneck: "act"}


def rewrite_stem(network: nn.Module) -> None:
    """Fold a ResNet's first convolution."""
    _replace(network, lambda child: FoldedStem(child) if _is_stem(child) and child.bias is None else None)


def rewrite_pools(network: nn.Module) -> None:
    """Replace a ResNet's max pool and a TResNet's blur pools by our own, where the device runs their kernels."""
    from pivotpatch.accel.pooling import QuickBlur, QuickMaximum, try_pools  # for training alone

    weight = next(network.parameters(), None)
    if weight is not None and can_run(try_pools, weight.device):
        _replace(network, lambda child: QuickMaximum() if is_maximum(child) else None)
        _replace(network, lambda child: QuickBlur(child) if is_blur(child) else None)


def rewrite_norms(network: nn.Module) -> None:
    """Take batch norms by sums, a ResNet's with their activations."""
    for part in network.modules():
        for name, activation in _find_pairs(part):
            norm = getattr(part, name)
            if type(norm) is nn.BatchNorm2d and _is_norm(norm):
                setattr(part, name, QuickNorm(norm, getattr(part, activation)).train(norm.training))
                setattr(part, activation, nn.Identity())
    _replace(network, lambda child: QuickNorm(child) if _is_norm(child) else None)


def rewrite_sums(network: nn.Module) -> None:
    """Write the gradient of a block's sum once."""
    for part in network.modules():
        name = _LAST_ACTIVATIONS.get(type(part))
        if name is not None and type(getattr(part, name)) is nn.ReLU:
            setattr(part, name, SharedReLU())


def _find_pairs(part: Any) -> list[tuple[str, str]]:
    """The names of norms in a part of a ResNet that nothing but an activation follows, and of that."""
    first, second = ("bn1", "act1"), ("bn2", "act2")
    if type(part) is ResNet:
        return [first]
    dropped = not isinstance(getattr(part, "drop_block", nn.Identity()), nn.Identity)
    if type(part) is BasicBlock:
        return [] if dropped else [first]
    if type(part) is Bottleneck:
        return [first] if dropped else [first, second]
    return []


def rewrite_channels(network: nn.Module) -> None:
    """Give a TResNet's inner layers multiples of 8 channels."""
    for part in network.modules():
        if not isinstance(part, TResNet):  # others may look into their channels: cut them, join them, count them
            continue
        _replace(part, lambda child: PaddedConvolution(child) if _is_odd(child) else None)
        _replace(part, lambda child: QuickNorm(child) if _is_norm(child) and child.num_features % 8 else None)
        _pad_blurs(part)


def _pad_blurs(network: nn.Module) -> None:
    for blur in network.modules():
        if isinstance(blur, BlurPool2d) and blur.channels is not None:
            blur.channels = round_up(blur.channels)


REWRITES: tuple[Rewrite, ...] = (rewrite_stem, rewrite_pools, rewrite_channels, rewrite_norms, rewrite_sums)


def quicken_training(network: nn.Module) -> None:
    """Rewrite all parts of a model that have a faster form; weights and their names stay."""
    for rewrite in REWRITES:
        rewrite(network)


def rewrite_for_inference(network: nn.Module) -> None:
    """The same for a model in evaluation mode whose batch norms are folded; its weights are computed anew."""
    _replace(network, lambda child: _fold_stem(child) if _is_stem(child) else None)
    for part in network.modules():
        if isinstance(part, TResNet) and not any(map(_is_norm, part.modules())):
            _replace(part, lambda child: _pad_convolution(child) if _is_odd(child) else None)
            _pad_blurs(part)


def _fold_stem(convolution: nn.Conv2d) -> nn.Sequential:
    folded = nn.Conv2d(STEM_CHANNELS, convolution.out_channels, 4)
    folded.weight, folded.bias = _freeze(fold_weight(convolution.weight)), convolution.bias
    return nn.Sequential(FoldedPixels(), folded)


def _pad_convolution(convolution: nn.Conv2d) -> nn.Conv2d:
    padded = copy_layer(convolution)
    padded.in_channels, padded.out_channels = round_up(padded.in_channels), round_up(padded.out_channels)
    missing = padded.in_channels - convolution.in_channels
    padded.weight = _freeze(
        functional.pad(pad_channels(convolution.weight, padded.out_channels), (0, 0, 0, 0, 0, missing))
    )
    if convolution.bias is not None:
        padded.bias = _freeze(pad_channels(convolution.bias, padded.out_channels))
    return padded


def copy_layer(layer: Layer) -> Layer:
    """A layer whose weights can be replaced without those of the one that it was copied from."""
    copied = copy(layer)
    copied._parameters = dict(layer._parameters)
    return copied


def _freeze(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)


def _replace(network: nn.Module, make: Callable[[Any], nn.Module | None]) -> None:
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            made = make(child)
            if made is not None:
                setattr(parent, name, made.train(child.training))


def _is_stem(child: nn.Module) -> bool:
    if type(child) is not nn.Conv2d or child.padding_mode != "zeros":
        return False
    shape = (child.in_channels, child.groups, child.kernel_size, child.stride, child.padding, child.dilation)
    return shape == (3, 1, (7, 7), (2, 2), (3, 3), (1, 1))


def is_maximum(child: nn.Module) -> bool:
    """Whether a layer is a max pool of 3 x 3 pixels with stride 2, as a ResNet's is."""
    if type(child) is not nn.MaxPool2d or child.ceil_mode or child.return_indices:
        return False
    return are_square((child.kernel_size, child.stride, child.padding, child.dilation), (3, 2, 1, 1))


def is_blur(child: Any) -> bool:
    """Whether a layer blurs 3 x 3 pixels with stride 2, as a TResNet's do."""
    return type(child) is BlurPool2d and (child.filt_size, child.stride, child.pad_mode) == (3, 2, "reflect")


def are_square(sizes: Sequence[int | tuple[int, ...]], sides: Sequence[int]) -> bool:
    """Whether sizes of a layer, each one number or one per direction, are these in both."""
    return all(size in (side, (side, side)) for size, side in zip(sizes, sides, strict=True))


def _is_norm(child: nn.Module) -> bool:
    if not (isinstance(child, nn.BatchNorm2d) and type(child) in (nn.BatchNorm2d, BatchNormAct2d)):
        return False
    if not isinstance(getattr(child, "drop", nn.Identity()), nn.Identity):
        return False
    return child.affine and child.track_running_stats and child.momentum is not None


def _is_odd(child: nn.Module) -> bool:
    return type(child) is nn.Conv2d and child.groups == 1 and bool(child.in_channels % 8 or child.out_channels % 8)
