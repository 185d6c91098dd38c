import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from run_process import IMAGES, SMALL
from safetensors.torch import load_file

from pivotpatch.errors import InputError
from pivotpatch.training import fit, load_config
from pivotpatch.training.folder import RunFolder, read_log
from pivotpatch.training.processes import (
    FreeMemory,
    Place,
    choose_hold,
    join_processes,
    make_accelerator,
    open_trackers,
)

BIN = Path(sys.executable).parent
EPOCHS = 8
GB = 10**9


@pytest.fixture(scope="module")
def changes() -> list[str]:
    """A short run; layer norms, so that an image does not feel which others are at its process."""
    return [*SMALL, f"data.test={IMAGES}", "data.workers=0", "model.backbone=test_vit", f"train.epochs={EPOCHS}"]


def start_torchrun(*words: str) -> subprocess.Popen[str]:
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "pivotpatch", "train", *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def compare_runs(found: Path, expected: Path) -> None:
    """Models, losses and validation but for rounding; of gradients that are nothing else, Adam makes whole steps."""
    for place in ("last", "best"):
        weights = load_file(expected / place / "model.safetensors")
        for name, value in load_file(found / place / "model.safetensors").items():
            if not name.endswith(("qkv.bias", "weight_projection.bias")):  # a softmax ignores them
                torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-4, msg=name)
    entries = read_log(expected)
    assert len(read_log(found)) == len(entries)
    for mine, theirs in zip(read_log(found), entries, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"pictures_per_second"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3), name


@pytest.fixture(scope="module")
def alone(changes: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    fit(load_config(None, changes), out)
    return out


@pytest.mark.slow
def test_torchrun_stops_resumes_and_ends_like_one_process(changes: list[str], alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = start_torchrun(*changes, "--out", str(out))
    while first.poll() is None and not (out / "log.jsonl").exists():
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    _, told = first.communicate(timeout=300)
    assert f"stopped by SIGTERM; pivotpatch train --resume {out} goes on" in told
    stopped = RunFolder.open(out, writes=False).load_state().step
    assert 0 < stopped < EPOCHS * 7
    assert json.loads((out / "metrics.json").read_text())["finished"] is False
    second = start_torchrun("--resume", str(out), "--json")
    printed, told = second.communicate(timeout=300)
    assert second.returncode == 0, told
    (line,) = printed.splitlines()  # one process tells of it
    result = json.loads(line)
    assert result["finished"] is True
    compare_runs(out, alone)
    expected = json.loads((alone / "metrics.json").read_text())["test"]
    for address, by_logits in expected.items():
        for kind, each in by_logits.items():
            assert result["test"][address][kind]["positives"] == each["positives"]  # no image counts twice
            assert result["test"][address][kind]["mean"] == pytest.approx(each["mean"], abs=1e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would take itself for the first and write to the same folder."""
    join_processes()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="WORLD_SIZE: 2 processes were started, but this one knows of 1; start them"):
        join_processes()


def test_tensorboard_forgets_steps_that_are_taken_again(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = load_config(None, ["output.trackers=tensorboard"])
    for taken, steps in ((0, range(1, 8)), (0, range(1, 6)), (3, range(4, 10))):
        accelerator = make_accelerator(config, tmp_path)
        with open_trackers(accelerator, config, step=taken):
            for step in steps:
                accelerator.log({"loss": taken + step / 10}, step=step)
    events = accumulator.EventAccumulator(str(tmp_path / "tracks" / "pivotpatch")).Reload().Scalars("loss")
    expected = {**{step: step / 10 for step in (1, 2, 3)}, **{step: 3 + step / 10 for step in range(4, 10)}}
    assert {event.step: pytest.approx(event.value) for event in events} == expected
    assert len(events) == 9


@pytest.mark.parametrize(
    ("images", "epochs", "device", "host", "place"),
    [
        (4, 12, 130, 100, "device"),  # coco256 on a large GPU
        (49, 80, 130, 120, "memory"),  # COCO at 448 pixels: a step needs the GPU's memory
        (49, 80, 130, 60, "nothing"),
        (49, 80, 0, 99, "memory"),  # no GPU
        (2, 80, 8, 1, "device"),  # a quarter of it
        (2.1, 80, 8, 1, "nothing"),
        (4, 1, 130, 100, "nothing"),  # each image is read once anyway
    ],
)
def test_images_are_held_where_they_fit(images: float, epochs: int, device: int, host: int, place: Place) -> None:
    free = FreeMemory(device * GB, host * GB)
    assert choose_hold(int(images * GB), epochs=epochs, free=free) == place
