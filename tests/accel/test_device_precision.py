import pytest
import torch

from pivotpatch.accel.device import has_bfloat16


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((10, 0), True)])
def test_a_gpu_has_it_since_ampere(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert has_bfloat16(torch.device("cuda")) == expected
    assert not has_bfloat16(torch.device("cpu"))
