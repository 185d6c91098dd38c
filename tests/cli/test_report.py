import json
import re
from pathlib import Path

import pytest
from made_scores import make_scores
from torch.utils.flop_counter import flop_registry
from verb import SCENES, Errors, train

from pivotpatch.cli.main import main
from pivotpatch.cli.report import _describe
from pivotpatch.core.metrics import average_precision
from pivotpatch.inference.score_file import write_scores
from pivotpatch.models import load_checkpoint, save_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier

VAL, TEST = "scenes:@val?count=60&size=32", "scenes:@test-same?count=50&size=32"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of PAT-T, `pat`, and one of the baseline, `base`."""
    root = tmp_path_factory.mktemp("runs")
    for name, kind in (("pat", "patch"), ("base", "image")):
        train(*SCENES, f"data.val={VAL}", "train.epochs=1", f"task.kind={kind}", "--out", str(root / name))
    save_checkpoint(PatchClassifier("test_vit", ["three", "nine"], image_size=32), root / "other")
    return root


def report(*words: str | Path) -> str:
    assert main(["report", *map(str, words)]) == 0
    return Path("report.html").read_text("utf-8")


def test_a_run_is_judged_on_its_validation_images(runs: Path, here: Path, capsys: Errors) -> None:
    page = report(runs / "pat", "--baseline", runs / "base")
    assert capsys.readouterr().out == f"wrote report.html, {len(page.encode()) / 1e6:.2f} MB\n"
    metrics = {name: json.loads((runs / name / "metrics.json").read_text()) for name in ("pat", "base")}
    best = {name: 100 * found["best_val_mAP"] for name, found in metrics.items()}
    assert f'<b id="map">{best["pat"]:.2f}</b>' in page
    assert f'<b id="difference">{best["pat"] - best["base"]:+.2f}</b>' in page
    assert {"cases", "calibration"} <= set(re.findall(r'<section id="(\w+)">', page))
    weights = sum(weight.numel() for weight in load_checkpoint(runs / "pat" / "best").parameters())
    for name, fact in {
        "data": f"{VAL}, the validation images".replace("&", "&amp;"),
        "weights": f"{weights:,}",
    }.items():
        assert f"<dt>{name}</dt><dd>{fact}</dd>" in page
    costs = [float(cost) for cost in re.findall(r"cost of an image</dt><dd>(\S+) GFLOPs", page)]
    assert costs[0] / costs[1] == pytest.approx(5, rel=0.02)  # the image and four patches
    assert 0 < page.count("data:image/jpeg") <= 60


def test_attention_counts_where_torch_has_no_formula_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PatchClassifier("test_vit", ["three", "nine"], image_size=32)
    cost = _describe(model)["cost of an image"]
    for operation in [each for each in flop_registry if "attention" in str(each)]:  # as in older versions, on a CPU
        monkeypatch.delitem(flop_registry, operation)
    assert _describe(model)["cost of an image"] == cost


def test_scores_need_no_model_and_no_images(here: Path) -> None:
    scores = make_scores(("cat", "dog", "hat"))
    write_scores(scores, here / "pat.parquet")
    page = report("pat.parquet", "--baseline", "pat.parquet")
    assert f'<b id="map">{100 * average_precision(scores.get("tde"), scores.target).mean:.2f}</b>' in page
    assert "data:image/jpeg" not in page
    assert '<b id="difference">+0.00</b>' in page
