"""The demo runs to its end on a few scenes, and says of itself only what it measured."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"
ROWS = ("plain model", "PAT-I around it", "PAT-T")


def test_the_demo_tags_photographs_prints_its_table_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "folder" / "two_scenes.png"
    command = [sys.executable, str(DEMO), "--quick", "--picture", str(picture)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.search(r"^cat\.jpg: cat \d", done.stdout, re.MULTILINE)
    rows = {}
    for line in done.stdout.splitlines():
        name, *cells = re.split(r"\s{2,}", line.strip())
        if name in ROWS:
            rows[name] = [float(cell) for cell in cells]
    assert tuple(rows) == ROWS
    assert all(0 <= number <= 100 for numbers in rows.values() for number in numbers)  # false of "nan" and "inf" too
    for name in ROWS[1:]:
        told = re.search(rf"^{name} against the plain model: (.*)$", done.stdout, re.MULTILINE)
        assert told
        changes = [float(change) for change in re.findall(r"[+-]\d+\.\d", told[1])]
        differences = [one - other for one, other in zip(rows[name], rows["plain model"], strict=True)]
        assert changes == pytest.approx(differences, abs=0.11)  # both are printed to one decimal
    assert "train the plain model: 5 epochs" in done.stderr  # as many views as an epoch of PAT-T
    assert "features:" not in done.stderr  # what is trained further without a GPU would be frozen unless told otherwise
    for path in (picture, tmp_path / "demo" / "coffee.png"):
        with Image.open(path) as written:
            assert written.width >= 500
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
