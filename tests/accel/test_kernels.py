"""Our kernels against torch, by Triton's interpreter where there is no GPU."""

import pytest
from kernel_comparison import run_comparison

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

COMPARE = """
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


def test_our_kernels_say_what_torch_says() -> None:
    run_comparison(COMPARE)
