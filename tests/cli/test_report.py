import json
import re
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


def test_a_run_is_judged_on_its_validation_pictures(runs: Path, here: Path, capsys: Errors) -> None:
    page = report(runs / "pat", "--baseline", runs / "base")
    captured = capsys.readouterr()
    assert captured.out == f"wrote report.html, {len(page.encode()) / 1e6:.2f} MB\n"
    assert "score pat: 1 of 1" in captured.err
    assert "score base: 1 of 1" in captured.err
    assert "measure: 0 of 5" in captured.err
    metrics = {name: json.loads((runs / name / "metrics.json").read_text()) for name in ("pat", "base")}
    best = {name: 100 * found["best_val_mAP"] for name, found in metrics.items()}
    assert f'<b id="map">{best["pat"]:.2f}</b>' in page
    assert f'<b id="difference">{best["pat"] - best["base"]:+.2f}</b>' in page
    assert {"cases", "calibration", "training"} <= set(sections(page))
    assert f"<dt>data</dt><dd>{VAL}, the validation pictures</dd>".replace("&", "&amp;") in page
    assert "<dt>forward passes a picture</dt><dd>5</dd>" in page
    assert "<dt>baseline forward passes a picture</dt><dd>1</dd>" in page
    weights = sum(weight.numel() for weight in load_checkpoint(runs / "pat" / "best").parameters())
    assert f"<dt>weights</dt><dd>{weights:,}</dd>" in page
    assert f"{metrics['pat']['steps']} steps in " in page
    assert 0 < page.count("<img") <= 60


def test_a_checkpoint_is_judged_on_the_pictures_that_are_named(runs: Path, here: Path) -> None:
    page = report(runs / "pat" / "best", TEST, "--pictures", "0")
    assert "<dt>pictures</dt><dd>50</dd>" in page
    assert "training" not in sections(page)
    assert "<img" not in page


def test_scores_need_no_network_and_no_pictures(runs: Path, here: Path) -> None:
    scores = make_scores(("cat", "dog", "hat"))
    write_scores(scores, here / "pat.npz")
    write_scores(make_scores(scores.labels, patches=False, seed=1), here / "old.npz")
    page = report("pat.npz", "--baseline", "old.npz")
    assert f'<b id="map">{100 * average_precision(scores.get("tde"), scores.target).mean:.2f}</b>' in page
    assert "against the baseline old.npz" in page
    assert "<img" not in page
    assert report("pat.npz", "--baseline", "old.npz", "--out", "report.html").count("<dd>") == page.count("<dd>")


def test_a_closer_look_is_not_taken_for_patches(runs: Path, here: Path) -> None:
    scores = make_scores(("cat", "dog", "hat"))
    write_scores(scores, here / "pat.npz")
    write_scores(replace(scores, closer_size=352), here / "closer.npz")
    plain, closer = report("pat.npz"), report("closer.npz")
    assert "forward passes a picture" in plain
    assert "closer look" not in plain
    assert "forward passes a picture" not in closer
    assert "at 352 pixels a side, in the place of patches" in closer


def test_scores_find_their_pictures_by_name(runs: Path, here: Path) -> None:
    assert main(["evaluate", str(runs / "pat"), TEST, "--save", "pat.parquet", "--keep-patches", "--workers", "0"]) == 0
    scored, live = report("pat.parquet", TEST), report(runs / "pat", TEST)
    assert scored.count("<img") == live.count("<img") > 0
    mean = r'<b id="map">([\d.]+)<'
    assert re.findall(mean, scored) == re.findall(mean, live)
    beside = report("pat.parquet", TEST, "--baseline", runs / "base")
    assert "against the baseline base" in beside


def test_thresholds_of_a_checkpoint_decide(runs: Path, here: Path) -> None:
    model = load_checkpoint(runs / "pat" / "best")
    model.thresholds = tuple(torch.linspace(0.2, 0.7, 10).tolist())
    save_checkpoint(model, here / "fitted")
    page = report("fitted", TEST)
    assert "per-label thresholds (0.2 to 0.7)" in page
    assert "<td>0.20" in page
    assert "<td>0.70" in page


def test_pictures_that_a_run_held_out_are_named_so(here: Path) -> None:
    """A run that chose by a part of its training pictures, before and after its decisions were fitted on them."""
    words = [word for word in TRAIN if not word.startswith("data.val=")]
    assert main([*words, "data.val_fraction=0.5", "task.kind=image", "--out", "run"]) == 0
    model = load_checkpoint("run/best")
    address = TRAIN[1].replace("&", "&amp;")
    for thresholds in (None, (0.5,) * len(model.labels)):
        model.thresholds = thresholds
        save_checkpoint(model, "run/best", overwrite=True)
        page = report("run")
        assert f'<p class="soft">held out of {address} · ' in page
        assert f"<dt>data</dt><dd>held out of {address}</dd>" in page
        assert ("of run may have been fitted on these very pictures" in page) == (thresholds is not None)
    page = report("run", TEST)
    assert "held out of" not in page
    assert "may have been fitted" not in page


def make_photos(broken: str) -> None:
    """Thirty scenes as files, one of which is no picture."""
    records = open_records(TEST)
    rows = ["image,labels"]
    for place in range(30):
        pixels = records.images.source(place)
        assert isinstance(pixels, np.ndarray)
        Image.fromarray(pixels).save(f"{place}.png")
        rows.append(f"{place}.png,{'|'.join(records.labels.names[label] for label in records[place].positive)}")
    Path(broken).write_bytes(b"no picture")
    Path("photos.csv").write_text("\n".join(rows))


def test_a_broken_picture_is_no_dead_end(runs: Path, here: Path, capsys: Errors) -> None:
    make_photos("3.png")
    network, skip = str(runs / "pat"), ("--on-error", "skip")
    assert main(["report", network, "photos.csv"]) == 1
    assert "3.png" in capsys.readouterr().err
    assert main(["evaluate", network, "photos.csv", *skip, "--save", "s.parquet", "--keep-patches"]) == 0
    capsys.readouterr()
    scored = report("s.parquet", "photos.csv")
    assert "s.parquet: 1 of 30 pictures of table:photos.csv have no scores" in capsys.readouterr().err
    live = report(network, "photos.csv", *skip, "--baseline", runs / "base")
    assert re.search(r"^not read: .*3\.png: ", capsys.readouterr().err, re.MULTILINE)
    Path("7.png").write_bytes(b"broken since")
    fewer = report("s.parquet", "photos.csv", *skip, "--baseline", runs / "base")
    for page, count in ((scored, 29), (live, 29), (fewer, 28)):
        assert f"<dt>pictures</dt><dd>{count} of 30; {30 - count} have no scores</dd>" in page
    mean = r'<b id="map">([\d.]+)<'
    assert re.findall(mean, scored) == re.findall(mean, live)
    assert main(["report", "s.parquet", "photos.csv", *skip]) == 1
    assert "--on-error: s.parquet holds scores, no network; leave it out" in capsys.readouterr().err


def test_pictures_of_fewer_labels_are_judged_by_these(runs: Path, here: Path, capsys: Errors) -> None:
    make_photos("unused.png")
    few = open_records("table:photos.csv").keep_labels(["three", "five"])
    rows = [f"{record.name},{'|'.join(few.labels.names[label] for label in record.positive)}" for record in few]
    Path("few.csv").write_text("\n".join(["image,labels", *rows]))
    model = load_checkpoint(runs / "pat" / "best")
    model.thresholds = tuple(torch.linspace(0.1, 1, 10).tolist())
    save_checkpoint(model, "fitted")
    page = report("fitted", "few.csv", "--baseline", runs / "base")
    told = [line for line in capsys.readouterr().err.splitlines() if "labels" in line]
    assert told == ["judging 2 of 10 labels: three, five; not in table:few.csv: zero, one, two and 5 more"]
    assert "<dt>labels</dt><dd>2 of the 10 that the network knows</dd>" in page
    assert "per-label thresholds (0.4 to 0.6)" in page
    assert main(["evaluate", "fitted", "few.csv", "--workers", "0", "--save", "few.npz", "--keep-patches"]) == 0
    scores = read_scores("few.npz")
    assert f'<b id="map">{100 * average_precision(scores.get("tde"), scores.target).mean:.2f}</b>' in page
    capsys.readouterr()
    save_checkpoint(PatchClassifier("test_vit", ["three", "nine"], image_size=32), "other")
    assert main(["report", "fitted", "few.csv", "--baseline", "other"]) == 1
    assert "other: it does not know 1 of the 2 labels that are judged (five); give" in capsys.readouterr().err


def test_a_network_trained_on_patches_alone_is_judged_by_them(runs: Path, here: Path) -> None:
    model = load_checkpoint(runs / "pat" / "best")
    assert isinstance(model, PatchClassifier)
    model.patch_only = True
    save_checkpoint(model, "scale")
    page = report("scale", TEST, "--baseline", runs / "pat")
    assert "mAP of the patch logits" in page
    assert "<dt>forward passes a picture</dt><dd>4</dd>" in page
    assert "cases" not in sections(page)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["nowhere"],
            "nowhere: is neither a run nor a checkpoint nor scores; give a run, a checkpoint, hub:owner/name",
        ),
        (["nowhere.csv"], "nowhere.csv: there is no such file; check the path"),
        (["{runs}/pat/best"], "{runs}/pat/best: there are no validation pictures to judge it by; name pictures after"),
        (["{runs}/pat", "nothing"], "'nothing': is neither an address nor a table or folder that is there; check"),
        (["{runs}/pat", "a", "b"], "'b': a third word; give what to report on and the pictures"),
        (["{runs}/pat", "--pictures", "201"], "--pictures: 201 pictures; give 0 to 200"),
        (["{runs}/pat", "--out", "report.pdf"], "report.pdf: is no name for a page; end it in .html"),
        (["{runs}/pat", "--out", "no/report.html"], "no/report.html: there is no folder no; make it first"),
        (["{runs}/pat", "--baseline", "nowhere"], "nowhere: is neither a run nor a checkpoint nor scores"),
        (["{runs}/pat", "--baseline", "no.npz"], "no.npz: there is no such file; check the path"),
        (["Timm:x.csv"], "Timm:x.csv: there is no such file; did you mean 'timm:x.csv'? check the path"),
    ],
)
def test_mistakes_are_told_in_one_line(words: list[str], message: str, runs: Path, here: Path, capsys: Errors) -> None:
    assert main(["report", *(word.format(runs=runs) for word in words)]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"pivotpatch: {message.format(runs=runs)}")
    assert (captured.out, list(here.iterdir())) == ("", [])


def test_a_run_that_has_just_begun_has_no_report(runs: Path, here: Path, capsys: Errors) -> None:
    (here / "new").mkdir()
    (here / "new" / "config.toml").write_text((runs / "pat" / "config.toml").read_text())
    assert main(["report", "new"]) == 1
    assert "new: the run has no best model yet; train on, or give new/last" in capsys.readouterr().err


def test_help_does_not_wait_for_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pivotpatch.cli.main import build_parser; build_parser(); "
        "print([name for name in ('torch', 'matplotlib', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
