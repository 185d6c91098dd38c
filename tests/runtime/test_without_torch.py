"""The base install: what `[train]` brings cannot be imported, and everything about tags works."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

COFFEE = Path(__file__).parents[2] / "docs" / "images" / "coffee.jpg"
MISSING = ("torch", "torchvision", "timm", "pydantic", "pyarrow", "matplotlib", "sklearn", "jinja2", "safetensors")
START = f"""
import sys
for name in {MISSING}:
    sys.modules[name] = None
from pivotpatch.cli.main import main
"""
LIST = """
import atexit, sys
atexit.register(lambda: print(*(name for name in sys.modules if sys.modules[name]), file=sys.stderr))
"""
MAIN = "sys.exit(main(sys.argv[1:]))"


def run(code: str, *words: str, folder: Path, before: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "error", "-c", before + START + code, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["--out", "tags.parquet"], "pyarrow parquet"),
        (["--model", "."], "torch train"),
        (["--model", "hub:owner/name"], "torch hub"),
        (["--model", "transformers:owner/name"], "torch transformers"),
    ],
)
def test_what_needs_an_extra_names_it_in_one_line(words: list[str], missing: str, tmp_path: Path) -> None:
    ran = run(MAIN, "predict", str(COFFEE), *words, folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    (line,) = ran.stderr.splitlines()
    name, extra = missing.split()
    assert line.startswith(f"pivotpatch: {name}: is not installed; pip install ")
    assert line.endswith(f"[{extra}]'")
    assert list(tmp_path.iterdir()) == []


SLOW_TO_IMPORT = {"numpy", "PIL", "rich", "onnxruntime"}


@pytest.mark.parametrize(
    ("words", "status", "unused"),
    [
        (("predict", "none.jpg"), 1, SLOW_TO_IMPORT),
        (("predict", str(COFFEE), "--write", "iptc"), 2, SLOW_TO_IMPORT),
        (("predict", str(COFFEE), "--model", "none"), 1, SLOW_TO_IMPORT),
        (("watch", "none"), 1, SLOW_TO_IMPORT),
        (("predict", str(COFFEE), "--json"), 0, {"rich", "scipy", "pandas", "onnx", "starlette"}),
    ],
)
def test_nothing_unneeded_is_imported(words: tuple[str, ...], status: int, unused: set[str], tmp_path: Path) -> None:
    """A mistake is told in a moment, and a photo is tagged without what only a screen or training needs."""
    ran = run(MAIN, *words, folder=tmp_path, before=LIST)
    assert ran.returncode == status, ran.stderr
    assert unused.isdisjoint(name.partition(".")[0] for name in ran.stderr.splitlines()[-1].split())


@pytest.mark.slow
def test_the_app_needs_nothing_that_training_needs() -> None:
    pytest.importorskip("starlette")
    command = [sys.executable, "-c", START + MAIN, "app", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        try:
            with urllib.request.urlopen(f"{address}/api/predict", COFFEE.read_bytes(), timeout=60) as answer:
                assert json.load(answer)["tags"][0]["label"] == "cup"
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert b"<html" in answer.read()
        finally:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0
