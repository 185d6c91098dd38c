"""A review of drawn images with an engine whose answers are known."""

from collections.abc import Callable
from pathlib import Path

import pytest
from made_engines import Means
from PIL import Image

from pivotpatch.review.pile import Pile, Source, make_pile
from pivotpatch.runtime.predictor import Predictor

COLOURS = {"a.png": (130, 5, 5), "b.png": (250, 126, 5), "c.png": (5, 5, 250), "d.png": (250, 250, 5)}
"""Doubtful about red; about green; two that are clear."""


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for name, colour in COLOURS.items():
        Image.new("RGB", (40, 30), colour).save(tmp_path / "photos" / name)
    return tmp_path / "photos"


@pytest.fixture
def pile_up(photos: Path) -> Callable[..., Pile]:
    """The pile of those images for a table beside their folder."""

    def pile(labels: tuple[str, ...] = ("red", "green", "blue")) -> Pile:
        source, told = Source("photos", sorted(photos.iterdir())), list[str]()
        predictor = Predictor(Means(thresholds=(0.5, 0.5, 0.5), grid=2))
        return make_pile(source, predictor, labels, out=photos.parent / "review.csv", tell=told.append)

    return pile
