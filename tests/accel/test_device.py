import pytest
import torch

from pivotpatch.accel import fusing
from pivotpatch.accel.device import can_run


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
    assert can_run(fusing._try_kernel, torch.device("cuda"))
