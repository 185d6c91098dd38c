import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_scores import make_scores
from PIL import Image

from pivotpatch.cli.main import main
from pivotpatch.core.metrics import average_precision
from pivotpatch.data.address import open_records
from pivotpatch.inference.score_file import read_scores, write_scores
from pivotpatch.models.checkpoint import load_checkpoint, save_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier

TRAIN = [
    *("train", "scenes:@train?count=24&size=32", "data.val=scenes:@val?count=60&size=32"),
    *("model.backbone=test_resnet", "model.pretrained=false", "model.image_size=32", "data.workers=0"),
    *("train.epochs=1", "train.batch_size=8", "output.trackers=[]"),
]
VAL, TEST = "scenes:@val?count=60&size=32", "scenes:@test-same?count=50&size=32"
MEAN = r'<b id="map">([\d.]+)<'
Errors = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of PAT-T, `pat`, and one of the baseline, `base`."""
    root = tmp_path_factory.mktemp("runs")
    for name, kind in (("pat", "patch"), ("base", "image")):
        assert main([*TRAIN, f"task.kind={kind}", "--out", str(root / name)]) == 0
    return root


def report(*words: str | Path) -> str:
    assert main(["report", *map(str, words)]) == 0
    return Path("report.html").read_text("utf-8")


def sections(page: str) -> list[str]:
    return re.findall(r'<section id="(\w+)">', page)


def test_a_run_is_judged_on_its_validation_images(runs: Path, here: Path, capsys: Errors) -> None:
    page = report(runs / "pat", "--baseline", runs / "base")
    captured = capsys.readouterr()
    assert captured.out == f"wrote report.html, {len(page.encode()) / 1e6:.2f} MB\n"
    for stage in ("score pat: 1 of 1", "score base: 1 of 1", "measure: 0 of 3"):
        assert stage in captured.err
    metrics = {name: json.loads((runs / name / "metrics.json").read_text()) for name in ("pat", "base")}
    best = {name: 100 * found["best_val_mAP"] for name, found in metrics.items()}
    assert f'<b id="map">{best["pat"]:.2f}</b>' in page
    assert f'<b id="difference">{best["pat"] - best["base"]:+.2f}</b>' in page
    assert {"cases", "calibration", "training"} <= set(sections(page))
    weights = sum(weight.numel() for weight in load_checkpoint(runs / "pat" / "best").parameters())
    for name, fact in {
        "data": f"{VAL}, the validation images".replace("&", "&amp;"),
        "forward passes per image": "5",
        "baseline forward passes per image": "1",
        "weights": f"{weights:,}",
    }.items():
        assert f"<dt>{name}</dt><dd>{fact}</dd>" in page
    assert f"{metrics['pat']['steps']} steps in " in page
    assert 0 < page.count("<img") <= 60


def test_scores_need_no_model_and_no_images(here: Path) -> None:
    scores = make_scores(("cat", "dog", "hat"))
    write_scores(scores, here / "pat.parquet")
    write_scores(replace(scores, closer_size=352), here / "closer.parquet")
    page = report("pat.parquet", "--baseline", "closer.parquet")
    assert f'<b id="map">{100 * average_precision(scores.get("tde"), scores.target).mean:.2f}</b>' in page
    assert "against the baseline closer.parquet" in page
    assert "<img" not in page
    assert "<dt>forward passes per image</dt><dd>5</dd>" in page
    assert "<dt>baseline closer look</dt><dd>at 352 pixels a side, in the place of patches</dd>" in page


def test_a_checkpoint_and_its_scores_say_the_same_of_images_that_are_named(runs: Path, here: Path) -> None:
    model = load_checkpoint(runs / "pat" / "best")
    model.thresholds = tuple(torch.linspace(0.2, 0.7, 10).tolist())
    save_checkpoint(model, here / "fitted")
    assert main(["evaluate", "fitted", TEST, "--save", "pat.parquet", "--keep-patches", "--workers", "0"]) == 0
    scored, live = report("pat.parquet", TEST, "--baseline", runs / "base"), report("fitted", TEST, "--images", "0")
    assert re.findall(MEAN, scored) == re.findall(MEAN, live)
    assert "<img" in scored
    assert "<img" not in live
    assert "<dt>images</dt><dd>50</dd>" in live
    assert "training" not in sections(live)
    assert "per-label thresholds (0.2 to 0.7)" in live
    assert "<td>0.20" in live


def test_images_that_a_run_held_out_are_named_so(here: Path) -> None:
    """A run that chose by a part of its training images, after its decisions were fitted on them."""
    words = [word for word in TRAIN if not word.startswith("data.val=")]
    assert main([*words, "data.val_fraction=0.5", "task.kind=image", "--out", "run"]) == 0
    model = load_checkpoint("run/best")
    model.thresholds = (0.5,) * len(model.labels)
    save_checkpoint(model, "run/best", overwrite=True)
    page = report("run")
    assert f"<dt>data</dt><dd>held out of {TRAIN[1]}</dd>".replace("&", "&amp;") in page
    assert "of run may have been fitted on these very images" in page
    page = report("run", TEST)
    assert "held out of" not in page
    assert "may have been fitted" not in page


def make_photos(broken: str, labels: list[str]) -> None:
    """Thirty scenes as files with some of their labels, one of which is no image."""
    records = open_records(TEST).keep_labels(labels)
    rows = ["image,labels"]
    for place in range(30):
        pixels = records.images.source(place)
        assert isinstance(pixels, np.ndarray)
        Image.fromarray(pixels).save(f"{place}.png")
        rows.append(f"{place}.png,{'|'.join(records.labels.names[label] for label in records[place].positive)}")
    Path(broken).write_bytes(b"no image")
    Path("photos.csv").write_text("\n".join(rows))


def test_broken_images_and_labels_that_are_not_judged_are_told(runs: Path, here: Path, capsys: Errors) -> None:
    make_photos("3.png", ["three", "five"])
    model, skip = str(runs / "pat"), ("--on-error", "skip")
    assert main(["report", model, "photos.csv"]) == 1
    assert "3.png" in capsys.readouterr().err
    assert main(["evaluate", model, "photos.csv", *skip, "--save", "s.parquet", "--keep-patches"]) == 0
    capsys.readouterr()
    live = report(model, "photos.csv", *skip)
    told = capsys.readouterr().err
    assert re.search(r"^not read: .*3\.png: ", told, re.MULTILINE)
    assert "judging 2 of 10 labels: three, five; not in table:photos.csv: zero, one, two and 5 more" in told
    assert "<dt>labels</dt><dd>2 of the 10 that the model knows</dd>" in live
    Path("7.png").write_bytes(b"broken since")
    fewer = report("s.parquet", "photos.csv", *skip, "--baseline", runs / "base")
    for page, count in ((live, 29), (fewer, 28)):
        assert f"<dt>images</dt><dd>{count} of 30; {30 - count} have no scores</dd>" in page
    scores = read_scores("s.parquet")
    assert re.findall(MEAN, live) == [f"{100 * average_precision(scores.get('tde'), scores.target).mean:.2f}"]
    save_checkpoint(PatchClassifier("test_vit", ["three", "nine"], image_size=32), "other")
    assert main(["report", model, "photos.csv", *skip, "--baseline", "other"]) == 1
    assert "other: it does not know 1 of the 2 labels that are judged (five); give" in capsys.readouterr().err


def test_a_model_trained_on_patches_alone_is_judged_by_them(runs: Path, here: Path) -> None:
    model = load_checkpoint(runs / "pat" / "best")
    assert isinstance(model, PatchClassifier)
    model.patch_only = True
    save_checkpoint(model, "scale")
    page = report("scale", TEST, "--baseline", runs / "pat")
    assert "mAP of the patch logits" in page
    assert "<dt>forward passes per image</dt><dd>4</dd>" in page
    assert "cases" not in sections(page)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: is neither a run nor a checkpoint nor scores; give a run, a checkpoint"),
        (["{runs}/pat/best"], "{runs}/pat/best: there are no validation images to judge it by; name images after"),
        (["{runs}/pat", "nothing"], "'nothing': is neither an address nor a table or folder that is there; check"),
        (["{runs}/pat", "a", "b"], "'b': a third word; give what to report on and the images"),
        (["{runs}/pat", "--images", "201"], "--images: 201 images; give 0 to 200"),
        (["{runs}/pat", "--out", "report.pdf"], "report.pdf: is no name for a page; end it in .html"),
        (["{runs}/pat", "--out", "no/report.html"], "no/report.html: is no name for a page; end it in .html"),
        (["{runs}/pat", "--baseline", "no.parquet"], "no.parquet: there is no such file; check the path"),
    ],
)
def test_mistakes_are_told_in_one_line(words: list[str], message: str, runs: Path, here: Path, capsys: Errors) -> None:
    capsys.readouterr()
    assert main(["report", *(word.format(runs=runs) for word in words)]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"pivotpatch: {message.format(runs=runs)}")
    assert (captured.out, list(here.iterdir())) == ("", [])


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from pivotpatch.cli.main import build_parser; build_parser(); "
        "print([name for name in ('torch', 'matplotlib', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
