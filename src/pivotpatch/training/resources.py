"""What a run takes of its machine: processes that decode, precision, memory for images, and whether to compile."""

import os
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import torch
from accelerate import Accelerator

from pivotpatch.accel.device import has_bfloat16
from pivotpatch.training.config import RunConfig

Place = Literal["device", "memory", "nothing"]
DEVICE_SHARE = 0.25  # of free GPU memory that images may take: the rest is for the feature maps of a step
HOST_SHARE = 0.5  # of available RAM
COMPILE_SECONDS = 120.0  # what compiling a model for training costs
COMPILE_GAIN = 1.4  # how many times as fast a compiled step is


class Hold(NamedTuple):
    """Where decoded images stay, and why, in one line."""

    place: Place
    why: str


class Compile(NamedTuple):
    """Whether a step is compiled, and why, in one line."""

    compiled: bool
    why: str


class FreeMemory(NamedTuple):
    """Bytes that are free for one process: on its GPU (0 where there is none), and its share of the RAM."""

    device: int
    host: int


def choose_hold(
    setting: Literal["auto", "device", "memory", "nothing"], *, image_bytes: int, epochs: int, free: FreeMemory
) -> Hold:
    """Where the decoded images of a run stay.

    Args:
        setting: `data.hold`.
        image_bytes: of all images, decoded.
        epochs: passes over them.
        free: what one process may use a part of.
    """
    if setting != "auto":
        return Hold(setting, f"data.hold is {setting}")
    room = FreeMemory(int(DEVICE_SHARE * free.device), int(HOST_SHARE * free.host))
    size = f"images take {_in_gigabytes(image_bytes)}"
    if epochs == 1:
        return Hold("nothing", "data.hold is nothing: each image is read only once")
    if image_bytes <= room.device:
        return Hold("device", f"data.hold is device: {size} of {_in_gigabytes(room.device)} for them on the GPU")
    if image_bytes <= room.host:
        return Hold("memory", f"data.hold is memory: {size} of {_in_gigabytes(room.host)} of RAM for them")
    return Hold("nothing", f"data.hold is nothing: {size}, more than {_in_gigabytes(room.host)} of RAM for them")


def choose_compile(
    setting: Literal["auto", True, False], *, steps_left: int, seconds_per_step: float | None
) -> Compile:
    """Whether to compile: on a GPU, where the time that it saves exceeds what it costs.

    Args:
        setting: `precision.compile`.
        steps_left: of the run.
        seconds_per_step: without compiling; None on a CPU, which gains too little.

    >>> choose_compile("auto", steps_left=10_000, seconds_per_step=0.25).compiled
    True
    >>> choose_compile("auto", steps_left=1_000, seconds_per_step=0.25).compiled
    False
    """
    if setting != "auto":
        return Compile(setting, f"precision.compile is {str(setting).lower()}")
    if seconds_per_step is None:
        return Compile(False, "precision.compile is false: there is no GPU")
    saved = steps_left * seconds_per_step * (1 - 1 / COMPILE_GAIN)
    pays = saved > COMPILE_SECONDS
    times = f"{steps_left:,} steps of {seconds_per_step:.2g} s would save {saved:.0f} s"
    return Compile(pays, f"precision.compile is {str(pays).lower()}: {times}, compiling costs {COMPILE_SECONDS:.0f} s")


def measure_free_memory(accelerator: Accelerator) -> FreeMemory:
    """What each process may count on: the least that any of them sees, so that all decide the same."""
    device = accelerator.device
    on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    host = min(psutil.virtual_memory().available, _find_container_memory()) // count_local_processes()
    if accelerator.num_processes > 1:
        seen = torch.tensor([[on_device, host]], device=device)
        on_device, host = map(int, accelerator.gather(seen).amin(0).tolist())
    return FreeMemory(on_device, host)


def _find_container_memory() -> int:
    """Bytes that a container leaves to its processes, cached files not counted; without a limit more than there are."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(limit - used + int(counts["inactive_file"]), 0)
    except (OSError, ValueError, KeyError):  # no container, or "max"
        return 2**62


def count_local_processes() -> int:
    """Processes that a launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def count_workers() -> int:
    """This process's share of the cores that it may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(cores // count_local_processes(), 12), 1)


def choose_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """The dtype of autocast, float32 for none."""
    choice = config.precision.dtype
    if choice == "auto":
        choice = "bfloat16" if has_bfloat16(device) else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[choice]


def _in_gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
