"""The bundled tagger: what lies in the package, and what it says of photographs."""

import socket
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import skimage.data

from pivotpatch import Predictor
from pivotpatch.inference.engine import open_engine
from pivotpatch.runtime.checks import PREFERENCES
from pivotpatch.runtime.decoding import ImageSource, decode_image
from pivotpatch.runtime.engine import LookEngine
from pivotpatch.runtime.predictor import TAGGER

FOLDER = Path(str(files("pivotpatch"))) / "tagger"
PAGE = FOLDER.parent / "app" / "page"
PHOTOGRAPHS = Path(str(files(skimage.data)))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the bundled tagger asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("effort", [0.5, 1])
def test_photographs_are_tagged_right_and_grey_gets_nothing(effort: float) -> None:
    shown = [PHOTOGRAPHS / f"{name}.png" for name in ("chelsea", "coffee", "astronaut", "motorcycle_left")]
    predictor = Predictor.load(effort=effort)
    *found, grey = predictor([*shown, np.full((300, 400, 3), 128, np.uint8)])
    assert [each.tags[0].label for each in found] == ["cat", "cup", "person", "motorcycle"]
    assert max(len(each.tags) for each in found) <= 6
    if effort == 1:
        assert grey.tags == ()
        # A motorcycle alone brings no rider, and its patches say so louder than the whole image, with its company.
        rider = found[3].get("person")
        assert predictor.engine.preferences["recall"][0] > rider.image_prob > rider.prob


def test_few_wrong_tags_are_the_default_and_preferences_are_in_order() -> None:
    engine = Predictor.load().engine
    precision, balance, recall = (np.array(engine.preferences[name]) for name in ("precision", "balance", "recall"))
    assert engine.thresholds == engine.preferences["precision"]
    assert (precision > balance).all()
    assert (balance > recall).all()
    counts = [len(Predictor.load(prefer=name)(PHOTOGRAPHS / "coffee.png").tags) for name in PREFERENCES]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@pytest.mark.parametrize("effort", [0, 0.5, 1])
def test_onnx_runtime_says_what_torch_says(effort: float) -> None:
    """Probabilities within 0.01 and the same tags."""
    found, expected = Predictor.load(effort=effort).engine, open_engine("tagger", device="cpu", effort=effort)
    assert isinstance(found, LookEngine)
    assert found.digest() == expected.digest()
    assert TAGGER.stat().st_size < 1.2e6  # its weights are those of the checkpoint beside it
    for field in ("labels", "thresholds", "preferences", "picture_size", "grid", "overlap", "effort"):
        assert getattr(found, field) == getattr(expected, field)
    side = found.picture_size
    paths = [*PAGE.glob("*.jpg"), *(PHOTOGRAPHS / f"{name}.png" for name in ("chelsea", "coffee", "motorcycle_left"))]
    noise = np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    sources: list[ImageSource] = [*paths, noise]
    images = np.stack([decode_image(source, size=(side, side)) for source in sources])
    ours, theirs = found.ask(images), expected.ask(images)
    for name, value in theirs._asdict().items():
        if value is None:
            assert getattr(ours, name) is None
        else:
            np.testing.assert_allclose(getattr(ours, name), value, rtol=0, atol=0.01, err_msg=name)
    limits = np.array(found.thresholds)
    assert ((ours.probs > limits) == (theirs.probs > limits)).all()
    assert (theirs.probs > limits).sum() >= len(paths)
