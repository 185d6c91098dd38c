import json
import re
from pathlib import Path

import pytest
import torch
from made_scores import make_scores

from pivotpatch.cli.main import main
from pivotpatch.core.metrics import average_precision
from pivotpatch.inference.score_file import write_scores
from pivotpatch.models.checkpoint import load_checkpoint, save_checkpoint

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


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    assert {"cases", "errors", "calibration", "training"} <= set(sections(page))
    assert VAL.replace("&", "&amp;") in page
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["nowhere"],
            "nowhere: is neither a run nor a checkpoint nor scores; give a run, a checkpoint, or a file that",
        ),
        (["nowhere.csv"], "nowhere.csv: there is no such file; check the path"),
        (["{runs}/pat/best"], "{runs}/pat/best: there are no validation pictures to judge it by; name pictures after"),
        (["{runs}/pat", "nothing"], "'nothing': is neither an address nor a table or folder that is there; check"),
        (["{runs}/pat", "a", "b"], "'b': a third word; give what to report on and the pictures"),
        (["{runs}/pat", "--pictures", "201"], "--pictures: 201 pictures; give 0 to 200"),
        (["{runs}/pat", "--out", "report.pdf"], "report.pdf: is no name for a page; end it in .html"),
        (["{runs}/pat", "--out", "no/report.html"], "no/report.html: there is no folder no; make it first"),
        (["{runs}/pat", "--baseline", "nowhere"], "nowhere: is neither a run nor a checkpoint nor scores"),
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
    assert "new: the run has no best network yet; train on, or report on new/last" in capsys.readouterr().err


def test_help_does_not_wait_for_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pivotpatch.cli.main import build_parser; build_parser(); "
        "print([name for name in ('torch', 'matplotlib', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
