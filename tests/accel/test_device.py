import pytest
import torch

from pivotpatch.accel.device import can_run, has_bfloat16


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((10, 0), True)])
def test_a_gpu_has_bfloat16_since_ampere(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert has_bfloat16(torch.device("cuda")) == expected
    assert not has_bfloat16(torch.device("cpu"))


def test_what_fails_is_not_run_and_not_tried_again() -> None:
    tried = []

    def fail(device: torch.device) -> None:
        tried.append(device)
        raise RuntimeError("Failed to find C compiler")

    assert [can_run(fail, torch.device("cuda")) for _ in range(2)] == [False, False]
    assert can_run(lambda _device: None, torch.device("cuda"))
    assert not can_run(fail, torch.device("cpu"))
    assert tried == [torch.device("cuda")]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_runs_ours() -> None:
    from pivotpatch.accel import passes, pooling

    assert can_run(passes._try_kernel, torch.device("cuda"))
    assert can_run(pooling.try_pools, torch.device("cuda"))
