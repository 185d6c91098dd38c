"""What every benchmark on a GPU says of its machine, how it tells the time, and how it keeps its figures."""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def describe_machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    return {"device": name, "torch": torch.__version__}


def now(device: torch.device) -> float:
    """Seconds, once the device has done all that it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(ways: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Median seconds of each way, after one call that is not timed; they take turns, so that a busy moment hits all."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def write_json(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write all figures so far, or nothing where no file is named."""
    if path is not None:
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        unfinished.replace(path)
