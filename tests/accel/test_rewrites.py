"""Rewritten networks against the ones that they were made from, in double precision."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from pivotpatch.accel.inference import fold_norms
from pivotpatch.accel.rewrites import (
    FoldedPixels,
    FoldedStem,
    PaddedConvolution,
    QuickNorm,
    Rewrite,
    quicken_training,
    rewrite_channels,
    rewrite_for_inference,
    rewrite_norms,
    rewrite_stem,
)

pytestmark = pytest.mark.slow


def count_odd(network: nn.Module) -> int:
    """Convolutions whose channels are no multiple of 8."""
    found = [each for each in network.modules() if isinstance(each, nn.Conv2d)]
    return sum(bool(each.weight.shape[0] % 8 or each.weight.shape[1] * each.groups % 8) for each in found)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    network: nn.Module = timm.create_model(name, num_classes=0, global_pool="").double()
    return network


def count(network: nn.Module, kind: type[nn.Module]) -> int:
    return sum(type(module) is kind for module in network.modules())


@pytest.mark.parametrize(
    ("name", "rewrite", "kind", "expected", "side"),
    [
        ("resnet18", rewrite_stem, FoldedStem, 1, 35),
        ("resnet26", rewrite_norms, QuickNorm, 29, 32),  # bottlenecks
        ("tresnet_l", rewrite_channels, PaddedConvolution, 19, 32),
        ("tresnet_m", rewrite_norms, QuickNorm, 60, 32),
    ],
)
def test_a_network_in_training_computes_the_same(
    name: str, rewrite: Rewrite, kind: type[nn.Module], expected: int, side: int
) -> None:
    network = make(name).train()
    other = deepcopy(network)
    rewrite(other)
    assert count(network, kind) == 0
    assert count(other, kind) == expected
    images = torch.randn(2, 3, side, side, dtype=torch.double)
    for _ in range(2):  # the second with other running means, from which the sums are taken
        assert_same_step(network, other, other, images)
    torch.testing.assert_close(other.eval()(images), network.eval()(images))


def assert_same_step(
    network: nn.Module, other: nn.Module, call: Callable[..., torch.Tensor], images: torch.Tensor
) -> None:
    one, two = network(images), call(images)
    torch.testing.assert_close(two, one)
    one.square().sum().backward()
    two.square().sum().backward()
    for (name, held), (again, found) in zip(network.named_parameters(), other.named_parameters(), strict=True):
        assert name == again
        assert held.grad is not None
        assert found.grad is not None
        near = 1e-9 * float(held.grad.abs().max()) + 1e-10
        torch.testing.assert_close(found.grad, held.grad, rtol=1e-6, atol=near)
    before, after = network.state_dict(), other.state_dict()
    assert list(before) == list(after)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch 2.11 in itself
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1), nn.SiLU()])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_it_is_still_the_same(device: str, activation: nn.Module) -> None:
    # torch 2.11 once gave no gradient, without a word.
    convolution, norm = nn.Conv2d(3, 8, 7, 2, 3, bias=False), BatchNormAct2d(8, act_layer=None)
    norm.act = activation
    network = nn.Sequential(convolution, norm).double().to(device)
    other = deepcopy(network)
    rewrite_stem(other)
    rewrite_norms(other)
    call = torch.compile(other, dynamic=False)
    assert_same_step(network, other, call, torch.randn(2, 3, 16, 16, dtype=torch.double, device=device))


@pytest.mark.parametrize(("name", "sides"), [("resnet18", (32, 35)), ("tresnet_l", (32,))])
def test_a_network_for_inference_says_the_same(name: str, sides: tuple[int, ...]) -> None:
    network = make(name).eval()
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None and norm.running_var is not None  # noqa: PT018
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    folded = fold_norms(network, side=32)
    other = deepcopy(folded)
    rewrite_for_inference(other)
    assert count(other, FoldedPixels) == (name == "resnet18")
    assert count_odd(other) == 0
    for side in sides:
        images = torch.randn(2, 3, side, side, dtype=torch.double)
        with torch.no_grad():
            torch.testing.assert_close(other(images), folded(images))


def test_channels_that_something_looks_into_are_not_padded() -> None:
    for network in (nn.Sequential(nn.Conv2d(3, 12, 3), nn.ChannelShuffle(3)), make("tresnet_l").eval()):
        before = count_odd(network)
        rewrite_for_inference(network)  # of the second, norms are left
        assert count_odd(network) == before > 0


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 8, 7, 2, 3),
        nn.Conv2d(3, 8, 7, 2, 3, bias=False, padding_mode="reflect"),
        nn.Conv2d(3, 8, 7, 1, 3, bias=False),
        BatchNormAct2d(8, drop_layer=nn.Dropout),
        nn.BatchNorm2d(8, affine=False),
        nn.BatchNorm2d(8, momentum=None),
        nn.BatchNorm2d(8, track_running_stats=False),
    ],
)
def test_what_is_not_known_is_left_alone(layer: nn.Module) -> None:
    network = nn.Sequential(layer)
    quicken_training(network)
    assert network[0] is layer


def test_a_large_mean_costs_no_digits_once_it_is_known() -> None:
    norm = QuickNorm(nn.BatchNorm2d(1))
    norm.running_mean.fill_(1000.0)
    images = 1000 + torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert norm(images).std(correction=0).item() == pytest.approx(1, abs=1e-4)
