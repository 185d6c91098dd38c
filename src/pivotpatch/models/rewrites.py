"""Parts of a network computed in another way that a GPU does faster in training: same weights, same names, same result.

Each was slow for a reason of its own in a profile of compiled training (docs/performance.md): a first convolution over
three channels has products with short rows, the compiler's own way back of a maximum reads its input many times over,
its statistics of a batch norm divide for every pixel, and cuDNN copies what has no multiple of 8 channels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.models.tresnet import TResNet
from torch import Tensor, nn
from torch.nn import functional

_STEM_CHANNELS = 16  # of what the first convolution is given: tensor cores like multiples of 8


class FoldedStem(nn.Module):
    """A convolution of 7 x 7 pixels with stride 2 over 3 channels, as one of 4 x 4 with stride 1 over 12, padded to 16.

    Every two rows and columns of the image become channels, so that a product has longer rows. The weights are those of
    the convolution, in their own shape.
    """

    def __init__(self, convolution: nn.Conv2d) -> None:
        """Take a convolution's weights."""
        super().__init__()
        self.weight = convolution.weight

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,3,H,W)."""
        batch, _, height, width = images.shape
        if height % 2 or width % 2:
            return functional.conv2d(images, self.weight, stride=2, padding=3)
        pixels = images.reshape(batch, 3, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
        pixels = pixels.reshape(batch, 12, height // 2, width // 2)
        pixels = functional.pad(pixels, (2, 1, 2, 1, 0, _STEM_CHANNELS - 12))
        weight = functional.pad(self.weight, (1, 0, 1, 0))  # 8 x 8: the kernel begins a pixel earlier, with zeros
        weight = weight.reshape(-1, 3, 4, 2, 4, 2).permute(0, 1, 3, 5, 2, 4).reshape(-1, 12, 4, 4)
        weight = functional.pad(weight, (0, 0, 0, 0, 0, _STEM_CHANNELS - 12))
        return functional.conv2d(pixels.contiguous(memory_format=torch.channels_last), weight)


@torch.library.custom_op("pivotpatch::pool_forward", mutates_args=())
def pool_forward(images: Tensor) -> tuple[Tensor, Tensor]:
    """Torch's own maximum of 3 x 3 with stride 2, opaque to the compiler."""
    found, places = torch.ops.aten.max_pool2d_with_indices(images, [3, 3], [2, 2], [1, 1])
    return found, places


@pool_forward.register_fake
def _(images: Tensor) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = images.shape
    shape = (batch, channels, (height + 1) // 2, (width + 1) // 2)
    order = torch.channels_last if images.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    found = torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=order)
    return found, torch.empty(shape, dtype=torch.int64, device=images.device, memory_format=order)


@torch.library.custom_op("pivotpatch::pool_backward", mutates_args=())
def pool_backward(gradient: Tensor, images: Tensor, places: Tensor) -> Tensor:
    """Its way back."""
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    back: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
        gradient, images, [3, 3], [2, 2], [1, 1], [1, 1], False, places
    )
    return back


@pool_backward.register_fake
def _(gradient: Tensor, images: Tensor, places: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(images)


def _remember(ctx: Any, inputs: Sequence[Tensor], output: Sequence[Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])


def _go_back(ctx: Any, gradient: Tensor, _places: Tensor) -> Tensor:
    images, places = ctx.saved_tensors
    back: Tensor = pool_backward(gradient, images, places)
    return back


pool_forward.register_autograd(_go_back, setup_context=_remember)


class OpaquePool(nn.Module):
    """A maximum of 3 x 3 pixels with stride 2 by torch's kernels, where the compiler would write its own."""

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W)."""
        found: Tensor = pool_forward(images)[0]
        return found


class _NormBySums(torch.autograd.Function):
    """A batch norm whose mean and variance come from two sums, of x - s and of its square."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        moved = wide - shift[:, None, None]
        first = moved.mean((0, 2, 3))
        variance = (moved.square().mean((0, 2, 3)) - first.square()).clamp(min=0)
        mean, scale = shift + first, (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance)
        out = (wide - mean[:, None, None]) * (scale * weight)[:, None, None] + bias[:, None, None]
        return out.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, mean, scale = ctx.saved_tensors
        back = torch.ops.aten.native_batch_norm_backward(
            gradients[0], x, weight, None, None, mean, scale, True, ctx.eps, [True, True, True]
        )
        return *back, None, None


def _round_up(channels: int) -> int:
    """The next multiple of 8."""
    return -(-channels // 8) * 8


def _pad(values: Tensor, size: int, *, by: float = 0.0) -> Tensor:
    """Values (C,...) made (size,...)."""
    return functional.pad(values, (0, 0) * (values.ndim - 1) + (0, size - values.shape[0]), value=by)


class QuickNorm(nn.Module):
    """A batch norm by sums, and the activation behind it where it holds one; it takes channels in multiples of 8 too.

    The sums are those of what lies beyond the running mean, so that no digits are lost where a mean is large.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        """Take a norm's weights and statistics."""
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.eps, self.momentum, self.act = norm.eps, norm.momentum, getattr(norm, "act", nn.Identity())

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W)."""
        size, own = images.shape[1], len(self.weight)
        weight, bias, center = (_pad(values, size) for values in (self.weight, self.bias, self.running_mean))
        if not self.training:
            spread = _pad(self.running_var, size, by=1.0)
            out = functional.batch_norm(images, center, spread, weight, bias, False, 0.0, self.eps)
        else:
            # The running mean is changed below, hence a copy of it.
            out, mean, variance = _NormBySums.apply(images, weight, bias, center.clone(), self.eps)
            count = images.numel() // size
            with torch.no_grad():
                self.running_mean.lerp_(mean[:own].to(self.running_mean), self.momentum)
                unbiased = variance[:own] * (count / max(count - 1, 1))
                self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
                self.num_batches_tracked.add_(1)
        found: Tensor = self.act(out)
        return found


class PaddedConvolution(nn.Module):
    """A convolution that takes and gives channels in multiples of 8; those that are added hold nothing but zeros."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        """Take a convolution's weights."""
        super().__init__()
        self.weight, self.bias, self.held = convolution.weight, convolution.bias, [convolution]

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W)."""
        (held,) = self.held
        weight = _pad(self.weight, _round_up(held.out_channels))
        weight = functional.pad(weight, (0, 0, 0, 0, 0, _round_up(held.in_channels) - held.in_channels))
        bias = None if self.bias is None else _pad(self.bias, len(weight))
        return functional.conv2d(images, weight, bias, held.stride, held.padding, held.dilation)


def rewrite_stem(network: nn.Module) -> None:
    """Fold a ResNet's first convolution."""
    _replace(network, lambda child: FoldedStem(child) if _is_stem(child) else None)


def rewrite_pool(network: nn.Module) -> None:
    """Let torch's own kernels take a ResNet's maximum."""
    _replace(network, lambda child: OpaquePool() if _is_pool(child) else None)


def rewrite_norms(network: nn.Module) -> None:
    """Take batch norms by sums."""
    _replace(network, lambda child: QuickNorm(child) if _is_norm(child) else None)


def rewrite_channels(network: nn.Module) -> None:
    """Give a TResNet's inner layers multiples of 8 channels."""
    for part in network.modules():
        if not isinstance(part, TResNet):  # others may look into their channels: cut them, join them, count them
            continue
        _replace(part, lambda child: PaddedConvolution(child) if _is_odd(child) else None)
        _replace(part, lambda child: QuickNorm(child) if _is_norm(child) and child.num_features % 8 else None)
        for blur in part.modules():
            if type(blur).__name__ == "BlurPool2d":
                blur.channels = _round_up(blur.channels)


REWRITES = (rewrite_stem, rewrite_pool, rewrite_channels, rewrite_norms)


def quicken_training(network: nn.Module) -> None:
    """Compute a network's parts in the ways above, wherever it has such parts."""
    for rewrite in REWRITES:
        rewrite(network)


def _replace(network: nn.Module, make: Any) -> None:
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            made = make(child)
            if made is not None:
                setattr(parent, name, made.train(child.training))


def _is_stem(child: nn.Module) -> bool:
    if type(child) is not nn.Conv2d or child.bias is not None or child.padding_mode != "zeros":
        return False
    shape = (child.in_channels, child.groups, child.kernel_size, child.stride, child.padding, child.dilation)
    return shape == (3, 1, (7, 7), (2, 2), (3, 3), (1, 1))


def _is_pool(child: nn.Module) -> bool:
    if type(child) is not nn.MaxPool2d:
        return False
    return (child.kernel_size, child.stride, child.padding, child.dilation, child.ceil_mode) == (3, 2, 1, 1, False)


def _is_norm(child: nn.Module) -> bool:
    known = type(child) is nn.BatchNorm2d or type(child).__name__ == "BatchNormAct2d"
    return known and child.affine and child.track_running_stats and child.momentum is not None


def _is_odd(child: nn.Module) -> bool:
    return type(child) is nn.Conv2d and child.groups == 1 and bool(child.in_channels % 8 or child.out_channels % 8)
