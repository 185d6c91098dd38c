"""A network is judged on the labels that it and the pictures have in common."""

import json
from pathlib import Path

import pytest
import torch
from evaluate_command import Errors, evaluate, make_run, save, score, write_photos
from together import run_together, run_verb

from pivotpatch.cli.main import main
from pivotpatch.core.calibration import Calibration
from pivotpatch.inference.score_file import read_scores
from pivotpatch.models.checkpoint import save_checkpoint


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of pictures and their table."""
    monkeypatch.chdir(tmp_path)
    write_photos()
    return tmp_path


def forget(label: str) -> None:
    """Write a table of the same pictures that does not know a label."""
    rows = [row.split(",") for row in Path("photos.csv").read_text().splitlines()[1:]]
    kept = [f"{name},{'|'.join(each for each in labels.split('|') if each != label)}\n" for name, labels in rows]
    Path("few.csv").write_text("image,labels\n" + "".join(kept))


def test_the_labels_that_network_and_pictures_have_in_common_are_judged(here: Path, capsys: Errors) -> None:
    model, words = make_run(), ("--workers", "0", "--resamples", "20")
    whole = evaluate(capsys, "run", "photos.csv", *words, "--save", "whole.npz", "--keep-patches")
    forget("dog")
    command = ["evaluate", "run", "few.csv", *words, "--json", "--save", "few.npz", "--keep-patches"]
    assert main(command) == 0
    captured = capsys.readouterr()
    line = "judging 2 of 3 labels: cat, fish; not in table:few.csv: dog; not known to the network: horse"
    assert captured.err.splitlines() == [line, "score: 1 of 1", "wrote few.npz"]
    found = json.loads(captured.out)
    assert found["labels"] == ["cat", "fish"]
    for kind, each in found["kinds"].items():
        expected = whole["kinds"][kind]
        assert each["precision"]["per_label"] == [expected["precision"]["per_label"][place] for place in (0, 2)]
        assert each["decided"]["recall"] == [expected["decided"]["recall"][place] for place in (0, 2)]
    assert main(["evaluate", "whole.npz", "few.csv", "--resamples", "20", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [line.replace("the network", "whole.npz")]
    again = json.loads(captured.out)
    assert {**again, "evaluated": found["evaluated"]} == found
    kept, expected = read_scores("few.npz").patch_logits, score(model).patch_logits
    assert expected is not None
    torch.testing.assert_close(kept, expected[..., [0, 2]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", ["fitted", "prior", "prior:train.csv"])
def test_rules_of_a_network_decide_about_the_labels_that_are_judged(policy: str, here: Path, capsys: Errors) -> None:
    model = make_run()
    model.thresholds = (0.4, 0.45, 0.6)
    model.calibration = Calibration("tde", "platt", (3.0, 2.0, 1.0), (0.1, 0.0, -0.1))
    save_checkpoint(model, "run/best", overwrite=True)
    forget("cat")
    words = ("--workers", "0", "--resamples", "0", "--policy", policy)
    whole, few = (evaluate(capsys, "run", data, *words)["kinds"]["tde"] for data in ("photos.csv", "few.csv"))
    for measure in ("precision", "recall"):
        assert few["decided"][measure] == whole["decided"][measure][1:]


def test_two_processes_tell_once_what_is_judged(here: Path) -> None:
    save("model")
    forget("dog")
    words = ["evaluate", "model", "few.csv", "--workers", "0", "--resamples", "0"]
    first, second = run_together(run_verb, words)
    assert first.err.count("judging 2 of 3 labels") == 1
    assert "21 pictures, 2 labels" in first.out
    assert (second.status, second.out, second.err) == (0, "", "")
