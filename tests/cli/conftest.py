"""A folder of its own for each test that leaves files where it runs."""

from pathlib import Path

import pytest
from tune_command import make_run, write_pictures


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def here_with_run(here: Path) -> Path:
    """A run that held out 24 of its 60 pictures, and 30 other ones."""
    write_pictures("train", 60, seed=0)
    write_pictures("val", 30, seed=1)
    make_run("run")
    return here
