"""What a run takes of its machine: processes, trackers, memory, precision."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration, gather_object, parse_flag_from_env

from pivotpatch.accel.device import has_bfloat16
from pivotpatch.errors import InputError, choose_one_of
from pivotpatch.process import count_local_processes
from pivotpatch.training.config import RunConfig
from pivotpatch.writing import explain_disk_faults

TRACKS = "tracks"  # the folder of a run that trackers write to
Place = Literal["device", "memory", "nothing"]
DEVICE_SHARE = 1 / 4  # of free GPU memory that images may take: the rest is for the feature maps of a step
HOST_SHARE = 1 / 2  # of available RAM


def join_processes() -> PartialState:
    """Join the processes that torchrun or `accelerate launch` started with this one; on the CPU where no GPU is."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.accelerator.current_accelerator(check_available=True)
    # Accelerate joins several processes on the CPU only when it is told to use it.
    alone = device is None or device.type == "mps"
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or (started > 1 and alone))
    if state.num_processes != started:  # each would take itself for the first, and write to the same folder
        wrong = f"{started} processes were started, but this one knows of {state.num_processes}"
        raise InputError("WORLD_SIZE", wrong, "start them with torchrun --nproc-per-node N -m pivotpatch train ...")
    return state


def make_accelerator(config: RunConfig, out: Path | None = None) -> Accelerator:
    """Device and processes; with a folder to write to, also the trackers that a configuration names."""
    names, installed = config.output.trackers, [str(name) for name in get_available_trackers()]
    for name in names:
        if name not in installed:
            todo = f"install it, or leave it out; {choose_one_of(name, installed)}"
            raise InputError("output.trackers", f"there is no {name!r} here", todo)
    return Accelerator(
        cpu=join_processes().device.type == "cpu",
        mixed_precision="no",  # the step casts as the configuration says, whatever the launcher's settings are
        log_with=list(names) if out is not None and names else None,
        project_config=ProjectConfiguration(project_dir=str(out), logging_dir=str(out / TRACKS)) if out else None,
    )


def gather_named(found: dict[str, str], accelerator: Accelerator) -> dict[str, str]:
    """What was found in any of the processes, by name."""
    if accelerator.num_processes > 1:
        for part in gather_object([found]):
            found = found | part
    return found


@contextmanager
def own_settings(device: torch.device) -> Iterator[None]:
    """Let a run seed what it likes and cuDNN choose its kernels by trial; the caller's settings return afterwards.

    Gradients are there, also where the caller wants none.
    """
    cuda, before = [device] if device.type == "cuda" else [], torch.backends.cudnn.benchmark
    with torch.random.fork_rng(devices=cuda), torch.inference_mode(mode=False), torch.enable_grad():
        torch.backends.cudnn.benchmark = True  # its context manager `flags` would switch cuDNN off, too
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


@contextmanager
def open_trackers(accelerator: Accelerator, config: RunConfig, *, step: int) -> Iterator[None]:
    """Hold the trackers of a run that has taken `step` steps open."""
    if not accelerator.log_with:
        yield
        return
    flat = {
        f"{section}.{key}": value if isinstance(value, bool | int | float | str) else str(value)
        for section, values in config.model_dump().items()
        for key, value in values.items()
    }
    # What TensorBoard was told of later steps is forgotten: they will be taken again.
    options = {"tensorboard": {"purge_step": step + 1}}
    place = Path(accelerator.logging_dir)
    with explain_disk_faults(place):
        accelerator.init_trackers("pivotpatch", config=flat, init_kwargs=options)
    try:
        yield
    finally:
        with explain_disk_faults(place):
            for tracker in accelerator.trackers:
                tracker.finish()


class FreeMemory(NamedTuple):
    """Bytes that are free for one process: on its GPU (0 where there is none), and its share of the RAM."""

    device: int
    host: int


def measure_free_memory(accelerator: Accelerator) -> FreeMemory:
    """What each process may count on: the least that any of them sees, so that all decide the same."""
    device = accelerator.device
    on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    host = min(psutil.virtual_memory().available, _find_container_memory()) // count_local_processes()
    seen = torch.tensor([[on_device, host]], device=device)
    return FreeMemory(*map(int, accelerator.gather(seen).amin(0).tolist()))


def _find_container_memory() -> int:
    """Bytes that a container leaves to its processes, cached files not counted; without a limit more than there are."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(limit - used + int(counts["inactive_file"]), 0)
    except (OSError, ValueError, KeyError):  # no container, or "max"
        return 2**62


def choose_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """The dtype of autocast, float32 for none."""
    choice = config.precision.dtype
    half = has_bfloat16(device) if choice == "auto" else choice == "bfloat16"
    return torch.bfloat16 if half else torch.float32


def choose_hold(image_bytes: int, *, epochs: int, free: FreeMemory) -> Place:
    """Where decoded images of so many bytes stay, for so many passes over them."""
    if epochs == 1:  # each is read only once
        return "nothing"
    if image_bytes <= DEVICE_SHARE * free.device:
        return "device"
    return "memory" if image_bytes <= HOST_SHARE * free.host else "nothing"
