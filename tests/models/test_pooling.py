"""Our kernels against torch's, by Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPARE = """
import torch
from torch.nn import functional
from pivotpatch.models.pooling import pool, pool_back

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
for shape in ((2, 5, 7, 9), (1, 64, 12, 40), (2, 3, 8, 7), (1, 1, 1, 1)):
    for change in (lambda x: x, torch.relu, torch.round, lambda x: torch.full_like(x, -torch.inf)):
        images = change(torch.randn(shape, device=device)).contiguous(memory_format=torch.channels_last)
        ours, torchs = images.clone().requires_grad_(), images.clone().requires_grad_()
        largest, expected = pool(ours)[0], functional.max_pool2d(torchs, 3, 2, 1)
        assert torch.equal(largest, expected), shape
        assert largest.is_contiguous(memory_format=torch.channels_last)
        gradient = torch.randn_like(expected)
        largest.backward(gradient)
        expected.backward(gradient)
        torch.testing.assert_close(ours.grad, torchs.grad)
nothing = torch.tensor([1.0, torch.nan, 2.0], device=device).reshape(1, 1, 1, 3)
assert pool(nothing)[0].isnan().tolist() == [[[[True, True]]]]
images = torch.randn(2, 4, 6, 7, device=device).contiguous(memory_format=torch.channels_last).requires_grad_()
places = pool(images.detach())[1]
torch.library.opcheck(pool, (images,))
torch.library.opcheck(pool_back, (torch.randn(2, 4, 3, 4, device=device), places, 6, 7))
print("the same")
"""


def test_values_and_gradients_are_those_of_torch() -> None:
    import torch

    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE], env={**os.environ, **interpreted}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "the same\n", done.stderr[-2000:]


def test_without_a_gpu_torch_does_it() -> None:
    import torch

    from pivotpatch.models.pooling import QuickPool

    images = torch.randn(2, 3, 9, 8)
    assert torch.equal(QuickPool()(images), torch.nn.functional.max_pool2d(images, 3, 2, 1))
