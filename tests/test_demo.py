"""The demo runs to its end on a few scenes, and says of itself only what it measured."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"
ROWS = {"baseline": "1", "PAT-I": "5", "PAT-I, native": "5", "PAT-T, native": "5"}


def read_rows(text: str) -> list[tuple[str, list[str]]]:
    """Name and cells of each row of the tables, in the order of printing."""
    lines = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines())
    return [(name, cells) for name, *cells in lines if name in ROWS]


def test_the_demo_prints_its_tables_and_writes_its_pictures(tmp_path: Path) -> None:
    picture = tmp_path / "folder" / "two_scenes.png"
    done = subprocess.run(
        [sys.executable, str(DEMO), "--quick", "--seed", "0", "1", "--picture", str(picture)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = read_rows(done.stdout)
    assert [name for name, _ in rows] == 3 * list(ROWS)  # a table for each seed, and their mean
    for name, (*numbers, minutes, views) in rows:
        assert all(0 <= float(number) <= 100 for number in numbers)  # false of "nan" and "inf" too
        assert views == ROWS[name]
        assert (minutes == "-") == name.startswith("PAT-I")  # it trains nothing
    first, second, mean = ([[float(cell) for cell in cells[:6]] for _, cells in rows[at : at + 4]] for at in (0, 4, 8))
    assert first != second
    assert np.allclose(mean, np.mean([first, second], 0), atol=0.11)  # printed to one decimal
    assert "train baseline: 6 epochs" not in done.stdout
    assert "train baseline: 6 epochs" in done.stderr  # as many views as 1 epoch and 1 of PAT-T
    for path in (picture, tmp_path / "demo" / "false_alarm.png"):
        with Image.open(path) as written:
            assert written.width >= 1000
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["demo", "folder"]
