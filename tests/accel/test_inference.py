"""Models for inference: batch norms folded, what follows a convolution fused with it."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from made_networks import make_backbone
from timm.layers import BlurPool2d
from torch import Tensor, nn

from pivotpatch.accel.device import can_run
from pivotpatch.accel.fusing import Finish, FusedConvolution, QuickBlur, _try_kernel, fuse_activations
from pivotpatch.accel.inference import fold_norms, quicken_inference
from pivotpatch.accel.rewrites import FoldedPixels


def count(network: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(part, kind) for part in network.modules())


@pytest.mark.parametrize(
    # Norms behind a sum or a join stay. A convolution is fused with the ReLU behind it; finished are leaky ReLUs and
    # gates.
    ("name", "left", "fused", "finished", "blurs"),
    [
        ("resnet18", 0, 17, 0, 0),
        ("regnety_002", 0, 4 * 13 + 1, 13, 0),  # in each block a gate
        # Leaky ReLUs, ReLUs behind a gate, other gates.
        pytest.param("tresnet_m", 0, 18 + 14 + 1, 36 + 6 + 12, 3, marks=pytest.mark.slow),
        ("efficientnet_b0", 0, 0, 16, 0),  # gates; its activations are left alone
        pytest.param("densenet121", 62, 59, 0, 0, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_the_answer_stays_and_norms_and_passes_go(name: str, left: int, fused: int, finished: int, blurs: int) -> None:
    backbone, images = make_backbone(name), torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    folded = fold_norms(backbone, side=64)
    assert count(folded, nn.BatchNorm2d) == left
    expected, said = backbone(images), folded(images)
    torch.testing.assert_close(said, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    given = folded.network
    kept = {key: value.clone() for key, value in given.state_dict().items()}
    folded.network = fuse_activations(given)
    assert [count(folded, kind) for kind in (FusedConvolution, Finish, QuickBlur)] == [fused, finished, blurs]
    torch.testing.assert_close(folded(images), said, atol=1e-5 * float(said.abs().max()), rtol=1e-5)
    for network, held in ((backbone, before), (given, kept)):  # what was given is left as it was
        assert all(torch.equal(value, held[key]) for key, value in network.state_dict().items())


class Made(nn.Module):
    """A model of two convolutions and a norm whose main part, by timm's name for it, is given."""

    def __init__(self, run: Callable[..., Tensor], padding_mode: Literal["zeros", "reflect"] = "zeros") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 3, padding=1, padding_mode=padding_mode)
        self.second, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.pools = nn.Sequential(BlurPool2d(3, filt_size=4), BlurPool2d(3, pad_mode="replicate"))  # not our kernel's
        self.run = run

    def forward_features(self, images: Tensor) -> Tensor:
        return self.run(self, images)

    forward = forward_features


def norm_twice(made: Made, images: Tensor) -> Any:
    """A norm that is used twice."""
    return made.norm(2 * made.first(images)) + made.norm(made.first(images))


def norm_beside(made: Made, images: Tensor) -> Any:
    """What the convolution says is used beside the norm, too."""
    found = made.first(images)
    return found + made.norm(found)


@torch.no_grad()
def test_what_cannot_be_folded_is_left_alone() -> None:
    for network in (Made(norm_twice).eval(), Made(norm_beside).eval()):
        assert network.norm.running_mean is not None
        network.norm.running_mean.fill_(5)
        assert fold_norms(network, side=8) is network
    training = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).train()
    assert fold_norms(training, side=8) is training
    broken = make_backbone("resnet18")
    next(broken.parameters()).fill_(1e38)
    assert broken(torch.rand(1, 3, 64, 64)).isnan().any()
    assert fold_norms(broken, side=64) is broken


@pytest.mark.parametrize("folds", [True, False])
@torch.no_grad()
def test_what_a_gpu_is_quickest_with_is_a_copy(folds: bool) -> None:
    """Also where no norm can be folded: a frozen run saves the backbone that it computed features with."""
    backbone = make_backbone("resnet18")
    if not folds:
        next(backbone.parameters()).fill_(1e38)
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    quick = quicken_inference(backbone, side=64, device=torch.device("cuda"), dtype=torch.bfloat16)
    assert (count(quick, nn.BatchNorm2d) == 0) == folds
    assert count(quick, FoldedPixels) == 1  # it was rewritten
    after = backbone.state_dict()
    assert after.keys() == before.keys()
    assert all(value.dtype == before[key].dtype and torch.equal(value, before[key]) for key, value in after.items())


def add(made: Made, images: Tensor) -> Any:
    """A sum whose convolution is on the left."""
    return made.relu(made.first(images) + images.mean(1, keepdim=True).expand(-1, 4, -1, -1))


def stray(made: Made, images: Tensor) -> Any:
    """What the convolution says is used beside the ReLU, too."""
    first = made.first(images)
    return made.relu(first) + made.second(first)


def repeat(made: Made, images: Tensor) -> Any:
    """One convolution twice, the second time without a ReLU."""
    return made.second(made.relu(made.second(images[:, [0, 1, 2, 0]])))


def branch(made: Made, images: Tensor) -> Any:
    """What depends on the image."""
    found = made.relu(made.first(images))
    return found if found.sum() > 0 else -found


def test_what_cannot_be_fused_is_left_alone() -> None:
    made = [Made(run) for run in (repeat, stray, branch, lambda made, images: made.pools(images))]
    for network in (*made, make_backbone("test_vit").network):
        assert fuse_activations(network) is network


@torch.no_grad()
def test_sums_are_taken_in_from_either_side_and_what_cudnn_cannot_take_in_is_finished() -> None:
    for network, fused, finished in ((Made(add), 1, 0), (Made(add, "reflect"), 0, 1)):
        images, found = torch.rand(1, 3, 8, 8), fuse_activations(network)
        assert (count(found, FusedConvolution), count(found, Finish)) == (fused, finished)
        torch.testing.assert_close(found(images), network.forward_features(images))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet50", "regnety_002", "tresnet_m"])
@torch.no_grad()
def test_a_gpu_says_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_run(_try_kernel, torch.device("cuda"))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    folded = fold_norms(make_backbone(name), side=64)
    images = torch.rand(32, 3, 96, 96, generator=torch.Generator().manual_seed(1))  # large enough for our kernels
    expected = folded(images)
    folded.network = fuse_activations(folded.network)
    found = folded.cuda().to(memory_format=torch.channels_last)(images.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_what_fails_is_not_run_and_not_tried_again() -> None:
    tried = []

    def fail(device: torch.device) -> None:
        tried.append(device)
        raise RuntimeError("Failed to find C compiler")

    assert [can_run(fail, torch.device("cuda")) for _ in range(2)] == [False, False]
    assert can_run(lambda _device: None, torch.device("cuda"))
    assert not can_run(fail, torch.device("cpu"))
    assert tried == [torch.device("cuda")]
