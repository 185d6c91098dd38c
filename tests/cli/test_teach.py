"""`pivotpatch teach` as a user calls it: a folder of images in, a checkpoint that knows a label more out."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from verb import LABELS, Errors, make_model, read_json

from pivotpatch.cli.main import main
from pivotpatch.models import load_checkpoint, save_checkpoint


def draw(folder: str, count: int, *, red: bool, seed: int) -> None:
    """Noise, or noise with a red square somewhere."""
    generator, place = np.random.default_rng(seed), Path(folder)
    place.mkdir()
    for number in range(count):
        pixels = generator.integers(0, 200, (48, 48, 3), dtype=np.uint8)
        if red:
            top, left = generator.integers(0, 24, 2)
            pixels[top : top + 24, left : left + 24] = (255, 0, 0)
        Image.fromarray(pixels).save(place / f"{number}.png")


@pytest.fixture
def mugs(here: Path) -> Path:
    draw("mugs", 6, red=True, seed=0)
    draw("others", 24, red=False, seed=1)
    save_checkpoint(make_model(), "own")
    return here


def test_a_label_is_learned_and_found_by_predict_and_tune_keeps_the_folder(mugs: Path, capsys: Errors) -> None:
    (mugs / "mugs" / "broken.png").write_bytes(b"no image")
    found = read_json(capsys, "teach", "mug", "mugs", "--model", "own", "--without", "others", "--out", "mine")
    assert (found["images"], found["without"], found["labels"]) == (6, 24, 4)
    assert list(found["not_read"]) == ["mugs/broken.png"]
    before, after = load_checkpoint("own"), load_checkpoint("mine")
    assert after.labels == (*LABELS, "mug")
    assert sorted(path.name for path in Path("mine").iterdir()) == ["model.json", "model.safetensors"]
    draw("new", 4, red=True, seed=5)
    draw("old", 4, red=False, seed=6)
    capsys.readouterr()
    probs = {}
    for folder in ("new", "old"):
        assert main(["predict", folder, "--model", "mine", "--json", "--top-k", "4"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        answers = lines if "tags" in lines[0] else lines[0]
        probs[folder] = [tag["prob"] for each in answers for tag in each["tags"] if tag["label"] == "mug"]
    assert min(probs["new"]) > max(probs["old"])
    assert before.labels == LABELS
    assert main(["teach", "mug", "mugs", "--model", "mine", "--without", "others", "--out", "more", "--again"]) == 0
    assert load_checkpoint("more").labels == after.labels


def test_the_bundled_tagger_needs_no_other_images_and_says_what_it_learned(mugs: Path, capsys: Errors) -> None:
    assert main(["teach", "red square", "mugs/0.png", "mugs/1.png", "mugs/2.png", "--out", "mine"]) == 0
    told = capsys.readouterr()
    assert "3 images are few" in told.err
    assert "red square: learned from 3 images" in told.out
    assert "81 labels" in told.out
