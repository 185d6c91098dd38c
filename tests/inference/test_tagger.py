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
def test_photographs_are_tagged_right_and_grey_gets_nothing(effort: float) -> None:
    shown = [PHOTOGRAPHS / f"{name}.png" for name in ("chelsea", "coffee", "astronaut", "motorcycle_left")]
    *found, grey = Predictor.load(effort=effort)([*shown, np.full((300, 400, 3), 128, np.uint8)])
    assert [each.tags[0].label for each in found] == ["cat", "cup", "person", "motorcycle"]
    assert max(len(each.tags) for each in found) <= 6
    if effort == 1:
        assert grey.tags == ()
        # A motorcycle alone brings no rider: the whole image says so, from company; the patches do not.
        rider = found[3].get("person")
        assert rider.image_prob > rider.threshold > rider.prob
