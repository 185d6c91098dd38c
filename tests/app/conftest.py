"""One network and one server for all tests of the page and the endpoint."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from app_process import LABELS, AppProcess
from PIL import Image

from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained network; with its fitted thresholds it gives all labels but the last, whatever it sees."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = PatchClassifier("test_resnet", LABELS, image_size=64)
    network.thresholds = (*(0.1,) * (len(LABELS) - 1), 0.9)
    folder = tmp_path_factory.mktemp("app") / "model"
    save_checkpoint(network, folder)
    return folder


@pytest.fixture(scope="session")
def app(model: Path) -> Iterator[AppProcess]:
    """The real thing, as the command line starts it."""
    process = AppProcess(model, model.parent / "asked.txt")
    yield process
    process.stop()


@pytest.fixture(scope="session")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Much larger than the network's pictures, and turned by its EXIF data."""
    path = tmp_path_factory.mktemp("photo") / "photo.jpg"
    exif = Image.Exif()
    exif[0x0112] = 8
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((801, 600)).save(path, exif=exif)
    return path
