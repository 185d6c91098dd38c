"""Images and a run in the folder of a test."""

from pathlib import Path

import pytest
from verb import LABELS, make_model, write_images, write_run


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
