"""What docs/cluster.md shows for training on clusters, run on this machine by stand-ins for what only a cluster has."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from run_process import read_step, write_images

DOCUMENT = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text("utf-8")
SMALL = "model.backbone=test_resnet model.pretrained=false model.image_size=32 train.epochs=1 train.batch_size=8"
SMALL += " data.workers=0 output.trackers=[]"


def find_block(language: str, beginning: str) -> str:
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if block.startswith(beginning))


def run(script: str, folder: Path, **programs: str) -> None:
    """Run a script where some programs are replaced by other scripts."""
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
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_two_machines_of_slurm_train_together(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = find_block("bash", "#!/bin/bash\n#SBATCH")
    for shown, here in (("data.csv", f"images/all.csv {SMALL}"), ("/shared", "."), ("29500", str(port))):
        assert shown in script
        script = script.replace(shown, here)
    script = script.replace("--nproc-per-node 4", "--nproc-per-node 1")
    both = '"$@" & "$@"; first=$?; wait $! && exit $first'  # two machines that are this one
    run(script, tmp_path, scontrol="printf '127.0.0.1\\nother\\n'", srun=both)
    assert (tmp_path / "run" / "best" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_job_of_kubernetes_trains_and_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    job = yaml.safe_load(find_block("yaml", "apiVersion"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["command"] == ["bash", "-c"]
    (script,) = container["args"]
    for shown, here in (("/data/data.csv", f"images/all.csv {SMALL}"), ("/data/run", "run"), (" 4 ", " 2 ")):
        assert shown in script
        script = script.replace(shown, here)
    run(script, tmp_path, pip="exit 0")
    weights, step = (tmp_path / "run" / "best" / "model.safetensors").read_bytes(), read_step(tmp_path / "run")
    run(script, tmp_path, pip="exit 0")  # finds a run, which is at its end
    assert (tmp_path / "run" / "best" / "model.safetensors").read_bytes() == weights
    assert read_step(tmp_path / "run") == step
