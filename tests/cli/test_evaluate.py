import csv
import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluate_command import LABELS, Errors, evaluate, fail, make_run, save, score, write_photos
from together import run_together, run_verb

from pivotpatch.cli.main import main
from pivotpatch.core.calibration import Calibration
from pivotpatch.core.metrics import average_precision, precision_recall
from pivotpatch.core.policies import PerLabel, PriorMatched
from pivotpatch.data.address import open_records
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.score_file import read_scores
from pivotpatch.models.checkpoint import load_checkpoint, save_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier

QUICK = ("--workers", "0", "--resamples", "0")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of images and their table."""
    monkeypatch.chdir(tmp_path)
    write_photos()
    return tmp_path


def test_a_checkpoint_is_measured_as_its_scores_are(here: Path, capsys: Errors) -> None:
    scores = score(save("model"))
    found = evaluate(capsys, "model", "photos.csv", "--workers", "0", "--batch-size", "6", "--resamples", "50")
    assert list(found["kinds"]) == ["image", "patch", "tde"]
    assert (found["pictures"], found["labels"], found["not_read"]) == (21, list(LABELS), {})
    for kind, each in found["kinds"].items():
        expected = average_precision(scores.logits[kind], scores.target, labels=LABELS)
        assert each["precision"]["per_label"] == pytest.approx(expected.per_label)
        decided = precision_recall(scores.probs(kind), scores.target, labels=LABELS)
        assert {name: each["decided"][name] for name in ("CP", "OR", "OF1")} == pytest.approx(
            {name: getattr(decided, name) for name in ("CP", "OR", "OF1")}
        )
        assert each["top"]["definition"] == "top-3 labels of each image"
        assert each["interval"]["low"] < each["interval"]["high"]
    assert found["gain"]["minus"] == "image"


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_saved_scores_need_no_model(suffix: str, here: Path, capsys: Errors) -> None:
    save("model")
    first = evaluate(capsys, "model", "photos.csv", "--workers", "0", "--save", f"scores{suffix}", "--resamples", "20")
    again = evaluate(capsys, f"scores{suffix}", "--resamples", "20")
    told = evaluate(capsys, f"scores{suffix}", "photos.csv", "--resamples", "20")  # the truth from the data set
    for found in (first, again, told):
        del found["evaluated"]
    assert first == again == told


def test_patches_are_kept_where_that_is_asked_for(here: Path, capsys: Errors) -> None:
    scores = score(save("model"))
    evaluate(capsys, "model", "photos.csv", *QUICK, "--save", "kept.parquet", "--keep-patches")
    kept = read_scores("kept.parquet")
    assert kept.patch_logits is not None
    assert scores.patch_logits is not None
    torch.testing.assert_close(kept.patch_logits, scores.patch_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kept.mix(), kept.logits["tde"])


def test_pat_i_goes_around_an_ordinary_model(here: Path, capsys: Errors) -> None:
    model = save("model", MultiLabelClassifier)
    words = ("model", "photos.csv", *QUICK, "--save", "scores.parquet")
    assert list(evaluate(capsys, *words)["kinds"]) == ["image"]
    options = ("--patch-inference", "--grid", "3", "--lam", "0.5", "--temperature", "0.7", "--native", "64")
    assert list(evaluate(capsys, *words, *options)["kinds"]) == ["image", "patch", "tde"]
    expected = score(PatchInference(model, grid=3, lam=0.5, temperature=0.7), size=64)
    found = read_scores("scores.parquet")
    torch.testing.assert_close(found.logits["tde"], expected.logits["tde"], rtol=1e-4, atol=1e-4)
    assert (found.lam, found.temperature) == (0.5, 0.7)


def test_the_priors_of_a_run_are_those_of_its_training(here: Path, capsys: Errors) -> None:
    model = make_run()
    found = evaluate(capsys, "run", "photos.csv", *QUICK, "--policy", "prior")
    again = evaluate(capsys, "model", "photos.csv", *QUICK, "--policy", "prior:train.csv")
    assert found["kinds"] == again["kinds"]
    scores = score(model)
    policy = PriorMatched((0.75, 0.5, 0.25))
    expected = precision_recall(scores.logits["tde"], scores.target, policy=policy, labels=LABELS)
    assert found["kinds"]["tde"]["decided"]["recall"] == pytest.approx(expected.recall)


def test_fitted_thresholds_come_from_the_checkpoint(here: Path, capsys: Errors) -> None:
    model = save("model")
    model.thresholds = (0.4, 0.45, 0.6)
    for calibration in (None, Calibration("tde", "platt", (3.0, 2.0, 1.0), (0.1, 0.0, -0.1))):
        model.calibration = calibration
        save_checkpoint(model, "model", overwrite=True)
        found = evaluate(capsys, "model", "photos.csv", *QUICK, "--policy", "fitted")
        assert found["kinds"]["image"]["decided"] is None
        scores = score(load_checkpoint("model"))
        probs = scores.probs("tde") if calibration is None else calibration.apply(scores.scaled("tde"))
        expected = precision_recall(probs, scores.target, policy=PerLabel(model.thresholds), labels=LABELS)
        assert found["kinds"]["tde"]["decided"] == {**json.loads(json.dumps(asdict(expected)))}


def test_a_baseline_is_compared_image_by_image(here: Path, capsys: Errors) -> None:
    save("model")
    evaluate(capsys, "model", "photos.csv", *QUICK, "--save", "mine.parquet")
    save("other", MultiLabelClassifier)
    evaluate(capsys, "other", "photos.csv", *QUICK, "--save", "other.csv")
    rows = Path("other.csv").read_text().splitlines()
    Path("other.csv").write_text("\n".join([rows[0], *rows[:0:-1]]))  # the other way round
    found = evaluate(capsys, "mine.parquet", "--baseline", "other.csv", "--resamples", "100")["difference"]
    means = [evaluate(capsys, name, "--resamples", "0")["mAP"] for name in ("mine.parquet", "other.csv")]
    assert (found["of"], found["minus"]) == ("tde", "baseline image")
    assert found["value"] == pytest.approx(means[0]["tde"] - means[1]["image"])
    assert found["interval"]["low"] <= found["value"] <= found["interval"]["high"]


def test_other_peoples_scores_are_judged(here: Path, capsys: Errors) -> None:
    """A table of probabilities, in another order than the data set, of some of its labels."""
    records = open_records("table:photos.csv").keep_labels(["fish", "cat"])
    probs = np.random.default_rng(1).random((21, 2)).round(3)
    rows = [f"{records[row].name},{probs[row, 0]},{probs[row, 1]}" for row in range(20, -1, -1)]
    Path("theirs.csv").write_text("\n".join(["file_name,fish,cat", *rows]))
    found = evaluate(capsys, "theirs.csv", "photos.csv", "--policy", "fixed:0.3", "--definition", "envelope")
    expected = average_precision(torch.from_numpy(probs), records.target(), definition="envelope")
    assert found["kinds"]["image"]["precision"]["per_label"] == pytest.approx(expected.per_label)
    assert found["labels"] == ["fish", "cat"]


def test_what_people_see(here: Path, capsys: Errors) -> None:
    save("model")
    words = ["evaluate", "model", "photos.csv", "--workers", "0", "--save", "scores.parquet"]
    assert main([*words, "--per-label", "--csv", "labels.csv", "--policy", "top:2"]) == 0
    captured = capsys.readouterr()
    found = evaluate(capsys, "scores.parquet", "--policy", "top:2")
    assert "21 images, 3 labels\n" in captured.out
    assert max(map(len, captured.out.splitlines())) <= 80
    means = [f"{100 * found['mAP'][kind]:.2f}" for kind in ("image", "patch", "tde")]
    assert re.search(rf"mAP +{means[0]} +{means[1]} +{means[2]}\n", captured.out)
    interval = found["kinds"]["tde"]["interval"]
    assert f"{100 * interval['low']:.2f} to {100 * interval['high']:.2f}" in captured.out
    assert captured.out.index("top-2 labels of each image") < captured.out.index("top-3 labels of each image")
    number = r"[+-]\d+\.\d\d"
    assert re.search(rf"TDE less image: {number} \({number} to {number}\), better for \d of 3 labels", captured.out)
    assert re.search(r"fish +\d+ +\d+\.\d +\d+\.\d +\d+\.\d +\d+\.\d to \d+\.\d", captured.out)
    assert captured.err.splitlines() == ["score: 1 of 1", "wrote scores.parquet", "wrote labels.csv"]
    with Path("labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == list(LABELS)
    tde = found["kinds"]["tde"]
    assert [float(row["ap_tde"]) for row in rows] == pytest.approx(tde["precision"]["per_label"])
    assert float(rows[0]["ap_tde_low"]) == pytest.approx(tde["label_intervals"][0]["low"])
    assert float(rows[2]["recall_image"]) == pytest.approx(found["kinds"]["image"]["decided"]["recall"][2])


def test_names_that_look_like_markup_are_printed_as_they_are(here: Path, capsys: Errors) -> None:
    Path("s.csv").write_text("picture,[red]x[/],target:[red]x[/]\na,1,1\nb,2,0\n")
    assert main(["evaluate", "s.csv", "--per-label"]) == 0
    assert "[red]x[/]" in capsys.readouterr().out


def test_images_that_cannot_be_read_are_counted_and_listed(here: Path, capsys: Errors) -> None:
    save("model")
    Path("4.png").write_bytes(b"no picture")
    words = ("model", "photos.csv", *QUICK)
    assert "4.png" in fail(capsys, *words)
    skip = (*words, "--on-error", "skip")
    assert main(["evaluate", *skip]) == 0
    captured = capsys.readouterr()
    assert "20 images, 3 labels; 1 images could not be read and are left out" in captured.out
    assert re.search(r"^not read: .*4\.png: ", captured.err, re.MULTILINE)
    found = evaluate(capsys, *skip, "--save", "s.parquet")
    assert (found["pictures"], list(found["not_read"])) == (20, ["4.png"])
    assert evaluate(capsys, "s.parquet", "photos.csv", "--resamples", "0")["mAP"] == found["mAP"]
    assert evaluate(capsys, *skip, "--baseline", "s.parquet")["difference"]["value"] == 0


def test_a_model_trained_on_patches_alone_is_judged_by_its_patches(here: Path, capsys: Errors) -> None:
    model = save("model")
    expected = average_precision(score(model).logits["patch"], score(model).target, labels=LABELS)
    assert isinstance(model, PatchClassifier)
    model.patch_only, model.thresholds = True, (0.5, 0.5, 0.5)
    save_checkpoint(model, "model", overwrite=True)
    found = evaluate(capsys, "model", "photos.csv", *QUICK, "--policy", "fitted")
    assert (found["ranking"], list(found["kinds"]), found["gain"]) == ("patch", ["patch"], None)
    assert found["mAP"]["patch"] == pytest.approx(expected.mean)
    assert found["kinds"]["patch"]["decided"] is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere.parquet", "nowhere.parquet: there is no such file; check the path"),
        ("model", "model: is a folder, not a file of scores; make some first: pivotpatch evaluate model DATA --save x"),
        ("tagger", "tagger: is a model, not a file of scores; make some first: pivotpatch evaluate tagger DATA --sa"),
        ("few.csv", "few.csv: 20 "),
        ("other.csv", "other.csv: 1 labels of the other scores have no scores (fish)"),
        ("few.csv --on-error skip", "few.csv: 20 "),
    ],
)
def test_a_baseline_that_will_not_do_is_refused_before_the_work(
    here: Path, capsys: Errors, words: str, message: str
) -> None:
    save("model")
    Path("few.csv").write_text("picture,cat,dog,fish\n0.png,1,2,3\n")
    rows = "".join(f"{place}.png,{place},2\n" for place in range(21))
    Path("other.csv").write_text(f"picture,cat,dog\n{rows}")
    assert main(["evaluate", "model", "photos.csv", "--workers", "0", "--baseline", *words.split()]) == 1
    *told, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"pivotpatch: {message}")
    assert not any(line.startswith("score:") for line in told)


def forget(label: str) -> None:
    """Write a table of the same images that does not know a label."""
    rows = [row.split(",") for row in Path("photos.csv").read_text().splitlines()[1:]]
    kept = [f"{name},{'|'.join(each for each in labels.split('|') if each != label)}\n" for name, labels in rows]
    Path("few.csv").write_text("image,labels\n" + "".join(kept))


def test_the_labels_that_model_and_images_have_in_common_are_judged(here: Path, capsys: Errors) -> None:
    save("model")
    whole = evaluate(capsys, "model", "photos.csv", *QUICK, "--save", "whole.parquet")
    forget("dog")
    assert main(["evaluate", "model", "few.csv", *QUICK, "--json"]) == 0
    captured = capsys.readouterr()
    line = "judging 2 of 3 labels: cat, fish; not in table:few.csv: dog; not known to the model: horse"
    assert captured.err.splitlines() == [line, "score: 1 of 1"]
    found = json.loads(captured.out)
    assert found["labels"] == ["cat", "fish"]
    for kind, each in found["kinds"].items():
        expected = whole["kinds"][kind]
        assert each["precision"]["per_label"] == [expected["precision"]["per_label"][place] for place in (0, 2)]
        assert each["decided"]["recall"] == [expected["decided"]["recall"][place] for place in (0, 2)]
    again = evaluate(capsys, "whole.parquet", "few.csv", "--resamples", "0")
    assert {**again, "evaluated": found["evaluated"]} == found


@pytest.mark.parametrize("policy", ["fitted", "prior", "prior:train.csv"])
def test_rules_of_a_model_decide_about_the_labels_that_are_judged(policy: str, here: Path, capsys: Errors) -> None:
    model = make_run()
    model.thresholds = (0.4, 0.45, 0.6)
    model.calibration = Calibration("tde", "platt", (3.0, 2.0, 1.0), (0.1, 0.0, -0.1))
    save_checkpoint(model, "run/best", overwrite=True)
    forget("cat")
    words = (*QUICK, "--policy", policy)
    whole, few = (evaluate(capsys, "run", data, *words)["kinds"]["tde"] for data in ("photos.csv", "few.csv"))
    for measure in ("precision", "recall"):
        assert few["decided"][measure] == whole["decided"][measure][1:]


@pytest.mark.slow
def test_two_processes_find_what_one_finds(here: Path, capsys: Errors) -> None:
    save("model")
    Path("4.png").write_bytes(b"no picture")
    forget("dog")
    words = ["evaluate", "model", "few.csv", "--workers", "0", "--batch-size", "6", "--on-error", "skip", "--json"]
    assert main([*words, "--save", "alone.parquet", "--keep-patches"]) == 0
    alone = json.loads(capsys.readouterr().out)
    first, second = run_together(run_verb, [*words, "--save", "together.parquet", "--keep-patches"])
    assert (first.status, second.status) == (0, 0)
    together = json.loads(first.out)
    assert (second.out, second.err) == ("", "")
    assert first.err.count("judging 2 of 3 labels") == 1
    assert together["not_read"].keys() == alone["not_read"].keys() == {"4.png"}
    one, other = read_scores("alone.parquet"), read_scores("together.parquet")
    assert one.pictures == other.pictures
    assert len(one.pictures) == 20
    for kind in one.logits:
        torch.testing.assert_close(one.logits[kind], other.logits[kind], rtol=1e-4, atol=1e-5)
    assert together["mAP"] == pytest.approx(alone["mAP"], abs=1e-3)


@pytest.mark.slow
def test_several_processes_read_a_file_once(here: Path) -> None:
    Path("s.csv").write_text("picture,cat,target:cat\na,1,1\nb,2,0\n")
    first, second = run_together(run_verb, ["evaluate", "s.csv"])
    assert "2 images, 1 labels" in first.out
    assert (second.status, second.out, second.err) == (0, "", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model", "model: a model needs images; name them after it, such as photos.csv"),
        ("model photos.csv --lam 2", "--lam: it is an option of --patch-inference; give that too"),
        ("model photos.csv --patch-inference", "--patch-inference: the model has patches of its own (PAT-T)"),
        ("plain photos.csv --patch-inference --native 32", "--native: 32 pixels are no more than the model sees"),
        ("model photos.csv --policy prior", "--policy: 'prior' does not say of which images; write prior:DATA"),
        ("model photos.csv --policy fitted", "--policy: no thresholds were fitted; run pivotpatch tune model DATA"),
        ("model photos.csv --keep-patches", "--keep-patches: nothing is saved; give --save too"),
        ("model photos.csv --save x.txt", "x.txt: "),
        ("model photos.csv --csv no/x.csv", "no/x.csv: there is no folder no; make it first"),
        ("model photos.csv --resamples -1", "--resamples: -1 is below 0; give 0 for no intervals, or 1000"),
        ("model photos.csv --batch-size 0", "evaluation.batch_size=0: "),
        ("model other.csv", "table:other.csv: no image has any of the labels; give images that have some"),
        ("model horse.csv", "table:horse.csv: the model knows none of its labels (horse); known: cat, dog"),
        ("s.csv --workers 0", "--workers: s.csv holds scores, no model; leave it out"),
        ("s.csv --baseline t.csv", "t.csv: 1 "),
    ],
)
def test_a_mistake_is_one_line(words: str, message: str, here: Path, capsys: Errors) -> None:
    save("model")
    save("plain", MultiLabelClassifier)
    Path("other.csv").write_text("image,cat,dog,fish\n0.png,0,0,0\n")
    Path("horse.csv").write_text("image,labels\n0.png,horse\n")
    Path("s.csv").write_text("picture,cat,target:cat\na,1,1\nb,2,0\n")
    Path("t.csv").write_text("picture,cat,target:cat\na,1,1\nc,2,0\n")
    assert fail(capsys, *words.split()).startswith(message)
