import json
import re
from pathlib import Path
from statistics import fmean

import pytest
import torch

from pivotpatch import average_precision, precision_recall
from pivotpatch.cli.main import main
from pivotpatch.inference.score_file import write_scores
from pivotpatch.inference.scores import Scores
from pivotpatch.training import list_recipes, load_config


def test_one_recipe_is_printed_to_be_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for recipe in list_recipes():
        assert main(["recipes", recipe.name]) == 0
        (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
        assert load_config(tmp_path / "mine.toml") == load_config(recipe.path)


def test_every_figure_of_the_list_is_that_of_the_published_row() -> None:
    published = json.loads((list_recipes()[0].path.parent / "published.json").read_text())
    for recipe in list_recipes():
        if recipe.published and not recipe.name.endswith("patch_only") and recipe.name != "coco-tresnet_l_oi-pat":
            assert published[recipe.name]["model"]["mAP"] == recipe.published, recipe.name
    for row in published.values():
        if "AP" in row["model"]:
            assert row["model"]["mAP"] == pytest.approx(fmean(row["model"]["AP"].values()), abs=0.06)


def test_scores_are_compared_with_the_published_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    target = (torch.rand(60, 3, generator=generator) < 0.4).float()
    logits = {kind: torch.randn(60, 3, generator=generator) + 2 * target for kind in ("image", "patch", "tde")}
    labels = ("aeroplane", "bicycle", "own")
    write_scores(Scores(labels, tuple(map(str, range(60))), target, logits), tmp_path / "s.parquet")
    assert main(["recipes", "coco-tresnet_l-asl", "--compare", str(tmp_path / "s.parquet"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    for row, kind in (("model", "image"), ("patch_inference", "tde")):
        expected = precision_recall(logits[kind].sigmoid(), target)
        assert told[row]["CF1"]["ours"] == pytest.approx(100 * expected.CF1)
        assert told[row]["mAP"]["ours"] == pytest.approx(100 * average_precision(logits[kind], target).mean)
    assert (told["model"]["CF1"]["paper"], told["patch_inference"]["mAP"]["paper"]) == (81.4, 87.6)
    assert main(["recipes", "voc2007-tresnet_l-pat", "--compare", str(tmp_path / "s.parquet")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^bicycle +98\.8 +\d+\.\d +[+-]\d", shown, re.MULTILINE)
    assert re.search(r"^own +- +\d+\.\d", shown, re.MULTILINE)
