"""The example of direct effects runs to its end on a few scenes."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[1] / "examples" / "direct_effect.py"


def test_it_prints_a_row_for_each_network_split_and_kind_and_draws_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--quick"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert {tuple(row[:4]) for row in cells} == {
        (network, split, among, kind)
        for network in ("baseline and PAT-I on it", "PAT-T")
        for split in ("test-same", "test-removed", "test-broken")
        for among in ("objects", "scenes")
        for kind in ("image", "patch", "tde")
    }
    for *_, correlation, _ in cells:
        assert -1 <= float(correlation.partition(" ")[0]) <= 1
    with Image.open(tmp_path / "demo" / "direct_effect" / "quick" / "effects.png") as picture:
        assert picture.width >= 1000
