import pytest
import torch
from made_networks import make_backbone
from torch import Tensor, nn

from pivotpatch.accel.inference import fold_norms


def count_norms(network: nn.Module) -> int:
    return sum(isinstance(part, nn.BatchNorm2d) for part in network.modules())


@pytest.mark.parametrize(
    ("name", "left"),  # norms behind a sum or a join stay
    [
        ("tf_efficientnet_lite0", 0),
        ("resnet18", 0),
        ("tresnet_m", 0),
        ("densenet121", 62),
    ],
)
@torch.no_grad()
def test_the_answer_stays_and_the_norms_go(name: str, left: int) -> None:
    backbone = make_backbone(name)
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    folded = fold_norms(backbone, side=64)
    assert count_norms(folded) == left
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    expected = backbone(images)
    torch.testing.assert_close(folded(images), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    for key, value in backbone.state_dict().items():  # the network itself is left as it was
        assert torch.equal(value, before[key])


class Branching(nn.Module):
    """Uses its norm twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.convolution(images)
        twice: Tensor = self.norm(2 * found) + self.norm(found)
        return twice


class Straying(Branching):
    """Uses what its convolution says beside the norm, too."""

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.convolution(images)
        normed: Tensor = self.norm(found)
        return found + normed


@pytest.mark.parametrize("kind", [Branching, Straying])
def test_what_cannot_be_folded_is_left_alone(kind: type[Branching]) -> None:
    network = kind().eval()
    assert network.norm.running_mean is not None
    network.norm.running_mean.fill_(5)
    assert fold_norms(network, side=8) is network
    training = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).train()
    assert fold_norms(training, side=8) is training


@torch.no_grad()
def test_a_network_that_gives_no_numbers_is_left_alone() -> None:
    backbone = make_backbone("resnet18")
    next(backbone.parameters()).fill_(1e38)
    assert backbone(torch.rand(1, 3, 64, 64)).isnan().any()
    assert fold_norms(backbone, side=64) is backbone
