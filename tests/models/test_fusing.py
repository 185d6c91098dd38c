from typing import Literal

import pytest
import torch
from made_backbones import make_backbone
from torch import Tensor, nn

from pivotpatch.models.folding import fold_norms
from pivotpatch.models.fusing import FusedConvolution, fuse_activations


def count(network: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(part, kind) for part in network.modules())


class Features(nn.Module):
    """A network of which timm's name for its main part is asked."""

    def __init__(self, padding_mode: Literal["zeros", "reflect"] = "zeros") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 3, padding=1, padding_mode=padding_mode)
        self.second = nn.Conv2d(4, 4, 1)
        self.relu = nn.ReLU()


class Summing(Features):
    """Adds its first convolution on the left of what it adds it to."""

    def forward_features(self, images: Tensor) -> Tensor:
        found: Tensor = self.relu(self.first(images) + images.mean(1, keepdim=True).expand(-1, 4, -1, -1))
        return found


class Straying(Features):
    """Uses what its convolution says beside the ReLU, too."""

    def forward_features(self, images: Tensor) -> Tensor:
        first = self.first(images)
        found: Tensor = self.relu(first) + self.second(first)
        return found


class Repeating(Features):
    """Asks one convolution twice, the second time without a ReLU."""

    def forward_features(self, images: Tensor) -> Tensor:
        found: Tensor = self.second(self.relu(self.second(images[:, [0, 1, 2, 0]])))
        return found


class Branching(Features):
    """Does what depends on the image."""

    def forward_features(self, images: Tensor) -> Tensor:
        found: Tensor = self.relu(self.first(images))
        return found if found.sum() > 0 else -found


@pytest.mark.parametrize(
    ("name", "fused"),  # in a block of two or three convolutions all take a ReLU in, in SE blocks the first
    [("resnet18", 17), ("resnet50", 49), ("regnety_002", 4 * 13 + 1), ("wide_resnet50_2", 49)],
)
@torch.no_grad()
def test_the_answer_stays_and_every_relu_behind_a_convolution_goes(name: str, fused: int) -> None:
    folded = fold_norms(make_backbone(name), side=64)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    expected = folded(images)
    folded.network = fuse_activations(folded.network)
    assert count(folded, FusedConvolution) == fused
    torch.testing.assert_close(folded(images), expected)


@torch.no_grad()
def test_a_sum_is_taken_in_from_either_side() -> None:
    network, images = Summing(), torch.rand(1, 3, 8, 8)
    fused = fuse_activations(network)
    assert count(fused, FusedConvolution) == 1
    assert count(fused, nn.ReLU) == 0
    torch.testing.assert_close(fused(images), network.forward_features(images))


@torch.no_grad()
def test_a_convolution_that_is_added_leaves_its_bias_to_the_other() -> None:
    folded = fold_norms(make_backbone("resnet18"), side=64)
    before = {name: value.clone() for name, value in folded.state_dict().items()}
    fused = fuse_activations(folded.network)
    added = [name for name, part in fused.named_modules() if type(part) is nn.Conv2d and part.bias is None]
    assert added == [f"layer{number}.0.downsample.0" for number in (2, 3, 4)]
    first = fused.get_parameter("layer2.0.conv2.convolution.bias")
    assert torch.equal(first, before["network.layer2.0.conv2.bias"] + before["network.layer2.0.downsample.0.bias"])
    for name, value in folded.state_dict().items():
        assert torch.equal(value, before[name]), name  # of the network that was given, nothing is changed


@pytest.mark.parametrize(
    "network", [Straying(), Repeating(), Branching(), Summing("reflect"), make_backbone("test_vit").network]
)
def test_what_cannot_be_fused_is_left_alone(network: nn.Module) -> None:
    assert fuse_activations(network) is network


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["resnet50", "regnety_002"])
@torch.no_grad()
def test_cudnn_says_the_same(name: str) -> None:
    folded = fold_norms(make_backbone(name), side=64)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    expected = folded(images)
    folded.network = fuse_activations(folded.network)
    found = folded.cuda().to(memory_format=torch.channels_last)(images.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "convolution",
    [nn.Conv2d(3, 4, 3, padding=1, stride=2), nn.Conv2d(3, 5, (1, 5), dilation=2, padding=(0, 3)), nn.Conv2d(3, 2, 7)],
)
def test_the_shape_of_the_result_is_known_before(convolution: nn.Conv2d) -> None:
    images = torch.rand(2, 3, 15, 12)
    assert FusedConvolution(convolution).find_shape(images) == convolution(images).shape
