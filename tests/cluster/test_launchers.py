"""The jobs of examples/cluster that train, run on this machine by stand-ins for what only a cluster has."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from run_process import read_step, write_images

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
SMALL = "model.backbone=test_resnet model.pretrained=false model.image_size=32 train.epochs=40 train.batch_size=8"
SMALL += " data.workers=0 output.trackers=[] output.save_every=2"


def start(script: str, folder: Path, **programs: str) -> "subprocess.Popen[str]":
    """Start a script where some programs are replaced by other scripts."""
    (folder / "bin").mkdir(exist_ok=True)
    torchrun = f'exec "{sys.executable}" -m torch.distributed.run "$@"'
    for name, content in {"torchrun": torchrun, **programs}.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{content}\n")
        path.chmod(0o755)
    env = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_JOB_ID": "7",
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", "-c", script]
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: "subprocess.Popen[str]") -> None:
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said[-3000:]


def check_it_goes_on(script: str, folder: Path, **programs: str) -> None:
    """End a job in the middle of its run, as a cluster does, and start it again."""
    first = start(script, folder, **programs)
    while not (folder / "run" / "last" / "state.json").exists():
        assert first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGTERM)
    first.communicate()
    begun = read_step(folder / "run")
    assert first.returncode != 0
    finish(start(script, folder, **programs))
    assert 0 < begun < read_step(folder / "run")
    assert (folder / "run" / "best" / "model.safetensors").exists()


@pytest.mark.slow
def test_two_machines_of_slurm_train_together_and_go_on_when_they_are_queued_again(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = (EXAMPLES / "train.slurm").read_text("utf-8")
    for shown, here in (("data.csv", f"images/all.csv {SMALL}"), ("/shared", "."), ("29500", str(port))):
        assert shown in script
        script = script.replace(shown, here)
    script = script.replace("--nproc-per-node 4", "--nproc-per-node 1")
    both = '"$@" & "$@"; first=$?; wait $! && exit $first'  # two machines that are this one
    check_it_goes_on(script, tmp_path, scontrol="printf '127.0.0.1\\nother\\n'", srun=both)


@pytest.mark.slow
def test_a_job_of_kubernetes_trains_and_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    job = yaml.safe_load((EXAMPLES / "train.yaml").read_text("utf-8"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["command"] == ["bash", "-c"]
    (script,) = container["args"]
    for shown, here in (("/data/data.csv", f"images/all.csv {SMALL}"), ("/data/run", "run"), (" 4 ", " 2 ")):
        assert shown in script
        script = script.replace(shown, here)
    check_it_goes_on(script, tmp_path, pip="exit 0")
