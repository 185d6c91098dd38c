"""A run on the disk: config.toml, environment.json, log.jsonl, metrics.json, last/ and best/, each written whole.

A run goes on from `last/`: the averaged weights, those in training with the optimiser's moments, and state.json.
"""

import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pivotpatch import __version__
from pivotpatch.data.check import digest_images
from pivotpatch.errors import InputError, explaining
from pivotpatch.models.checkpoint import save_checkpoint, write_checkpoint
from pivotpatch.models.classifier import Classifier
from pivotpatch.training.config import RunConfig, dump_config, load_config
from pivotpatch.training.images import RunRecords, open_training_records
from pivotpatch.writing import explain_disk_faults, flush, holding, replacing, replacing_folder

CONFIG, ENVIRONMENT, LOG, METRICS = "config.toml", "environment.json", "log.jsonl", "metrics.json"
TENSORS, STATE = "training.safetensors", "state.json"
BEFORE = "before.safetensors"
LOCK = ".lock"
DAMAGED = "it is damaged, start anew"
# What may be another on the way without making the run another: where it computes, when it looks, what it writes.
CHANGEABLE = {"output", "evaluation", "precision.compile", "data.workers", "data.hold", "data.on_error", "data.test"}


class RunState(BaseModel):
    """Where a run is, in numbers."""

    model_config = ConfigDict(extra="forbid", strict=True)

    step: int = 0  # steps that are done
    evaluated: int = 0  # the step of the last evaluation
    best: float | None = None  # the best validation mAP
    best_step: int = 0  # the step it was found at
    waited: int = 0  # evaluations since then
    seconds: float = 0.0  # that training has taken, over all starts
    train_seconds: float = 0.0  # the part of it that was spent on steps
    pictures: int = 0  # images they trained on, so far as they are logged
    pending: list[list[float]] = []  # numbers of the steps since the last entry of the log, one row per step
    pending_seconds: float = 0.0  # that they took
    logged: int = 0  # entries of the log
    not_read: dict[str, str] = {}  # images that could not be read, each with what was wrong with it
    records: int = 0  # images that there are to train on
    held_out: str = ""  # digest of the names of those that there are to validate on
    config: dict[str, dict[str, Any]] | None = None  # that it was saved under


def open_run_records(root: Path, config: RunConfig, *, strict: bool = True) -> RunRecords:
    """The images that a run was trained on, and those that it held out.

    Where its table has changed since it began, others would be held out now: that is refused, or without `strict` none
    are, for the run may have been trained on each.
    """
    records = open_training_records(config)
    if config.data.val is not None or RunFolder(root, config).load_state().held_out in ("", digest_images(records.val)):
        return records
    if strict:
        wrong = f"has changed since {root} began, so that other images than then would be held out"
        raise InputError(
            str(config.data.train), wrong, "give back what it was, or name validation images behind the run"
        )
    whole = config.model_copy(update={"data": config.data.model_copy(update={"val_fraction": 0.0})})
    return open_training_records(whole)


@dataclass
class RunFolder:
    """The folder of one run."""

    root: Path
    config: RunConfig
    _: KW_ONLY
    writes: bool = True  # whether this process does; only the first of several

    def __post_init__(self) -> None:
        self.last = self.root / "last"  # the newest state
        self.best = self.root / "best"  # the model that validation chose
        self._lock = ExitStack()

    @classmethod
    def open(cls, root: Path, *, writes: bool = True) -> "RunFolder":
        """Return to a run; what a crash left half-done is cleared away first."""
        if not (root / CONFIG).is_file():
            raise InputError(str(root), f"is no run, {CONFIG} is missing", "check the path")
        folder = cls(root, load_config(root / CONFIG), writes=writes)
        if writes:
            with explain_disk_faults(root):
                folder._claim()
                folder._tidy()
        return folder

    def check_free(self) -> None:
        """Refuse a place where something is already, or nothing can be written."""
        if not self.writes:
            return
        root = self.root
        place = next(path for path in (root, *root.parents) if path.exists())
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise InputError(str(root), f"{place} is no folder that can be written to", "choose another one")
        never_begun = {LOCK, ENVIRONMENT}  # what is left where a run could not even write its configuration
        if place == root and {path.name for path in root.iterdir()} - never_begun:
            todo = "choose another folder" + (", or --resume it" if (root / CONFIG).is_file() else "")
            raise InputError(str(root), "exists already and is not empty", todo)

    def create(self, choices: Mapping[str, str]) -> None:
        """Begin a run in a folder that is new or empty; `choices` are noted beside the versions of libraries."""
        if self.writes:
            with explain_disk_faults(self.root):
                self.check_free()
                self.root.mkdir(parents=True, exist_ok=True)
                self._claim()
            self._write(ENVIRONMENT, json.dumps({**describe_environment(), "choices": dict(choices)}, indent=2) + "\n")
            self._write(CONFIG, dump_config(self.config))

    def close(self) -> None:
        """Let other processes train in it."""
        self._lock.close()

    def save_last(self, model: Classifier, tensors: dict[str, Tensor], state: RunState) -> None:
        """Replace `last/`: `model` for users, `tensors` and `state` to go on from."""
        if not self.writes:
            return
        with explain_disk_faults(self.last, also=(SafetensorError,)), replacing_folder(self.last) as scratch:
            write_checkpoint(model, scratch)
            save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, scratch / TENSORS)
            state = state.model_copy(update={"config": self.config.model_dump(mode="json")})
            (scratch / STATE).write_text(state.model_dump_json(indent=2) + "\n", "utf-8")
            (scratch / TENSORS).chmod((scratch / STATE).stat().st_mode)  # safetensors keeps it to the owner

    def save_best(self, model: Classifier) -> None:
        """Replace `best/`."""
        if self.writes:
            save_checkpoint(model, self.best, overwrite=True)

    def load_state(self) -> RunState:
        """Where the run is; at its beginning where nothing was saved yet."""
        path = self.last / STATE
        if not self.last.exists():
            return RunState()
        with explaining(str(path), "cannot be read", DAMAGED):
            return RunState.model_validate_json(path.read_text("utf-8"))

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        with suppress(OSError, ValueError, KeyError, TypeError):  # what is damaged will be written anew
            return bool(json.loads((self.root / METRICS).read_text("utf-8"))["finished"])
        return False

    def check_resumable(self, state: RunState) -> None:
        """Refuse a run that is at its end, of which something is gone, or whose configuration was changed."""
        again = f"start another with model.start_from={self.last}"
        if self.finished:
            todo = f"start another; model.start_from={self.best} begins with its weights"
            raise InputError(str(self.root), "the run has come to its end", todo)
        if state.best is not None and not self.best.exists():
            wrong = f"is not there, though step {state.best_step} was kept in it"
            raise InputError(str(self.best), wrong, f"put it back, or {again}")
        if state.step == 0 and self.best.exists():
            raise InputError(str(self.last), "is not there, so the run cannot go on", "put it back, or start anew")
        held = self.config.model_dump(mode="json")
        for section, began in (state.config or {}).items():
            for key, value in began.items():
                now = held.get(section, {}).get(key)
                if now != value and not {section, f"{section}.{key}"} & CHANGEABLE:
                    wrong = f"{section}.{key} is {now!r}, the run began with {value!r}"
                    raise InputError(str(self.root / CONFIG), wrong, f"give back what it was, or {again}")

    def load_tensors(self, device: torch.device) -> dict[str, Tensor]:
        """What `save_last` was given, on a device."""
        path = self.last / TENSORS
        place = str(device) if device.type != "cpu" else "cpu"  # several processes on the CPU say cpu:0
        with explaining(str(path), "cannot be read", DAMAGED):
            return dict(load_file(path, device=place))

    def add_to_log(self, entry: dict[str, object]) -> None:
        """Append a line to the log."""
        path = self.root / LOG
        if self.writes:
            with explain_disk_faults(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def cut_log(self, entries: int) -> None:
        """Forget what was logged after so many entries: those steps will be taken again."""
        if self.writes:
            self._write(LOG, "".join(json.dumps(entry) + "\n" for entry in read_log(self.root)[:entries]))

    def write_before(self, logits: Tensor) -> None:
        """Keep what the model said before any step, (N,L)."""
        if self.writes:
            with explain_disk_faults(self.root), replacing(self.root / BEFORE) as written:
                save_file({"logits": logits.contiguous()}, written)

    def load_before(self) -> Tensor | None:
        """What `write_before` was given; None where nothing was."""
        with suppress(OSError, SafetensorError, KeyError):
            return load_file(self.root / BEFORE)["logits"]
        return None

    def write_metrics(self, metrics: dict[str, object]) -> None:
        """Replace metrics.json."""
        if self.writes:
            self._write(METRICS, json.dumps(metrics, indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        with explain_disk_faults(self.root), replacing(self.root / name) as written:
            written.write_text(text, "utf-8")
            flush(written)

    def _claim(self) -> None:
        """Refuse a folder that another process trains in."""
        if not self._lock.enter_context(holding(self.root / LOCK)):
            raise InputError(str(self.root), "another process is training in it", "wait for it, or end it first")

    def _tidy(self) -> None:
        for name in (CONFIG, ENVIRONMENT, LOG, METRICS, BEFORE):
            (self.root / f"{name}.tmp").unlink(missing_ok=True)
        for folder in (self.last, self.best):
            old = folder.with_name(f"{folder.name}.old")
            if old.exists() and not folder.exists():
                old.rename(folder)  # a crash came between the two renames of a save
            for left in (old, *self.root.glob(f".{folder.name}.*")):
                shutil.rmtree(left, ignore_errors=True)


def read_log(root: Path) -> list[dict[str, Any]]:
    """The entries of a run's log, in order, without one that a crash cut short."""
    path = root / LOG
    lines = path.read_text("utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
    with explaining(str(path), "holds lines that no run writes", "mend them, or remove the file"):
        return [dict(json.loads(line)) for line in lines if line.endswith("\n")]


def describe_environment() -> dict[str, object]:
    """What a run was made with."""
    libraries = ("torch", "torchvision", "timm", "accelerate", "numpy", "pillow", "safetensors")
    return {
        "pivotpatch": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: version(name) for name in libraries},
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())],
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
