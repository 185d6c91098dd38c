from collections.abc import Callable
from typing import Literal

import pytest
import torch
from made_networks import make_backbone
from timm.layers import BlurPool2d
from torch import Tensor, nn

from pivotpatch.accel.fusing import fuse_activations
from pivotpatch.accel.inference import fold_norms
from pivotpatch.accel.passes import Finish, FusedConvolution, QuickPool


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
        self.pools = nn.Sequential(  # that look like a kernel's and are not
            nn.MaxPool2d(3, 2),
            nn.MaxPool2d(3, 2, 1, ceil_mode=True),
            nn.AvgPool2d(2, 2, divisor_override=3),
            nn.AvgPool2d(2, 1),
            BlurPool2d(3, filt_size=4),
            BlurPool2d(3, pad_mode="replicate"),
        )
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
    # A convolution is fused with the ReLU behind it; finished are other activations, gates, and each bias that is left.
    ("name", "fused", "finished"),
    [
        ("resnet18", 17, 0),
        ("regnety_002", 4 * 13 + 1, 2 * 13),  # in each block a gate, and the bias of what it is made by
        ("tresnet_m", 18 + 14 + 1, 36 + 6 + 12 + 25),  # leaky ReLUs, ReLUs behind a gate, other gates, biases
        ("tf_efficientnet_lite0", 0, 49),  # its convolutions
        ("efficientnet_b0", 0, 81 + 16),  # and gates
    ],
)
@torch.no_grad()
def test_the_answer_stays_and_passes_over_memory_go(name: str, fused: int, finished: int) -> None:
    folded = fold_norms(make_backbone(name), side=64)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    expected, given = folded(images), folded.network
    before = {name: value.clone() for name, value in given.state_dict().items()}
    folded.network = fuse_activations(given)
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    assert (count(folded, FusedConvolution), count(folded, Finish)) == (fused, finished)
    assert count(folded, QuickPool) == {"resnet": 1, "tresnet": 6}.get(name.rstrip("0123458_m"), 0)
    assert all(part.bias is None for part in folded.network.children() if isinstance(part, nn.Conv2d))
    torch.testing.assert_close(folded(images), expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


@pytest.mark.parametrize(
    "network",
    [Made(repeat), Made(lambda made, images: made.pools(images)), Made(branch), make_backbone("test_vit").network],
)
def test_what_cannot_be_fused_is_left_alone(network: nn.Module) -> None:
    assert fuse_activations(network) is network


@pytest.mark.parametrize(("network", "fused"), [(Made(add), 1), (Made(stray), 0), (Made(add, "reflect"), 0)])
@torch.no_grad()
def test_sums_are_taken_in_from_either_side_and_what_cudnn_cannot_take_in_is_finished(
    network: Made, fused: int
) -> None:
    images, found = torch.rand(1, 3, 8, 8), fuse_activations(network)
    assert count(found, FusedConvolution) == fused
    assert (count(found, Finish) > 0) == (fused == 0)
    torch.testing.assert_close(found(images), network.forward_features(images))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["resnet50", "regnety_002", "tresnet_m", "tf_efficientnet_lite0"])
@torch.no_grad()
def test_a_gpu_says_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its ten bits change a network of ReLU6 by 2 %
    folded = fold_norms(make_backbone(name), side=64)
    images = torch.rand(32, 3, 96, 96, generator=torch.Generator().manual_seed(1))  # large enough for our kernels
    expected = folded(images)
    folded.network = fuse_activations(folded.network)
    found = folded.cuda().to(memory_format=torch.channels_last)(images.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
