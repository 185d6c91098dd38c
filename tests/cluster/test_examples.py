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


def test_every_example_is_short_and_has_an_engine() -> None:
    found = {path.stem: path.read_text("utf-8") for path in (ROOT / "examples" / "cluster").glob("*.py")}
    assert set(found) == set(ENGINES)
    for name, text in found.items():
        lines = [line for line in text.splitlines() if line and not line.startswith(('"""', "import", "from"))]
        assert len(lines) <= 12, name
    shown = (ROOT / "docs" / "cluster.md").read_text("utf-8").partition("```py\n")[2].partition("```")[0]
    assert found["ray_data"].endswith("\n\n" + shown)


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


BLOCKS = """
import sys, ray.data
from pivotpatch.cluster import PatchTagger
rows = ray.data.from_items([{"path": path} for path in sys.argv[1:]], override_num_blocks=len(sys.argv) - 1)
for kind in ("numpy", "pyarrow"):
    given, one = {"columns": "path", "effort": 0}, ray.data.ActorPoolStrategy(size=1)
    tagged = rows.map_batches(PatchTagger, fn_constructor_kwargs=given, batch_size=1, batch_format=kind, compute=one)
    tagged.write_parquet(kind)
"""


@pytest.mark.slow
def test_what_ray_writes_by_blocks_is_one_data_set(tmp_path: Path) -> None:
    """A block without tags, one without errors and one with neither would each have columns of no type."""
    find_engine("ray")
    write_images(tmp_path / "images")
    names = [str(tmp_path / "images" / name) for name in ("none.jpg", "black.jpg", "2.jpg")]
    run([sys.executable, "-c", BLOCKS, *names], tmp_path)
    for kind in ("numpy", "pyarrow"):
        written = pyarrow.dataset.dataset(tmp_path / kind, format="parquet")
        schemas = [part.physical_schema for part in written.get_fragments()]
        assert len(schemas) == 3
        assert {tuple(map(str, schema.types)) for schema in schemas} == {
            ("string", "list<element: string>", "list<element: float>", "string")
        }
        rows = {Path(row["path"]).stem: row for row in written.to_table().to_pylist()}
        assert [bool(rows[name]["labels"]) for name in ("none", "black", "2")] == [False, False, True]
        assert [rows[name]["error"] is None for name in ("none", "black", "2")] == [False, True, True]
