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
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if BLOCK.search(path.read_text("utf-8"))], ids=lambda path: path.name
)
def test_python_blocks_run_in_order(path: Path, here: Path) -> None:
    shutil.copy(PHOTOGRAPH, "photo.jpg")
    names: dict[str, object] = {}
    for block in BLOCK.findall(path.read_text("utf-8")):
        exec(compile(block, path.name, "exec"), names)


def test_the_first_example_is_short() -> None:
    first = BLOCK.findall((ROOT / "README.md").read_text("utf-8"))[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 12


def find_anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for document in [*DOCUMENTS, *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"]:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", document.read_text("utf-8")):
            if "://" not in target:
                page = document.parent / target if target else document
                assert page.exists(), f"{document.name}: {target}"
                assert not anchor or anchor in find_anchors(page), f"{document.name}: {target}#{anchor}"


@pytest.mark.slow
def test_the_example_is_short_and_runs() -> None:
    path = ROOT / "examples" / "bring_your_own_model.py"
    assert len(path.read_text("utf-8").splitlines()) <= 40
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mAP ")
