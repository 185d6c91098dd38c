"""The base install: what `[train]` brings cannot be imported, and everything about tags works."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

COFFEE = Path(__file__).parents[2] / "docs" / "images" / "coffee.jpg"
MISSING = ("torch", "torchvision", "timm", "pydantic", "pyarrow", "matplotlib", "sklearn", "jinja2", "safetensors")
START = f"""
import sys
for name in {MISSING}:
    sys.modules[name] = None
from pivotpatch.cli.main import main
"""
TAG = """
from pivotpatch import Predictor
prediction = Predictor.load()(sys.argv[1])
print(prediction.tags[0].label)
for words in (["--json"], ["--explain", "why.png"], ["--out", "t.jsonl"], ["--out", "t.csv", "--effort", "0"]):
    assert main(["predict", sys.argv[1], *words]) == 0
"""


def run(code: str, *words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "error", "-c", START + code, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_an_image_is_tagged_in_every_way(tmp_path: Path) -> None:
    ran = run(TAG, str(COFFEE), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    label, told, *table = ran.stdout.splitlines()
    assert (label, json.loads(told)["tags"][0]["label"]) == ("cup", "cup")
    assert table[0].startswith(str(COFFEE))
    assert any(line.split()[:1] == ["cup"] for line in table)
    with Image.open(tmp_path / "why.png") as figure:
        assert figure.format == "PNG"
    assert json.loads((tmp_path / "t.jsonl").read_text())["labels"][0] == "cup"
    with (tmp_path / "t.csv").open(newline="") as file:
        assert [row["labels"].split("|")[0] for row in csv.DictReader(file)] == ["cup"]


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
    ran = run("sys.exit(main(sys.argv[1:]))", "predict", str(COFFEE), *words, folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    (line,) = ran.stderr.splitlines()
    name, extra = missing.split()
    assert line.startswith(f"pivotpatch: {name}: is not installed; pip install ")
    assert line.endswith(f"[{extra}]'")
    assert list(tmp_path.iterdir()) == []
