"""`pivotpatch train` that begins with a trained network tells what that knows."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from together import run_together, run_verb

from pivotpatch.cli.main import main
from pivotpatch.models.checkpoint import load_checkpoint

pytestmark = pytest.mark.slow

SMALL = ("data.workers=0", "data.val_fraction=0", "train.epochs=1", "train.batch_size=4", "output.trackers=[]")
LINE = "starting from a network that knows 1 of 2 labels: cup; new: my mug"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Four pictures of a cup or a mug, by the name of their table."""
    monkeypatch.chdir(tmp_path)
    for place in range(4):
        Image.fromarray(np.full((40, 40, 3), 60 * place, dtype=np.uint8)).save(f"{place}.png")
    Path("photos.csv").write_text("image,labels\n0.png,cup\n1.png,my mug\n2.png,cup|my mug\n3.png,\n")
    return "photos.csv"


@pytest.mark.parametrize("options", [["--dry-run"], ["--out", "run"]])
def test_it_is_told_which_labels_the_tagger_knows(
    options: list[str], table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "tagger", table, *SMALL, *options]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines().count(LINE) == 1
    assert LINE not in captured.out
    if "--out" in options:
        assert load_checkpoint("run/best").labels == ("cup", "my mug")
        again = [f"data.train=table:{table}", "model.start_from=run/best", *SMALL, "--dry-run"]
        assert main(["train", *again]) == 0
        assert "starting from" not in capsys.readouterr().err


def test_two_processes_tell_it_once(table: str) -> None:
    first, second = run_together(run_verb, ["train", "tagger", table, *SMALL, "--dry-run"])
    assert (first.status, second.status) == (0, 0)
    assert first.err.count(LINE) == 1
    assert LINE not in second.err
