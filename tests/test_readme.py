"""Every Python block of the README runs as pasted, one after the other; the example runs too."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BLOCK.findall((ROOT / "README.md").read_text("utf-8"))
    assert len(blocks) >= 3
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_the_first_example_runs_alone_and_is_short() -> None:
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
