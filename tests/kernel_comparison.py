"""Kernels of our own in a process of their own, run by Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys

import torch


def run_comparison(script: str) -> None:
    """Fail where a script, which compares kernels on `device`, does."""
    on_gpu = torch.cuda.is_available()
    script = f"device = {'cuda' if on_gpu else 'cpu'!r}\n{script}\nprint('the same')"
    interpreted = {} if on_gpu else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **interpreted}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "the same\n", done.stderr[-2000:]
