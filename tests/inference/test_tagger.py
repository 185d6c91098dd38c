"""The bundled tagger: what lies in the package, and what it says of photographs."""

import json
import re
import socket
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import skimage.data

from pivotpatch import PatchClassifier, Predictor, load_checkpoint
from pivotpatch.cli.main import main
from pivotpatch.inference.prediction import Prediction

FOLDER = Path(str(files("pivotpatch"))) / "tagger"
PHOTOGRAPHS = Path(str(files(skimage.data)))


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.load()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the bundled tagger asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def name_tags(prediction: Prediction) -> list[str]:
    return [tag.label for tag in prediction.tags]


def test_the_package_stays_small() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == ["README.md", "model.json", "model.safetensors"]
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 10e6


def test_every_way_to_open_a_checkpoint_knows_its_name() -> None:
    networks = load_checkpoint("tagger"), PatchClassifier.from_pretrained("tagger")
    assert {type(network) for network in networks} == {PatchClassifier}
    assert {network.labels for network in networks} == {Predictor.load("tagger").labels}


def test_all_is_fitted() -> None:
    content = json.loads((FOLDER / "model.json").read_text("utf-8"))
    assert len(content["labels"]) == len(content["thresholds"]) == 80
    assert content["calibration"]["kind"] == "tde"
    assert content["adaptive"] is not None


@pytest.mark.parametrize(
    ("photograph", "label"),
    [("chelsea", "cat"), ("coffee", "cup"), ("astronaut", "person"), ("motorcycle_left", "motorcycle")],
)
@pytest.mark.parametrize("effort", [0.5, 1])
def test_photographs_are_tagged_right(photograph: str, label: str, effort: float) -> None:
    tags = name_tags(Predictor.load(effort=effort)(PHOTOGRAPHS / f"{photograph}.png"))
    assert tags[0] == label
    assert len(tags) <= 6


def test_a_motorcycle_alone_brings_no_rider(predictor: Predictor) -> None:
    """The whole image says so, from company; the patches do not."""
    (person,) = (tag for tag in predictor(PHOTOGRAPHS / "motorcycle_left.png").top(5) if tag.label == "person")
    assert person.image_prob > person.threshold > person.prob


def test_grey_is_given_no_tag(predictor: Predictor) -> None:
    assert name_tags(predictor(np.full((300, 400, 3), 128, np.uint8))) == []


def test_a_threshold_for_all_is_the_one_that_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(PHOTOGRAPHS / "horse.png"), "--threshold", "0.7"]) == 0
    assert re.search(r"the most probable is horse with 0\.[3-6]\d, given above 0\.7\n", capsys.readouterr().out)


def test_the_table_tells_the_share_of_the_pivot_patch(predictor: Predictor, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(PHOTOGRAPHS / "coffee.png")]) == 0
    shares = [int(share) for share in re.findall(r"(?:top|bottom) (?:left|right) (\d+)%", capsys.readouterr().out)]
    assert len(shares) == len(predictor(PHOTOGRAPHS / "coffee.png").tags) > 1
    assert all(25 <= share <= 100 for share in shares)
