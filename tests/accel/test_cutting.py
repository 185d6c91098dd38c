import pytest
import torch

from pivotpatch.accel.cutting import cut_byte_patches
from pivotpatch.core.patches import cut_patches

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("size", [(64, 64), (48, 80), (16, 16)])  # the last is smaller than a box
def test_every_device_cuts_alike(device: str, size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(256, (3, 64, 60, 3), generator=generator, dtype=torch.uint8).permute(0, 3, 1, 2)
    found = cut_byte_patches(source.to(device), grid=2, overlap=0.25, size=size)
    exact = cut_patches(source.double(), grid=2, overlap=0.25, size=size)
    assert found.dtype == torch.uint8
    assert (found.cpu().double() - exact).abs().max() < 1.01  # a CPU interpolates bytes with fewer bits
