"""Our kernels against torch, by Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

SCRIPT = """
import itertools
import torch
from torch.nn import functional
from pivotpatch.accel.kernels import blur, finish

order = {"memory_format": torch.channels_last}
torch.manual_seed(0)
shapes = ((3, 80, 4, 5), (2, 152, 9, 7), (1, 24, 8, 8), (2, 1100, 1, 1), (5, 3, 19, 18))
for dtype, shape in itertools.product((torch.float32, torch.bfloat16), shapes):
    maps, added = (5 * torch.randn(shape, device=device).to(dtype).contiguous(**order) for _ in range(2))
    bias, gate = torch.randn(shape[1], device=device), torch.rand(*shape[:2], 1, 1, device=device).to(dtype)
    for slope, number in [(1.0, number) for number in range(8)] + [(0.0, 7), (1e-3, 7)]:
        given = {
            "bias": bias if number & 1 else None,
            "gate": gate if number & 2 else None,
            "added": added if number & 4 else None,
        }
        wide = maps.float() + (bias[:, None, None] if number & 1 else 0)
        wide = wide * (gate.float() if number & 2 else 1) + (added.float() if number & 4 else 0)
        found = finish(maps, **given, slope=slope)
        assert found.is_contiguous(**order)
        expected = functional.leaky_relu(wide, slope).to(dtype)
        torch.testing.assert_close(found, expected, msg=lambda text: f"{shape} {slope} {number}: {text}")
binomial = torch.tensor([1.0, 2.0, 1.0], device=device) / 4
for dtype, shape in itertools.product((torch.float32, torch.bfloat16), ((2, 5, 7, 9), (1, 64, 12, 40), (3, 8, 2, 2))):
    maps = torch.randn(shape, device=device).to(dtype).contiguous(**order)
    weight = binomial.outer(binomial).expand(shape[1], 1, 3, 3)
    bordered = functional.pad(maps.float(), (1, 1, 1, 1), mode="reflect")
    expected = functional.conv2d(bordered, weight, stride=2, groups=shape[1])
    torch.testing.assert_close(blur(maps), expected.to(dtype), rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-5)
    assert blur(maps).is_contiguous(**order)
"""


@pytest.mark.slow
def test_our_kernels_say_what_torch_says() -> None:
    on_gpu = torch.cuda.is_available()
    script = f"device = {'cuda' if on_gpu else 'cpu'!r}\n{SCRIPT}\nprint('the same')"
    interpreted = {} if on_gpu else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **interpreted}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "the same\n", done.stderr[-2000:]
