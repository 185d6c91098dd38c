"""Each example tags a folder in its engine as a `Predictor` does."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow.dataset
import pytest
from PIL import Image, ImageOps

from pivotpatch.runtime import Predictor

ROOT = Path(__file__).parents[2]
ENGINES = {"ray_data": "ray", "daft_frame": "daft", "spark_frame": "pyspark", "hf_datasets": "datasets"}


def write_images(folder: Path) -> None:
    """Photographs in parts, one without anything to see, and a file that is no image."""
    folder.mkdir()
    with Image.open(ROOT / "docs" / "images" / "coffee.jpg") as photograph:
        for place in range(4):
            photograph.crop((100 * place, 0, 100 * place + 300, 400)).save(folder / f"{place}.jpg", quality=95)
        ImageOps.invert(photograph).save(folder / "inverted.jpg")
    Image.new("RGB", (40, 30)).save(folder / "black.jpg")
    (folder / "none.jpg").write_bytes(b"no image")


def find_engine(engine: str) -> None:
    """Skip the test where an engine is missing."""
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    if engine == "pyspark" and shutil.which("java") is None:
        pytest.skip("Spark needs Java")


def run(command: list[str], folder: Path) -> None:
    """Run a program that nothing is sent home from."""
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "DAFT_ANALYTICS_ENABLED": "0",
        "HF_HOME": str(folder / "hub"),
        "PYSPARK_PYTHON": sys.executable,
    }
    done = subprocess.run(
        command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_an_example_tags_as_a_predictor_does(name: str, tmp_path: Path) -> None:
    find_engine(ENGINES[name])
    write_images(tmp_path / "images")
    run([sys.executable, str(ROOT / "examples" / "cluster" / f"{name}.py"), "images", "tags"], tmp_path)
    rows = pyarrow.dataset.dataset(tmp_path / "tags", format="parquet").to_table().to_pylist()
    tagged = {Path(row["path"]).name: row for row in rows}
    assert len(rows) == len(tagged) == 7
    failed = tagged.pop("none.jpg")
    assert (failed["labels"], failed["probs"]) == ([], [])
    assert "is in none of the known formats" in failed["error"]
    predictor = Predictor.load(effort=0.6)
    assert any(row["labels"] for row in tagged.values())
    for image, row in tagged.items():
        tags = predictor(tmp_path / "images" / image).tags
        assert (row["labels"], row["error"]) == ([tag.label for tag in tags], None)
        assert row["probs"] == pytest.approx([tag.prob for tag in tags], abs=1e-5)
