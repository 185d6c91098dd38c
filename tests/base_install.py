"""Try the base install as a user has it: numpy, Pillow, onnxruntime and rich, no torch. No test framework is needed.

    python -m venv base && base/bin/pip install . && base/bin/python tests/base_install.py [IMAGE]

It tags an image in every form, tags a folder to files, and measures the environment.
"""

import csv
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "coffee.jpg"
ABSENT = ("torch", "torchvision", "timm", "pydantic", "pyarrow", "matplotlib", "sklearn")
MOST = 250_000_000  # bytes of the installed packages, pip's own left out
IMAGES = 20


def main() -> None:
    """Run every check; the first that fails ends it."""
    image = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGE
    present = [name for name in ABSENT if find_spec(name)]
    assert not present, f"{present} should not come with the base install"
    size = measure_packages()
    assert size <= MOST, f"{size / 1e6:.0f} MB are installed"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check_forms(image, folder)
        check_python(image)
        check_missing_extras(image)
        check_bulk(image, folder)
    print(f"base install: {size / 1e6:.0f} MB, all forms of predict work without {', '.join(ABSENT)}")


def measure_packages() -> int:
    """Bytes of what is installed beside pip and setuptools."""
    place = Path(sysconfig.get_path("purelib"))
    own = [each for each in place.iterdir() if not each.name.startswith(("pip", "setuptools"))]
    own += [each for each in place.iterdir() if each.name.startswith("pivotpatch")]
    return sum(file.stat().st_size for each in set(own) for file in [each, *each.rglob("*")] if file.is_file())


def call(*words: object, status: int = 0) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "pivotpatch", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout if status == 0 else done.stderr


def check_forms(image: Path, folder: Path) -> None:
    """Table, JSON, figure, another effort, sidecars."""
    assert "cup" in call("predict", image)
    told = json.loads(call("predict", image, "--json"))
    assert told["tags"][0]["label"] == "cup", told
    call("predict", image, "--explain", folder / "why.png", "--effort", "0.5")
    assert (folder / "why.png").read_bytes().startswith(b"\x89PNG")
    copy = Path(shutil.copy(image, folder / "photo.jpg"))
    before = copy.read_bytes()
    call("predict", copy, "--write", "xmp")
    assert "<rdf:li>cup</rdf:li>" in (folder / "photo.jpg.xmp").read_text("utf-8")
    assert copy.read_bytes() == before, "originals are never touched"


def check_python(image: Path) -> None:
    """The library imports nothing of torch."""
    lines = f"""
import sys
from pivotpatch import Prediction, Predictor
predictor = Predictor.load()
good, bad = predictor([{str(image)!r}, "no-such-file.jpg"], on_error="skip")
assert isinstance(good, Prediction) and good.tags[0].label == "cup" and isinstance(bad, ValueError)
assert not {{name.partition(".")[0] for name in sys.modules}} & set({ABSENT!r})
"""
    subprocess.run([sys.executable, "-c", lines], check=True, timeout=100)


def check_missing_extras(image: Path) -> None:
    """What needs more is one line that names the extra."""
    for extra, words in {
        "train": ("evaluate", "tagger", "scenes:"),
        "parquet": ("predict", image, "--out", "tags.parquet"),
        "app": ("app",),
        "onnx": ("export", "tagger"),
    }.items():
        told = call(*words, status=1)
        assert told.count("\n") == 1, told
        assert "is not installed; pip install" in told, told
        assert f"[{extra}]" in told, told


def check_bulk(image: Path, folder: Path) -> None:
    """Bulk tagging passes over what is no image; CSV and JSONL agree."""
    images, out = folder / "images", folder / "tags.jsonl"
    images.mkdir()
    for number in range(IMAGES):
        shutil.copy(image, images / f"{number:04d}.jpg")
    (images / "0007.jpg").write_bytes(b"no image")
    for name in ("tags.jsonl", "tags.csv"):
        call("predict", images, "--effort", "0", "--batch-size", "4", "--out", folder / name)
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert len(rows) == len({row["picture"] for row in rows}) == IMAGES - 1, len(rows)
    with (folder / "tags.csv").open(encoding="utf-8", newline="") as file:
        assert [row["labels"] for row in csv.DictReader(file)] == ["|".join(row["labels"]) for row in rows]


if __name__ == "__main__":
    main()
