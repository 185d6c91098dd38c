"""What stands behind a convolution, or halves its output, in one pass over memory where torch makes several.

A ReLU, and a sum before it, cuDNN takes in, though torch does not ask it to. For all else there are kernels of our own
(`kernels`), which a GPU runs where a feature map is large enough.
"""

import math
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pivotpatch.accel.device import can_run

Kernel = Literal["take_largest", "blur", "take_mean"]
_LARGE = 1 << 20  # elements of a feature map from which on launching a kernel of ours costs less than it saves


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


class Activation(NamedTuple):
    """act(y): y / (1 + exp(-y)) for a SiLU, else slope y below 0 and at most top."""

    slope: float = 1.0
    top: float = math.inf
    silu: bool = False

    def apply(self, y: Tensor) -> Tensor:
        """The same by torch."""
        if self.silu:
            return functional.silu(y)
        y = y if self.slope == 1 else functional.leaky_relu(y, self.slope)
        return y if self.top == math.inf else y.clamp(max=self.top)


def describe_activation(module: object) -> Activation | None:
    """What a module does; None where it is no activation, or one that is not known."""
    if isinstance(module, nn.LeakyReLU):
        return Activation(module.negative_slope)
    known: dict[type, Activation] = {
        nn.ReLU: Activation(0.0),
        nn.ReLU6: Activation(0.0, 6.0),
        nn.SiLU: Activation(silu=True),
    }
    return known.get(type(module))


class Finish(nn.Module):
    """act((x + bias) gate + added)."""

    bias: nn.Parameter | None

    def __init__(self, *, bias: Tensor | None = None, activation: Activation | None = None) -> None:
        """Nothing by default, but what `forward` is given."""
        super().__init__()
        self.register_parameter("bias", cast("nn.Parameter | None", bias))
        self.activation = activation or Activation()

    def forward(self, x: Tensor, gate: Tensor | None = None, added: Tensor | None = None) -> Tensor:
        """Of x (B,C,H,W), a gate (B,C,1,1) and what can be added to x, or nothing."""
        alike = added is None or (added.shape, added.dtype) == (x.shape, x.dtype)
        usual = gate is None or gate.shape == (*x.shape[:2], 1, 1)
        if _is_large(x) and alike and usual:
            from pivotpatch.accel.kernels import finish

            return finish(x, bias=self.bias, gate=gate, added=added, **self.activation._asdict())
        x = x if self.bias is None else x + self.bias.to(x.dtype)[:, None, None]
        x = x if gate is None else x * gate
        return self.activation.apply(x if added is None else x + added)


class QuickPool(nn.Module):
    """A pool that halves a feature map: a ResNet's max pool, a TResNet's blur, or a mean of 2 x 2 pixels."""

    def __init__(self, pool: nn.Module, *, kind: Kernel) -> None:
        """Take a pool, and the name of the kernel that does the same."""
        super().__init__()
        self.pool, self.kind = pool, kind

    def forward(self, x: Tensor) -> Tensor:
        """Of x (B,C,H,W)."""
        odd = x.shape[2] % 2 or x.shape[3] % 2
        if not _is_large(x) or (self.kind == "take_mean" and odd):  # it may count a border, or leave one out
            pooled: Tensor = self.pool(x)
            return pooled
        from pivotpatch.accel import kernels

        halved: Tensor = getattr(kernels, self.kind)(x)
        return halved


def _is_large(x: Tensor) -> bool:
    """Whether kernels of our own can take a feature map, and are worth it."""
    large = x.numel() >= max(_LARGE, 1024 * len(x))  # 1,024 elements an image are the least that they take
    known = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return x.is_cuda and large and known and can_run(_try_kernel, x.device)


def _try_kernel(device: torch.device) -> None:
    from pivotpatch.accel.kernels import finish

    finish(torch.zeros(1, 8, 16, 16, device=device))
