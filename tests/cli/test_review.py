"""`pivotpatch review`: what may be named, and that the table goes through train, tune and evaluate as it is."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verb import LABELS, SMALL, make_model, read_json, write_images, write_run

import pivotpatch.cli.review as verb
from pivotpatch.cli.main import main
from pivotpatch.data.address import open_records
from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.review.desk import Desk
from pivotpatch.review.session import Entry

Errors = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def model(here: Path) -> None:
    save_checkpoint(make_model(), "model")


def review(monkeypatch: pytest.MonkeyPatch, *words: str, decide: Any = lambda desk: None) -> Desk:
    """The desk that a command would serve, after somebody has sat at it."""
    desks: list[Desk] = []

    def serve(desk: Desk, *_: object, **__: object) -> None:
        desks.append(desk)
        decide(desk)

    monkeypatch.setattr(verb, "serve_review", serve)
    assert main(["review", *words, "--port", "0", "--no-browser"]) == 0
    return desks[0]


def test_a_folder_a_table_tags_and_a_run_can_be_named(monkeypatch: pytest.MonkeyPatch, capsys: Errors) -> None:
    Path("photos").mkdir()
    monkeypatch.chdir("photos")
    write_images("train", 20)
    monkeypatch.chdir("..")
    desk = review(monkeypatch, "photos", "--model", "model")
    assert sorted(desk.pile.names) == sorted(f"photos/train{place}.png" for place in range(20))
    assert np.isnan(desk.pile.doubts.given).all()
    assert (desk.session.labels, str(desk.session.out)) == (LABELS, "review.csv")

    desk = review(monkeypatch, "photos/train.csv", "--model", "model", "--order", "source")
    np.testing.assert_array_equal(desk.pile.doubts.given, open_records("photos/train.csv").target().numpy())
    assert desk.pile.order.tolist() == list(range(20))

    for suffix, options in ((".csv", []), (".jsonl", ["--all-probs"]), (".parquet", ["--all-probs"])):
        tags = f"tags{suffix}"
        assert main(["predict", "photos", "--model", "model", "--out", tags, "--top-k", "2", *options]) == 0
        found = review(monkeypatch, tags)  # the model is known from the summary
        assert np.isnan(found.pile.doubts.probs).sum() == (0 if options else 20)
        expected = desk.pile.doubts.probs[[desk.pile.names.index(name) for name in found.pile.names]]
        there = ~np.isnan(found.pile.doubts.probs)
        np.testing.assert_allclose(found.pile.doubts.probs[there], expected[there], atol=1e-3)

    write_run("run", make_model(), "data.train=table:photos/train.csv", "data.val_fraction=0.25")
    held = review(monkeypatch, "run", "--labels", "dog, wolf")
    assert len(held.pile.names) == 5
    assert held.session.labels == ("dog", "wolf")
    assert np.isnan(held.pile.doubts.probs[:, 1]).all()  # the model knows no wolf


def test_unknown_stays_unknown_from_the_page_to_the_metrics(monkeypatch: pytest.MonkeyPatch, capsys: Errors) -> None:
    """One label is followed: a dog that is corrected, one that nobody can tell, images that nobody looked at."""
    write_images("train", 40)
    before = open_records("train.csv").target().numpy()
    names = [f"train{place}.png" for place in range(40)]
    dog = LABELS.index("dog")
    flipped = {names[place]: int(1 - before[place, dog]) for place in range(12)}

    def decide(desk: Desk) -> None:
        for number, (name, state) in enumerate(flipped.items()):
            desk.decide("tab", Entry(str(number), "ann", "", {name: {"dog": state, "cat": int(number % 2)}}))
        desk.decide("tab", Entry("last", "ann", "", {names[12]: {"dog": -1, "fish": 1}}))

    review(monkeypatch, "train.csv", "--model", "model", decide=decide)
    table = open_records("review.csv")
    assert table.labels.names == LABELS
    known = table.target().numpy()
    assert known.shape == (13, 3)
    assert known[:12, dog].tolist() == [*flipped.values()]
    assert np.isnan(known[12]).tolist() == [True, True, False]
    assert np.isnan(known[:12, 2]).all()  # nobody looked for fish

    found = read_json(capsys, "evaluate", "model", "review.csv", "--per-label", "--resamples", "0", "--workers", "0")
    assert found["pictures"] == 13
    text = json.dumps(found)
    assert f'"positives": [{int(np.nansum(known[:, 0]))}, {sum(flipped.values())}, 1]' in text
    words = ["train.csv", "--dry-run", *SMALL, "data.val_fraction=0", "--corrections", "review.csv"]
    capsys.readouterr()
    assert main(["train", *words, "--json"]) == 0
    captured = capsys.readouterr()
    assert "review.csv: " in captured.err
    assert json.loads(captured.out)["pictures"] == 40
    assert main(["tune", "model", "review.csv", "--out", "tuned", "--mixing", "keep", "--calibration", "platt"]) == 0


@pytest.mark.slow
def test_a_service_that_is_told_to_end_gives_its_table_back() -> None:
    write_images("train", 3)
    words = [
        sys.executable,
        "-m",
        "pivotpatch",
        "review",
        "train.csv",
        "--model",
        "model",
        "--port",
        "0",
        "--no-browser",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("http"))
        assert Path(".review.csv.lock").exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not Path(".review.csv.lock").exists()
