"""The bundled tagger: what lies in the package, and what it says of photographs."""

import socket
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import skimage.data

from pivotpatch import Predictor

FOLDER = Path(str(files("pivotpatch"))) / "tagger"
PHOTOGRAPHS = Path(str(files(skimage.data)))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the bundled tagger asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_the_package_stays_small() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == ["README.md", "model.json", "model.safetensors"]
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 10e6


@pytest.mark.parametrize("effort", [0.5, 1])
def test_photographs_are_tagged_right(effort: float) -> None:
    predictor, shown = Predictor.load(effort=effort), ("chelsea", "coffee", "astronaut", "motorcycle_left")
    predictions = predictor([PHOTOGRAPHS / f"{name}.png" for name in shown])
    assert [each.tags[0].label for each in predictions] == ["cat", "cup", "person", "motorcycle"]
    assert max(len(each.tags) for each in predictions) <= 6


def test_a_motorcycle_alone_brings_no_rider_and_grey_nothing() -> None:
    """The whole image says so, from company; the patches do not."""
    motorcycle, grey = Predictor.load()([PHOTOGRAPHS / "motorcycle_left.png", np.full((300, 400, 3), 128, np.uint8)])
    person = motorcycle.get("person")
    assert person.image_prob > person.threshold > person.prob
    assert grey.tags == ()
