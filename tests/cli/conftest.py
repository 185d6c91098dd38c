"""A folder of its own for each test that leaves files where it runs."""

from pathlib import Path

import pytest
from verb import LABELS, make_model, write_images, write_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def photos(here: Path) -> Path:
    """21 images with one label more than the models know."""
    write_images("photos", 21, labels=(*LABELS, "horse"))
    return here


@pytest.fixture
def here_with_run(here: Path) -> Path:
    """A run that held out 24 of its 60 images, and 30 other ones."""
    write_images("train", 60)
    write_images("val", 30, seed=1)
    write_run("run", make_model(), "data.val_fraction=0.4")
    return here
