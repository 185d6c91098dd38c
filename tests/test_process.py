import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

COUNT = """
import resource, sys, torch
from pivotpatch.process import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(3):  # the first round makes the heap as large as it will be
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**24)  # 64 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of the GNU C library")
def test_blocks_that_are_kept_are_not_asked_of_the_system_again() -> None:
    keep, give_back = (
        int(subprocess.run([sys.executable, "-c", COUNT, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "give back")
    )
    assert keep < 10 * 2**26 // 4096 / 100
    assert give_back > 10 * keep  # large pages make them fewer, but not as few
