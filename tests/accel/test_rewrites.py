"""Rewritten models against the ones that they were made from, in double precision."""

from copy import deepcopy

import pytest
import timm
import torch
from torch import nn

from pivotpatch.accel.inference import fold_norms
from pivotpatch.accel.rewrites import (
    FoldedPixels,
    PaddedConvolution,
    PaddedNorm,
    quicken_training,
    rewrite_for_inference,
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch 2.11 in itself
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_in_training_computes_the_same(device: str, compiled: bool) -> None:
    network = make("tresnet_l").train().to(device)
    other = deepcopy(network)
    quicken_training(other)
    assert (count(other, PaddedConvolution), count(other, PaddedNorm)) == (19, 9)
    call = torch.compile(other, dynamic=False, backend="aot_eager") if compiled else other
    images = torch.randn(2, 3, 32, 32, dtype=torch.double, device=device)
    for _ in range(2):  # the second with other running means
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
        torch.testing.assert_close(after, before)
    torch.testing.assert_close(other.eval()(images), network.eval()(images))


@pytest.mark.parametrize(("name", "sides"), [("resnet18", (32, 35)), ("tresnet_l", (32,))])
def test_a_model_for_inference_says_the_same(name: str, sides: tuple[int, ...]) -> None:
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


def test_what_is_not_known_is_left_alone() -> None:
    """Channels that something looks into, or with norms, are not padded, and other first convolutions not folded."""
    for network in (nn.Sequential(nn.Conv2d(3, 12, 3), nn.ChannelShuffle(3)), make("tresnet_l").eval()):
        before = count_odd(network)
        rewrite_for_inference(network)
        assert count_odd(network) == before > 0
    for layer in (nn.Conv2d(3, 8, 7, 2, 3, padding_mode="reflect"), nn.Conv2d(3, 8, 7, 1, 3)):
        network = nn.Sequential(layer)
        rewrite_for_inference(network)
        assert network[0] is layer
