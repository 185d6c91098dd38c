"""The example of direct effects: correlations against scipy, effects against single calls, and the whole of it."""

import itertools
import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import spearmanr

from pivotpatch.data.scenes import SCENE_LABELS, SceneStore, draw_scene, read_scenes
from pivotpatch.models.classifier import MultiLabelClassifier

EXAMPLE = Path(__file__).parents[1] / "examples" / "direct_effect.py"
NAMES = runpy.run_path(str(EXAMPLE))
whole_numbers = st.lists(st.integers(0, 5), min_size=8, max_size=8)


@given(whole_numbers, whole_numbers, st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_weighted_rank_correlation_is_scipys_of_the_repeated_values(a: list[int], b: list[int], w: list[int]) -> None:
    ours = NAMES["correlate"](torch.tensor(a), torch.tensor(b), torch.tensor([w]).double()).item()
    one, other = np.repeat(a, w), np.repeat(b, w)
    if len(set(one)) < 2 or len(set(other)) < 2:
        assert np.isnan(ours)
    else:
        assert ours == pytest.approx(spearmanr(one, other).statistic, abs=1e-9)


def test_an_effect_is_the_logit_with_the_object_less_that_without_it() -> None:
    torch.manual_seed(0)
    model = MultiLabelClassifier("test_resnet", SCENE_LABELS.names, image_size=64).eval()
    records = read_scenes("", "test-removed", count=4, size=64)
    effects, store = NAMES["measure"](model, records), records.images
    assert isinstance(store, SceneStore)

    def ask(without: frozenset[int]) -> torch.Tensor:
        image = torch.from_numpy(draw_scene(plan, without=without)).permute(2, 0, 1)
        with torch.inference_mode():
            logits: torch.Tensor = model(model.preprocessing(image)[None])[0]
        return logits

    for scene in range(4):
        plan = store.plan(scene)
        for label in range(len(SCENE_LABELS)):
            gone = ask(plan.removed) - ask(plan.removed | {label})
            wanted = gone[label].item() if label in plan.labels else 0.0
            assert effects.effect[scene, label].item() == pytest.approx(wanted, abs=1e-4)
    (row,) = NAMES["track"](effects, among="scenes", resamples=5)
    pairs = zip(effects.logits["image"].T, effects.effect.T, strict=True)
    oracle = [spearmanr(logits, effect).statistic for logits, effect in pairs if effect.any()]
    assert row.mean.value == pytest.approx(np.mean(oracle))


@pytest.mark.slow
def test_it_prints_a_row_for_each_model_split_and_kind_and_draws_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--quick"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    models, splits = ("baseline and PAT-I on it", "PAT-T"), ("test-same", "test-removed", "test-broken")
    expected = itertools.product(models, splits, ("objects", "scenes"), ("image", "patch", "tde"))
    assert {tuple(row[:4]) for row in rows} == set(expected)
    assert all(-1 <= float(correlation.partition(" ")[0]) <= 1 for *_, correlation, _ in rows)
    folder = tmp_path / "demo" / "direct_effect" / "quick"
    assert json.loads((folder / "pat" / "metrics.json").read_text())["frozen"] is False  # all of it was trained
    with Image.open(folder / "effects.png") as picture:
        assert picture.width >= 1000
