"""Every Python block of the README and of the docs runs as pasted, one after the other; the example runs too."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PHOTOGRAPH = ROOT / "docs" / "images" / "coffee.jpg"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


DOCUMENTS = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if BLOCK.search(path.read_text("utf-8"))
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run_in_order(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(PHOTOGRAPH, "photo.jpg")
    names: dict[str, object] = {}
    for block in BLOCK.findall(path.read_text("utf-8")):
        exec(compile(block, path.name, "exec"), names)


def test_the_documents_are_found() -> None:
    assert {"README.md", "training.md"} <= {path.name for path in DOCUMENTS}


def test_the_first_example_runs_alone_and_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(PHOTOGRAPH, "photo.jpg")
    first = BLOCK.findall((ROOT / "README.md").read_text("utf-8"))[0]
    lines = [line for line in first.splitlines() if line.strip()]
    assert len(lines) <= 12
    exec(compile(first, "README.md", "exec"), {})


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text("utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_example_is_short_and_runs() -> None:
    path = ROOT / "examples" / "bring_your_own_model.py"
    assert len(path.read_text("utf-8").splitlines()) <= 40
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mAP ")
