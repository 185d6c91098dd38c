"""Every other system through the verbs: trained, evaluated with PAT-I around it, audited, asked and exported."""

import json
from pathlib import Path

import pytest
from made_networks import PEER_OPTIONS as OPTIONS
from made_networks import TINY
from PIL import Image

from pivotpatch.cli.main import main
from pivotpatch.models.limits import PEERS

SCENES = "scenes:@{split}?count=24&size=64"
KINDS = {
    **{name: [f"model.head={name}", "task.kind=image"] for name in PEERS},
    **{f"{name} pat": [f"model.head={name}", "task.kind=patch"] for name in PEERS},
    "mcar": ["task.kind=crops"],
    "hcp": ["task.kind=windows"],
    "splicemix": ["task.kind=image", "mix.share=0.25", "mix.consistent=true"],
    "cpsd": ["task.kind=image", "distil.groups=1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_system_goes_through_every_verb(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = OPTIONS.get(name.removesuffix(" pat"), {})
    stated = "{" + ", ".join(f"{key} = {value}" for key, value in options.items()) + "}"
    paced = ["train.epochs=1", "train.batch_size=8", f"model.head_options={stated}", *KINDS[name]]
    train, held = (SCENES.format(split=split) for split in ("train", "val"))

    def say(*words: str) -> str:
        assert main(list(words)) == 0, words
        return capsys.readouterr().out

    assert "steps" in say("train", train, *TINY, *paced, "--out", "run", "--dry-run")
    say("train", train, *TINY, *paced, "--out", "run")
    around = ["--patch-inference"] if not name.endswith(" pat") else []
    found = json.loads(say("evaluate", "run", held, *around, "--resamples", "0", "--save", "scores.parquet", "--json"))
    assert {"image", "patch", "tde"} <= found["kinds"].keys()
    assert json.loads(say("audit", "pairs", "scores.parquet", "--json"))
    Image.new("RGB", (80, 60), (200, 30, 30)).save("photo.png")
    assert json.loads(say("predict", "photo.png", "--model", "run", "--json"))
    say("export", "run", "--out", "model.onnx")
    assert json.loads(say("predict", "photo.png", "--model", "model.onnx", "--json"))
    assert Path("model.onnx").stat().st_size > 1000
