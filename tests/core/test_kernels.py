import pytest
import torch

from pivotpatch.core.kernels import can_run_kernels


def test_a_cpu_runs_none() -> None:
    assert not can_run_kernels(torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_does() -> None:
    assert can_run_kernels(torch.device("cuda"))
