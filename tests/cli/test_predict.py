import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from together import run_together, run_verb
from verb import read_refusal

from pivotpatch.cli.main import main
from pivotpatch.inference.engine import open_engine
from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier

LABELS = ("cat", "dog", "[red]hat")
COUNT = 20
Errors = pytest.CaptureFixture[str]


@pytest.fixture
def here(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 20 pictures and a network that was never trained."""
    monkeypatch.setenv("COLUMNS", "80")
    generator = np.random.default_rng(0)
    Path("photos").mkdir()
    for place in range(COUNT):
        Image.fromarray(generator.integers(0, 256, (80, 60, 3), dtype=np.uint8)).save(f"photos/{place:02d}.png")
    torch.manual_seed(0)
    save_checkpoint(PatchClassifier("test_resnet", LABELS, image_size=32), "model")
    return here


def predict(capsys: Errors, *words: str) -> str:
    assert main(["predict", "--model", "model", *words]) == 0
    return capsys.readouterr().out


def fail(capsys: Errors, *words: str) -> str:
    return read_refusal(capsys, "predict", "--model", "model", *words)


def test_paths_come_from_stdin(here: Path, capsys: Errors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"photos/04.png\nphotos/02.png\n")))
    said = [json.loads(line)["picture"] for line in predict(capsys, "-", "photos/09.png", "--json").splitlines()]
    assert said == ["photos/04.png", "photos/02.png", "photos/09.png"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    assert fail(capsys, "-") == "predict: no image is named; name files, folders or patterns"


def test_pictures_are_explained(here: Path, capsys: Errors) -> None:
    Image.new("RGB", (1, 1)).save("one.png")
    (said,) = predict(capsys, "one.png", "--json", "--top-k", "2", "--explain", "why/one.png").splitlines()
    assert [tag["box"] for tag in json.loads(said)["tags"]] == [[0, 0, 1, 1]] * 2
    long = Path("é" * 125 + ".png")  # 254 of the 255 bytes that a disk allows
    long.write_bytes(Path("one.png").read_bytes())
    predict(capsys, "photos/01.png", str(long), "--explain", "why")
    assert sorted(path.name for path in Path("why").iterdir()) == ["0001-01.png", f"0002-{'é' * 100}.png", "one.png"]


def test_what_cannot_be_read_is_told_and_passed_over(here: Path, capsys: Errors) -> None:
    Path("photos/05.png").write_bytes(b"no picture")
    assert main(["predict", "--model", "model", "photos", "--json"]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == COUNT - 1
    assert said.err.splitlines()[0].startswith("not read: photos/05.png: is in none of the known formats")
    assert said.err.splitlines()[-1] == f"1 of {COUNT} images could not be read"
    assert fail(capsys, "photos/05.png").startswith("photos/05.png: is in none of the known formats")
    assert main(["predict", "--model", "model", "photos", "--on-error", "error"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("pivotpatch: photos/05.png: ")


def test_another_network_of_the_same_name_does_not_go_on(here: Path, capsys: Errors) -> None:
    predict(capsys, "photos", "--out", "tags.csv")
    Path("tags.csv.parts").mkdir()
    settings = json.loads(Path("tags.csv.summary.json").read_text("utf-8"))["settings"]
    Path("tags.csv").unlink()
    Path("tags.csv.parts/settings.json").write_text(json.dumps(settings))
    save_checkpoint(PatchClassifier("test_resnet", LABELS, image_size=32), "model", overwrite=True)
    assert fail(capsys, "photos", "--out", "tags.csv").startswith("tags.csv.parts: it was begun with other weights (")


def test_one_network_has_one_digest_however_a_device_wants_it(here: Path) -> None:
    one, other = (open_engine("model", device="cpu", fold=fold) for fold in (True, False))
    assert one.digest() == other.digest()


def read_rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


@pytest.mark.slow
def test_processes_of_a_launcher_share_the_work(here: Path, capsys: Errors) -> None:
    words = [str(here / "photos"), "--top-k", "1", "--batch-size", "3", "--workers", "0"]
    both = ["predict", "--model", str(here / "model"), *words, "--out"]
    said = run_together(run_verb, [*both, str(here / "both.jsonl")])
    assert [each.status for each in said] == [0, 0], said
    predict(capsys, *words, "--out", "one.jsonl")
    assert read_rows("both.jsonl") == read_rows("one.jsonl")


@pytest.mark.slow
def test_an_interrupt_keeps_what_is_done(here: Path, capsys: Errors) -> None:
    listed = Path("list.txt")
    listed.write_text("photos/01.png\n" * 20_000)
    with listed.open() as stdin:
        command = [sys.executable, "-m", "pivotpatch", "predict", "--model", "model", "-", "--out", "tags.csv"]
        process = subprocess.Popen(
            [*command, "--workers", "0", "--batch-size", "2"], stdin=stdin, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        while not process.stderr.readline().startswith(b"tag: "):
            pass
        process.send_signal(signal.SIGINT)
        told = process.communicate()[1].decode()
    assert process.returncode == 128 + signal.SIGINT
    assert told.splitlines()[-1] == "stopped by SIGINT; the same command goes on"
    (part,) = Path("tags.csv.parts").glob("0*.jsonl")
    assert 0 < len(part.read_text().splitlines()) < 20_000
    assert not Path("tags.csv").exists()
