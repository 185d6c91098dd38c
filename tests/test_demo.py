"""The demo runs to its end on a few scenes, and says of itself only what it measured."""

import subprocess
import sys
from pathlib import Path

from PIL import Image

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def test_the_demo_prints_its_table_and_writes_its_pictures(tmp_path: Path) -> None:
    picture = tmp_path / "folder" / "two_scenes.png"
    done = subprocess.run(
        [sys.executable, str(DEMO), "--quick", "--picture", str(picture)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert [(name, passes) for name, *_, passes in cells] == [
        ("plain network", "1"),
        ("PAT-I", "5"),
        ("PAT-I, native", "5"),
    ]
    for _, *numbers, _ in cells:
        assert len(numbers) == 4
        assert all(0 <= float(number) <= 100 for number in numbers)  # false of "nan" and "inf" too
    assert "train" in done.stderr
    assert "train " not in done.stdout
    for path in (picture, tmp_path / "demo" / "false_alarm.png"):
        with Image.open(path) as written:
            assert written.width >= 1000
