"""Parts of a model replaced by such as a GPU computes faster, with the same result.

Each was slow for a reason of its own in a profile of training (benchmarks/README.md): a first convolution over three
channels has products with short rows, the compiler's statistics of a batch norm divide for every pixel, and cuDNN
copies what has no multiple of 8 channels.

For training (`quicken_training`) a model keeps its weights and their names; for inference (`rewrite_for_inference`) new
weights are computed from them once.
"""

from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

import torch
from timm.layers import BatchNormAct2d, BlurPool2d
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.tresnet import TResNet
from torch import Tensor, nn
from torch.nn import functional

Layer = TypeVar("Layer", bound=nn.Module)
Rewrite = Callable[[nn.Module], None]
STEM_CHANNELS = 16  # of what the first convolution is given: tensor cores like multiples of 8


def rewrite_stem(network: nn.Module) -> None:
    """Fold a ResNet's first convolution."""
    _replace(network, lambda child: FoldedStem(child) if _is_stem(child) and child.bias is None else None)


def rewrite_norms(network: nn.Module) -> None:
    """Take batch norms by sums, a ResNet's with their activations."""
    for part in network.modules():
        for name, activation in _find_pairs(part):
            norm = getattr(part, name)
            if type(norm) is nn.BatchNorm2d and _is_norm(norm):
                setattr(part, name, QuickNorm(norm, getattr(part, activation)).train(norm.training))
                setattr(part, activation, nn.Identity())
    _replace(network, lambda child: QuickNorm(child) if _is_norm(child) else None)


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
            blur.channels += -blur.channels % 8


REWRITES: tuple[Rewrite, ...] = (rewrite_stem, rewrite_channels, rewrite_norms)


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
    padded.weight = _freeze(_pad_weight(convolution.weight))
    padded.out_channels, padded.in_channels = padded.weight.shape[:2]
    if convolution.bias is not None:
        padded.bias = _freeze(_pad_channels(convolution.bias, padded.out_channels))
    return padded


def copy_layer(layer: Layer) -> Layer:
    """A layer whose weights can be replaced without those of the one that it was copied from."""
    copied = copy(layer)
    copied._parameters = dict(layer._parameters)
    return copied


def _freeze(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)


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


def _is_norm(child: nn.Module) -> bool:
    if not (isinstance(child, nn.BatchNorm2d) and type(child) in (nn.BatchNorm2d, BatchNormAct2d)):
        return False
    if not isinstance(getattr(child, "drop", nn.Identity()), nn.Identity):
        return False
    return child.affine and child.track_running_stats and child.momentum is not None


def _is_odd(child: nn.Module) -> bool:
    return type(child) is nn.Conv2d and child.groups == 1 and bool(child.in_channels % 8 or child.out_channels % 8)


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


def fold_weight(weight: Tensor) -> Tensor:
    """The weight (O,3,7,7) of a stem as that (O,16,4,4) of a convolution over folded pixels."""
    weight = functional.pad(weight, (1, 0, 1, 0))  # 8 x 8: the kernel begins a pixel earlier, with zeros
    weight = weight.reshape(-1, 3, 4, 2, 4, 2).permute(0, 1, 3, 5, 2, 4).reshape(-1, 12, 4, 4)
    return functional.pad(weight, (0, 0, 0, 0, 0, STEM_CHANNELS - 12))


class FoldedStem(nn.Module):
    """A convolution of 7 x 7 pixels with stride 2 over 3 channels, as one of 4 x 4 with stride 1 over 12, padded to 16.

    Every two rows and columns of the image become channels, so that a product has longer rows. The weights are those of
    the convolution, in their own shape.
    """

    def __init__(self, convolution: nn.Conv2d) -> None:
        """Take a convolution's weights."""
        super().__init__()
        self.fold, self.weight = FoldedPixels(), convolution.weight

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,3,H,W)."""
        return functional.conv2d(self.fold(images), fold_weight(self.weight))


def _convert(values: Tensor, dtype: torch.dtype) -> Tensor:
    # Asked for the dtype that it has, torch 2.11's compiler loses the gradient of the result.
    return values if values.dtype == dtype else values.to(dtype)


def _widen(values: Tensor) -> Tensor:
    return _convert(values, torch.promote_types(values.dtype, torch.float32))


@torch.library.custom_op("pivotpatch::hold", mutates_args=())
def hold(values: Tensor) -> Tensor:
    """Values that a compiler must compute once: else it does so again for every pixel that they are used for."""
    return values.clone()


@hold.register_fake
def _make_held(values: Tensor) -> Tensor:
    return torch.empty_like(values)


def _make_factors(*factors: Tensor, held: bool) -> Tensor:
    """Numbers per channel, each (C,), as they are multiplied with and added to images, (N,C,1,1); held or not."""
    joined = torch.stack(factors)[..., None, None]
    return hold(joined) if held else joined


def _is_compiled_for_gpu(images: Tensor) -> bool:
    return torch.compiler.is_compiling() and images.is_cuda


class _NormBySums(torch.autograd.Function):
    """A batch norm whose mean and variance come from two sums, of x - s and of its square, and an activation.

    The backward pass looks at x alone to know where the activation bends, and not at the result as well.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor, eps: float, slope: float, held: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = _widen(x)
        moved = wide - shift[:, None, None]
        first = moved.mean((0, 2, 3))
        variance = (moved.square().mean((0, 2, 3)) - first.square()).clamp(min=0)
        mean, scale = shift + first, (variance + eps).rsqrt()
        factor = scale * weight
        factors = _make_factors(factor, bias - mean * factor, held=held)
        ctx.save_for_backward(x, mean, scale, factors)
        ctx.slope, ctx.held = slope, held
        ctx.mark_non_differentiable(mean, variance)
        # By a view: a product of what was summed up is kept by the compiler, and a mask of it, not computed again.
        out = (wide.unsqueeze(0) * factors[0]).squeeze(0) + factors[1]
        return _convert(_bend(out, out, slope), x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, (factor, offset) = ctx.saved_tensors
        wide, gradient = _widen(x), _widen(gradients[0])
        gradient = _bend(gradient, wide * factor + offset, ctx.slope)
        total = gradient.sum((0, 2, 3))
        product = (gradient * (wide - mean[:, None, None])).sum((0, 2, 3))
        count = x.numel() // x.shape[1]
        tilt = -factor[:, 0, 0] * scale.square() * product / count
        tilt, rest = _make_factors(tilt, -factor[:, 0, 0] * total / count - tilt * mean, held=ctx.held)
        back = gradient * factor + wide * tilt + rest
        return _convert(back, x.dtype), product * scale, total, None, None, None, None


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _normalise(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """By `_NormBySums`, which the compiler does not look into itself: that would double its time to trace a ResNet."""
    found: tuple[Tensor, Tensor, Tensor] = _NormBySums.apply(*given)
    return found


def _bend(values: Tensor, by: Tensor, slope: float) -> Tensor:
    """Values, where by is positive, else slope times them."""
    return values if slope == 1 else torch.where(by > 0, values, slope * values)


def _pad_weight(weight: Tensor) -> Tensor:
    """A weight (O,C,h,w) with zeros up to the next multiples of 8 channels."""
    return functional.pad(weight, (0, 0, 0, 0, 0, -weight.shape[1] % 8, 0, -weight.shape[0] % 8))


def _pad_channels(values: Tensor, size: int, *, by: float = 0.0) -> Tensor:
    """Values (C,) made (size,)."""
    return values if len(values) == size else functional.pad(values, (0, size - len(values)), value=by)


class QuickNorm(nn.Module):
    """A batch norm by sums and the activation behind it, if there is one; it takes channels in multiples of 8 too.

    The sums are those of what lies beyond the running mean, so that no digits are lost where a mean is large.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: nn.BatchNorm2d, activation: nn.Module | None = None) -> None:
        """Take a norm's weights and statistics, and its activation where none is given."""
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.eps = norm.eps
        own: nn.Module = getattr(norm, "act", nn.Identity())
        self.act = own if activation is None else activation
        assert norm.momentum is not None  # else it would be a mean of all batches
        self.momentum = norm.momentum

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W)."""
        size, own = images.shape[1], len(self.weight)
        weight, bias, center = (_pad_channels(values, size) for values in (self.weight, self.bias, self.running_mean))
        if not self.training:
            spread = _pad_channels(self.running_var, size, by=1.0)
            out = functional.batch_norm(images, center, spread, weight, bias, False, 0.0, self.eps)
            return self._activate(out)
        slope = find_slope(self.act)
        # The running mean is changed below, hence a copy of it.
        given = (images, weight, bias, center.clone(), self.eps, 1.0 if slope is None else slope)
        out, mean, variance = _normalise(*given, _is_compiled_for_gpu(images))
        count = images.numel() // size
        with torch.no_grad():
            self.running_mean.lerp_(mean[:own].to(self.running_mean), self.momentum)
            unbiased = variance[:own] * (count / max(count - 1, 1))
            self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
            self.num_batches_tracked.add_(1)
        return self._activate(out) if slope is None else out

    def _activate(self, out: Tensor) -> Tensor:
        found: Tensor = self.act(out)
        return found


def find_slope(activation: object) -> float | None:
    """The slope below 0 of an activation that has slope 1 above it; None of any other."""
    if isinstance(activation, nn.LeakyReLU):
        return activation.negative_slope
    return {nn.Identity: 1.0, nn.ReLU: 0.0}.get(type(activation))


class PaddedConvolution(nn.Module):
    """A convolution that takes and gives channels in multiples of 8; those that are added hold nothing but zeros."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        """Take a convolution's weights."""
        super().__init__()
        self.weight, self.bias, self.held = convolution.weight, convolution.bias, [convolution]

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W)."""
        (held,) = self.held
        weight = _pad_weight(self.weight)
        bias = None if self.bias is None else _pad_channels(self.bias, len(weight))
        return functional.conv2d(images, weight, bias, held.stride, held.padding, held.dilation)
