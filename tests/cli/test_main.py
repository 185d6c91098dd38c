"""How the command starts and what it does not wait for; how it ends where nobody can read its output."""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

HEAVY = ("numpy", "torch", "torchvision", "timm", "pyarrow", "rich", "pydantic", "PIL", "huggingface_hub")
# Of verbs other than predict, and of libraries that would import them where they are installed.
UNUSED = ("accelerate", "matplotlib", "onnx", "onnxruntime", "pandas", "scipy", "sklearn", "starlette", "tensorboard")


def list_loaded(*words: str) -> set[str]:
    """The modules that a command has imported when it is done, in a fresh process."""
    tell = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"  # --help exits by itself
    code = f"{tell}; from pivotpatch.cli.main import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_imports_nothing_heavy() -> None:
    loaded = list_loaded("train", "--help")
    assert "pivotpatch.cli.usage" in loaded
    assert "pivotpatch.cli.train" not in loaded
    assert loaded.isdisjoint((*HEAVY, *UNUSED))


def test_recipes_do_not_wait_for_torch() -> None:
    loaded = list_loaded("train", "coco-resnet101-pat", "--show-config")
    assert loaded.isdisjoint(("torch", "timm"))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other libraries for threads")
@pytest.mark.parametrize(("said", "turns"), [({}, "0"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000")])
def test_threads_of_torch_sleep_while_they_wait_unless_the_user_says_otherwise(
    said: dict[str, str], turns: str
) -> None:
    code = "from pivotpatch.cli.main import main; main(); import torch"
    told = {**os.environ, **said, "OMP_DISPLAY_ENV": "VERBOSE"}  # the library tells what it took when it was loaded
    done = subprocess.run([sys.executable, "-c", code, "recipes"], env=told, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{turns}'" in done.stderr


def test_a_reader_who_goes_away_is_no_fault_and_a_full_disk_is_told() -> None:
    def list_recipes(output: IO[bytes]) -> "subprocess.CompletedProcess[bytes]":
        command = [sys.executable, "-m", "pivotpatch", "recipes"]
        return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False)

    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "wb") as closed:  # noqa: PTH123 - a descriptor has no path
        done = list_recipes(closed)
    assert (done.returncode, done.stderr) == (141, b"")
    if Path("/dev/full").exists():
        with Path("/dev/full").open("wb") as full:
            done = list_recipes(full)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert b"output: No space left on device" in done.stderr
