"""Our kernels against torch, by Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys

import pytest
import torch
from timm.layers import BlurPool2d
from torch import nn

from pivotpatch.accel.pooling import QuickBlur, QuickMaximum

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

INFERENCE = """
import itertools
import torch
from torch.nn import functional
from pivotpatch.accel.passes import Activation
from pivotpatch.accel.kernels import blur, finish, take_largest, take_mean

order = {"memory_format": torch.channels_last}
torch.manual_seed(0)
acts = (Activation(), Activation(0.0), Activation(1e-3), Activation(0.0, 6.0), Activation(silu=True))
shapes = ((3, 80, 4, 5), (2, 152, 9, 7), (1, 24, 8, 8), (2, 1100, 1, 1), (5, 3, 19, 18))
for dtype, shape in itertools.product((torch.float32, torch.bfloat16), shapes):
    maps, added = (5 * torch.randn(shape, device=device).to(dtype).contiguous(**order) for _ in range(2))
    bias, gate = torch.randn(shape[1], device=device), torch.rand(*shape[:2], 1, 1, device=device).to(dtype)
    for act, number in [(acts[0], number) for number in range(8)] + [(act, 7) for act in acts]:
        given = {
            "bias": bias if number & 1 else None,
            "gate": gate if number & 2 else None,
            "added": added if number & 4 else None,
        }
        wide = maps.float() + (bias[:, None, None] if number & 1 else 0)
        wide = wide * (gate.float() if number & 2 else 1) + (added.float() if number & 4 else 0)
        found = finish(maps, **given, **act._asdict())
        assert found.is_contiguous(**order)
        torch.testing.assert_close(found, act.apply(wide).to(dtype), msg=lambda text: f"{shape} {act} {number}: {text}")
for shape in ((2, 5, 7, 9), (1, 64, 12, 40), (2, 3, 8, 7), (1, 1, 1, 1)):
    for change in (lambda x: x, torch.relu, lambda x: torch.full_like(x, -torch.inf)):
        maps = change(torch.randn(shape, device=device)).contiguous(**order)
        assert torch.equal(take_largest(maps), functional.max_pool2d(maps, 3, 2, 1)), shape
        assert take_largest(maps).is_contiguous(**order)
binomial = torch.tensor([1.0, 2.0, 1.0], device=device) / 4
for dtype, shape in itertools.product((torch.float32, torch.bfloat16), ((2, 5, 7, 9), (1, 64, 12, 40), (3, 8, 2, 2))):
    maps = torch.randn(shape, device=device).to(dtype).contiguous(**order)
    weight = binomial.outer(binomial).expand(shape[1], 1, 3, 3)
    bordered = functional.pad(maps.float(), (1, 1, 1, 1), mode="reflect")
    expected = functional.conv2d(bordered, weight, stride=2, groups=shape[1])
    torch.testing.assert_close(blur(maps), expected.to(dtype), rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-5)
    if not (shape[2] % 2 or shape[3] % 2):
        torch.testing.assert_close(take_mean(maps), functional.avg_pool2d(maps.float(), 2).to(dtype))
    assert blur(maps).is_contiguous(**order) and take_mean(maps).is_contiguous(**order)
nothing = torch.tensor([1.0, torch.nan, 2.0], device=device).reshape(1, 1, 1, 3)
assert take_largest(nothing).isnan().tolist() == [[[[True, True]]]]
"""

TRAINING = """
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


@pytest.mark.parametrize("script", [INFERENCE, TRAINING], ids=["inference", "training"])
def test_our_kernels_say_what_torch_says(script: str) -> None:
    on_gpu = torch.cuda.is_available()
    script = f"device = {'cuda' if on_gpu else 'cpu'!r}\n{script}\nprint('the same')"
    interpreted = {} if on_gpu else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **interpreted}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "the same\n", done.stderr[-2000:]


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
