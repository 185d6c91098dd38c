"""Parts of a model replaced by such as a GPU computes faster, with the same result.

Products of three channels have short rows, and cuDNN copies what has no multiple of 8 channels.
"""

from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

import torch
from timm.layers import BatchNormAct2d, BlurPool2d
from timm.models.tresnet import TResNet
from torch import Tensor, nn
from torch.nn import functional

Layer = TypeVar("Layer", bound=nn.Module)
STEM_CHANNELS = 16  # of what the first convolution is given: tensor cores like multiples of 8


def quicken_training(network: nn.Module) -> None:
    """Give the inner layers of every TResNet in a model multiples of 8 channels; weights and their names stay."""
    for part in network.modules():
        if isinstance(part, TResNet):  # others may look into their channels: cut them, join them, count them
            _replace(part, _is_odd, PaddedConvolution)
            _replace(part, lambda child: isinstance(child, BatchNormAct2d) and len(child.weight) % 8 != 0, PaddedNorm)
            _pad_blurs(part)


def rewrite_for_inference(network: nn.Module) -> None:
    """Fold the first convolution of a model whose batch norms are folded, and pad a TResNet's channels."""
    _replace(network, _is_stem, _fold_stem)
    for part in network.modules():
        if isinstance(part, TResNet) and not any(isinstance(each, nn.BatchNorm2d) for each in part.modules()):
            _replace(part, _is_odd, _pad_convolution)
            _pad_blurs(part)


def _replace(network: nn.Module, suits: Callable[[nn.Module], bool], make: Callable[[Any], nn.Module]) -> None:
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if suits(child):
                setattr(parent, name, make(child).train(child.training))


def _is_stem(child: nn.Module) -> bool:
    if type(child) is not nn.Conv2d or child.padding_mode != "zeros":
        return False
    shape = (child.in_channels, child.groups, child.kernel_size, child.stride, child.padding, child.dilation)
    return shape == (3, 1, (7, 7), (2, 2), (3, 3), (1, 1))


def _is_odd(child: nn.Module) -> bool:
    return type(child) is nn.Conv2d and child.groups == 1 and bool(child.in_channels % 8 or child.out_channels % 8)


def _pad_blurs(network: nn.Module) -> None:
    for blur in network.modules():
        if isinstance(blur, BlurPool2d) and blur.channels is not None:
            blur.channels += -blur.channels % 8


def _fold_stem(convolution: nn.Conv2d) -> nn.Sequential:
    """A convolution of 7 x 7 pixels with stride 2 over 3 channels, as one of 4 x 4 with stride 1 over 12, padded."""
    weight = functional.pad(convolution.weight, (1, 0, 1, 0))  # 8 x 8: the kernel begins a pixel earlier, with zeros
    weight = weight.reshape(-1, 3, 4, 2, 4, 2).permute(0, 1, 3, 5, 2, 4).reshape(-1, 12, 4, 4)
    folded = nn.Conv2d(STEM_CHANNELS, convolution.out_channels, 4)
    folded.weight = _freeze(functional.pad(weight, (0, 0, 0, 0, 0, STEM_CHANNELS - 12)))
    folded.bias = convolution.bias
    return nn.Sequential(FoldedPixels(), folded)


class FoldedPixels(nn.Module):
    """Every two rows and columns of an image as channels, with the border that a stem wants."""

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,3,H,W); odd ones get a row or column of zeros, which the border would have had anyway.

        Returns:
            (B,16,h + 3,w + 3) for h and w of half the side, 4 of the channels zero, in memory order B, H, W, C.
        """
        height, width = images.shape[2:]
        if height % 2 or width % 2:
            images = functional.pad(images, (0, width % 2, 0, height % 2))
        batch, height, width = len(images), images.shape[2] // 2, images.shape[3] // 2
        kind = images.device.type  # written once, into the order and dtype that the convolution takes
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else images.dtype
        folded = images.new_zeros(batch, height + 3, width + 3, STEM_CHANNELS, dtype=dtype)
        inner = folded[:, 2:-1, 2:-1, :12].unflatten(3, (3, 2, 2))
        inner.copy_(images.reshape(batch, 3, height, 2, width, 2).permute(0, 2, 4, 1, 3, 5))
        return folded.permute(0, 3, 1, 2)


def _pad_convolution(convolution: nn.Conv2d) -> nn.Conv2d:
    padded = copy_layer(convolution)
    padded.weight = _freeze(_pad_weight(convolution.weight))
    padded.out_channels, padded.in_channels = padded.weight.shape[:2]
    if convolution.bias is not None:
        padded.bias = _freeze(_pad_channels(convolution.bias))
    return padded


def copy_layer(layer: Layer) -> Layer:
    """A layer whose weights can be replaced without those of the one that it was copied from."""
    copied = copy(layer)
    copied._parameters = dict(layer._parameters)
    return copied


def _freeze(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)


def _pad_weight(weight: Tensor) -> Tensor:
    """A weight (O,C,h,w) with zeros up to the next multiples of 8 channels."""
    return functional.pad(weight, (0, 0, 0, 0, 0, -weight.shape[1] % 8, 0, -weight.shape[0] % 8))


def _pad_channels(values: Tensor, *, by: float = 0.0) -> Tensor:
    """Values (C,) up to the next multiple of 8."""
    return functional.pad(values, (0, -len(values) % 8), value=by)


class PaddedConvolution(nn.Module):
    """A convolution that takes and gives channels in multiples of 8; those that are added hold nothing but zeros."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        """Take a convolution's weights."""
        super().__init__()
        self.weight, self.bias, self.held = convolution.weight, convolution.bias, [convolution]

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W)."""
        (held,) = self.held
        bias = None if self.bias is None else _pad_channels(self.bias)
        return functional.conv2d(images, _pad_weight(self.weight), bias, held.stride, held.padding, held.dilation)


class PaddedNorm(nn.Module):
    """A batch norm and the activation behind it, over channels in multiples of 8."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: BatchNormAct2d) -> None:
        """Take a norm's weights and statistics."""
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.eps, self.momentum, self.act = norm.eps, norm.momentum, norm.act

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W)."""
        weight, bias, mean = map(_pad_channels, (self.weight, self.bias, self.running_mean))
        variance, own = _pad_channels(self.running_var, by=1.0), len(self.weight)
        out = functional.batch_norm(images, mean, variance, weight, bias, self.training, self.momentum, self.eps)
        if self.training:  # the padded statistics were moved
            self.running_mean.copy_(mean[:own])
            self.running_var.copy_(variance[:own])
            self.num_batches_tracked.add_(1)
        return self.act(out)
