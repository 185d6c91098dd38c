from collections.abc import Callable
from typing import Literal

import pytest
import torch
from made_networks import make_backbone
from timm.layers import BlurPool2d
from torch import Tensor, nn

from pivotpatch.accel.fusing import Finish, FusedConvolution, QuickBlur, fuse_activations
from pivotpatch.accel.inference import fold_norms


def count(network: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(part, kind) for part in network.modules())


class Made(nn.Module):
    """A network of two convolutions whose main part, by timm's name for it, is given."""

    def __init__(self, run: Callable[..., Tensor], padding_mode: Literal["zeros", "reflect"] = "zeros") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 3, padding=1, padding_mode=padding_mode)
        self.second = nn.Conv2d(4, 4, 1)
        self.relu = nn.ReLU()
        self.pools = nn.Sequential(BlurPool2d(3, filt_size=4), BlurPool2d(3, pad_mode="replicate"))  # not our kernel's
        self.run = run

    def forward_features(self, images: Tensor) -> Tensor:
        return self.run(self, images)


def add(made: Made, images: Tensor) -> Tensor:
    """A sum whose convolution is on the left."""
    found: Tensor = made.relu(made.first(images) + images.mean(1, keepdim=True).expand(-1, 4, -1, -1))
    return found


def stray(made: Made, images: Tensor) -> Tensor:
    """What the convolution says is used beside the ReLU, too."""
    first = made.first(images)
    found: Tensor = made.relu(first) + made.second(first)
    return found


def repeat(made: Made, images: Tensor) -> Tensor:
    """One convolution twice, the second time without a ReLU."""
    found: Tensor = made.second(made.relu(made.second(images[:, [0, 1, 2, 0]])))
    return found


def branch(made: Made, images: Tensor) -> Tensor:
    """What depends on the image."""
    found: Tensor = made.relu(made.first(images))
    return found if found.sum() > 0 else -found


@pytest.mark.parametrize(
    # A convolution is fused with the ReLU behind it; finished are leaky ReLUs and gates.
    ("name", "fused", "finished", "blurs"),
    [
        ("resnet18", 17, 0, 0),
        ("regnety_002", 4 * 13 + 1, 13, 0),  # in each block a gate
        ("tresnet_m", 18 + 14 + 1, 36 + 6 + 12, 3),  # leaky ReLUs, ReLUs behind a gate, other gates
        ("efficientnet_b0", 0, 16, 0),  # gates; its activations are left alone
    ],
)
@torch.no_grad()
def test_the_answer_stays_and_passes_over_memory_go(name: str, fused: int, finished: int, blurs: int) -> None:
    folded = fold_norms(make_backbone(name), side=64)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    expected, given = folded(images), folded.network
    before = {name: value.clone() for name, value in given.state_dict().items()}
    folded.network = fuse_activations(given)
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    assert [count(folded, kind) for kind in (FusedConvolution, Finish, QuickBlur)] == [fused, finished, blurs]
    torch.testing.assert_close(folded(images), expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


@pytest.mark.parametrize(
    "network",
    [
        *(Made(run) for run in (repeat, stray, branch, lambda made, images: made.pools(images))),
        make_backbone("test_vit").network,
    ],
)
def test_what_cannot_be_fused_is_left_alone(network: nn.Module) -> None:
    assert fuse_activations(network) is network


@pytest.mark.parametrize(("network", "fused", "finished"), [(Made(add), 1, 0), (Made(add, "reflect"), 0, 1)])
@torch.no_grad()
def test_sums_are_taken_in_from_either_side_and_what_cudnn_cannot_take_in_is_finished(
    network: Made, fused: int, finished: int
) -> None:
    images, found = torch.rand(1, 3, 8, 8), fuse_activations(network)
    assert (count(found, FusedConvolution), count(found, Finish)) == (fused, finished)
    torch.testing.assert_close(found(images), network.forward_features(images))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["resnet50", "regnety_002", "tresnet_m"])
@torch.no_grad()
def test_a_gpu_says_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    folded = fold_norms(make_backbone(name), side=64)
    images = torch.rand(32, 3, 96, 96, generator=torch.Generator().manual_seed(1))  # large enough for our kernels
    expected = folded(images)
    folded.network = fuse_activations(folded.network)
    found = folded.cuda().to(memory_format=torch.channels_last)(images.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
