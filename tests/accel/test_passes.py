from copy import deepcopy

import pytest
import torch
from timm.layers import BlurPool2d
from torch import nn

from pivotpatch.accel.passes import (
    Activation,
    Finish,
    Kernel,
    QuickPool,
    describe_activation,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


@pytest.mark.parametrize("module", [nn.ReLU(), nn.LeakyReLU(1e-3), nn.ReLU6(), nn.SiLU()])
def test_activations_are_described(module: nn.Module) -> None:
    values = torch.linspace(-9, 9, 50)
    described = describe_activation(module)
    assert described is not None
    torch.testing.assert_close(described.apply(values), module(values))
    assert describe_activation(nn.GELU()) is None
    assert torch.equal(Activation().apply(values), values)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", [63, 64])
@pytest.mark.parametrize(
    ("kind", "pool"),
    [
        ("take_largest", nn.MaxPool2d(3, 2, 1)),
        ("blur", BlurPool2d(256)),
        ("take_mean", nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)),
    ],
)
def test_what_halves_does_so_on_every_device(kind: Kernel, pool: nn.Module, side: int, device: str) -> None:
    maps = torch.rand(2, 256, side, side, generator=torch.Generator().manual_seed(0))
    expected = pool(maps)
    quick = QuickPool(deepcopy(pool), kind=kind).to(device)  # else the pool itself would be moved
    torch.testing.assert_close(quick(maps.to(device)).cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_finish_takes_what_is_given_and_stretches_it(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate, added = (torch.randn(2, 256, *sides, generator=generator) for sides in ((64, 64), (1, 1), (64, 64)))
    bias = torch.randn(256, generator=generator)
    finish = Finish(bias=nn.Parameter(bias), activation=Activation(0.1)).to(device)
    for each in (added, added[:1], added[..., :1]):  # the others are too small for a kernel
        expected = nn.LeakyReLU(0.1)((x + bias[:, None, None]) * gate + each)
        found = finish(x.to(device), gate.to(device), each.to(device))
        torch.testing.assert_close(found.detach().cpu(), expected)
