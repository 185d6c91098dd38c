"""Parts of a network computed in another way, with the same result, perhaps faster on a GPU; `floor.py` tries them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CHANNELS = 16  # of what the first convolution is given: tensor cores like multiples of 8


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
        """Of images (B,3,H,W), H and W even."""
        batch, _, height, width = images.shape
        pixels = images.reshape(batch, 3, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
        pixels = pixels.reshape(batch, 12, height // 2, width // 2)
        pixels = functional.pad(pixels, (2, 1, 2, 1, 0, CHANNELS - 12))
        weight = functional.pad(self.weight, (1, 0, 1, 0))  # 8 x 8: the kernel begins a pixel earlier, with zeros
        weight = weight.reshape(-1, 3, 4, 2, 4, 2).permute(0, 1, 3, 5, 2, 4).reshape(-1, 12, 4, 4)
        weight = functional.pad(weight, (0, 0, 0, 0, 0, CHANNELS - 12))
        return functional.conv2d(pixels.contiguous(memory_format=torch.channels_last), weight)


@torch.library.custom_op("pivotpatch_benchmarks::pool_forward", mutates_args=())
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


@torch.library.custom_op("pivotpatch_benchmarks::pool_backward", mutates_args=())
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


def _remember(ctx: object, inputs: Sequence[Tensor], output: Sequence[Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])  # type: ignore[attr-defined]


def _go_back(ctx: object, gradient: Tensor, _places: Tensor) -> Tensor:
    images, places = ctx.saved_tensors  # type: ignore[attr-defined]
    back: Tensor = pool_backward(gradient, images, places)
    return back


pool_forward.register_autograd(_go_back, setup_context=_remember)


class OpaquePool(nn.Module):
    """A maximum of 3 x 3 pixels with stride 2 by torch's kernels, where the compiler would write its own."""

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W)."""
        found: Tensor = pool_forward(images)[0]
        return found


def rewrite_stem(network: nn.Module) -> None:
    """Compute a ResNet's first convolution in the other way."""
    first = network.get_submodule("conv1")
    if not isinstance(first, nn.Conv2d) or first.kernel_size != (7, 7) or first.bias is not None:
        raise ValueError(f"no convolution of 7 x 7 pixels without a bias: {first}")
    network.conv1 = FoldedStem(first)


def rewrite_pool(network: nn.Module) -> None:
    """Let torch's own kernels take a ResNet's maximum."""
    pool = network.get_submodule("maxpool")
    if not isinstance(pool, nn.MaxPool2d) or (pool.kernel_size, pool.stride, pool.padding) != (3, 2, 1):
        raise ValueError(f"no maximum of 3 x 3 pixels with stride 2: {pool}")
    network.maxpool = OpaquePool()


def round_up(channels: int) -> int:
    """The next multiple of 8."""
    return -(-channels // 8) * 8


def pad_first(values: Tensor, *, size: int, by: float = 0.0) -> Tensor:
    """Values (C,...) made (size,...)."""
    return functional.pad(values, (0, 0) * (values.ndim - 1) + (0, size - values.shape[0]), value=by)


class PaddedConvolution(nn.Module):
    """A convolution that takes and gives channels in multiples of 8; those that are added hold nothing but zeros."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        """Take a convolution's weights."""
        super().__init__()
        self.weight, self.bias, self.held = convolution.weight, convolution.bias, [convolution]

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W)."""
        (held,) = self.held
        weight = pad_first(self.weight, size=round_up(held.out_channels))
        weight = functional.pad(weight, (0, 0, 0, 0, 0, round_up(held.in_channels) - held.in_channels))
        bias = None if self.bias is None else pad_first(self.bias, size=len(weight))
        return functional.conv2d(images, weight, bias, held.stride, held.padding, held.dilation)


class PaddedNorm(nn.Module):
    """A batch norm over channels in multiples of 8, and the activation behind it where it holds one."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        """Take a norm's weights and statistics."""
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.eps, self.momentum, self.act = norm.eps, norm.momentum or 0.1, getattr(norm, "act", nn.Identity())

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W)."""
        size, own = images.shape[1], len(self.weight)
        mean, variance = pad_first(self.running_mean, size=size), pad_first(self.running_var, size=size, by=1.0)
        scale, shift = pad_first(self.weight, size=size), pad_first(self.bias, size=size)
        out = functional.batch_norm(images, mean, variance, scale, shift, self.training, self.momentum, self.eps)
        if self.training:
            self.running_mean.copy_(mean[:own])
            self.running_var.copy_(variance[:own])
            self.num_batches_tracked.add_(1)
        found: Tensor = self.act(out)
        return found


def rewrite_channels(network: nn.Module) -> None:
    """Give a network's inner convolutions, norms and blurs multiples of 8 channels: cuDNN would pad them every time."""
    for parent in list(network.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            if isinstance(child, nn.Conv2d) and (child.in_channels % 8 or child.out_channels % 8):
                if child.in_channels == 3 or child.groups > 1:
                    raise ValueError(f"cannot be padded: {child}")
                setattr(parent, name, PaddedConvolution(child))
            elif isinstance(child, nn.BatchNorm2d) and child.num_features % 8:
                setattr(parent, name, PaddedNorm(child))
            elif type(child).__name__ == "BlurPool2d" and child.channels % 8:
                child.channels = round_up(child.channels)
