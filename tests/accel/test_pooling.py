"""Our kernels against torch's, by Triton's interpreter where there is no GPU."""

import pytest
import torch
from kernel_comparison import run_comparison
from timm.layers import BlurPool2d
from torch import nn

from pivotpatch.accel.pooling import QuickBlur, QuickMaximum

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

COMPARE = """
import torch
from timm.layers import BlurPool2d
from torch.nn import functional
from pivotpatch.accel.pooling import blur, blur_back, pool, pool_back

torch.manual_seed(0)
torch.backends.cudnn.allow_tf32 = False  # a GPU's blur by torch is a convolution
for shape in ((2, 5, 7, 9), (1, 64, 12, 40), (2, 3, 8, 7), (1, 1, 2, 2), (1, 2, 3, 3), (2, 3, 2, 5)):
    images = torch.randn(shape, device=device).contiguous(memory_format=torch.channels_last)
    ours, torchs = images.clone().requires_grad_(), images.clone().requires_grad_()
    blurred, expected = blur(ours), BlurPool2d().to(device)(torchs)
    torch.testing.assert_close(blurred, expected)
    assert blurred.is_contiguous(memory_format=torch.channels_last)
    gradient = torch.randn_like(expected)
    blurred.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(ours.grad, torchs.grad)
for shape in ((2, 5, 7, 9), (1, 64, 12, 40), (2, 3, 8, 7), (1, 1, 1, 1)):
    for change in (lambda x: x, torch.relu, torch.round):
        images = change(torch.randn(shape, device=device)).contiguous(memory_format=torch.channels_last)
        ours, torchs = images.clone().requires_grad_(), images.clone().requires_grad_()
        largest, expected = pool(ours)[0], functional.max_pool2d(torchs, 3, 2, 1)
        assert torch.equal(largest, expected), shape
        assert largest.is_contiguous(memory_format=torch.channels_last)
        gradient = torch.randn_like(expected)
        largest.backward(gradient)
        expected.backward(gradient)
        torch.testing.assert_close(ours.grad, torchs.grad)
nothing = torch.full((1, 1, 4, 4), -torch.inf, device=device, requires_grad=True)
largest = pool(nothing)[0]
largest.sum().backward()  # torch's own kernel for a GPU forgets such windows
assert bool((largest == -torch.inf).all())
assert nothing.grad.tolist() == [[[[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]]]
images = torch.randn(2, 4, 6, 7, device=device).contiguous(memory_format=torch.channels_last).requires_grad_()
places = pool(images.detach())[1]
torch.library.opcheck(pool, (images,))
torch.library.opcheck(pool_back, (torch.randn(2, 4, 3, 4, device=device), places, 6, 7))
torch.library.opcheck(blur, (images,))
torch.library.opcheck(blur_back, (torch.randn(2, 4, 3, 4, device=device), 6, 7))
"""


def test_values_and_gradients_are_those_of_torch() -> None:
    run_comparison(COMPARE)


def test_without_a_gpu_torch_does_it() -> None:
    images = torch.randn(2, 3, 9, 8)
    assert torch.equal(QuickMaximum()(images), nn.functional.max_pool2d(images, 3, 2, 1))
    assert torch.equal(QuickBlur(BlurPool2d(3))(images), BlurPool2d(3)(images))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("quick", "torchs"),
    [(QuickMaximum(), nn.MaxPool2d(3, 2, 1)), (QuickBlur(BlurPool2d(16)), BlurPool2d(16))],
    ids=["maximum", "blur"],
)
def test_compiled_on_a_gpu_it_is_the_same(quick: nn.Module, torchs: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), quick).cuda()
    theirs = nn.Sequential(*ours[:2], torchs.cuda())  # of the same weights
    images = torch.randn(4, 3, 33, 40, device="cuda").contiguous(memory_format=torch.channels_last)
    found = []
    for network in (torch.compile(ours, dynamic=False), theirs):
        ours.zero_grad()
        network(images).square().sum().backward()
        found.append([weight.grad.clone() for weight in ours.parameters() if weight.grad is not None])
    assert len(found[0]) == 2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))
