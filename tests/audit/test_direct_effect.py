"""Direct effects of models whose effects are known, and rank correlation against scipy."""

import json
from copy import deepcopy
from dataclasses import asdict

import made_scores
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch import Tensor

from pivotpatch.audit.direct_effect import Among, DirectEffects, measure_direct_effects, rank_correlation, track_effects
from pivotpatch.data.scenes import SCENE_LABELS, SceneStore, draw_scene, read_scenes
from pivotpatch.errors import InputError
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.classifier import MultiLabelClassifier, load_relabelled

whole_numbers = st.lists(st.integers(0, 5), min_size=8, max_size=8)


@given(whole_numbers, whole_numbers, st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_weighted_rank_correlation_is_scipys_of_the_repeated_values(a: list[int], b: list[int], w: list[int]) -> None:
    ours = rank_correlation(torch.tensor(a), torch.tensor(b), torch.tensor([w]).double()).item()
    one, other = np.repeat(a, w), np.repeat(b, w)
    if len(set(one)) < 2 or len(set(other)) < 2:
        assert np.isnan(ours)
    else:
        assert ours == pytest.approx(spearmanr(one, other).statistic, abs=1e-9)


@pytest.fixture(scope="module")
def model() -> MultiLabelClassifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiLabelClassifier("test_resnet", SCENE_LABELS.names, image_size=64).eval()


def ask(model: MultiLabelClassifier, image: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(model.preprocessing(torch.from_numpy(image).permute(2, 0, 1))[None])[0]
    return logits


@pytest.mark.parametrize("split", ["test-same", "test-removed"])
def test_an_effect_is_the_logit_with_the_object_less_that_without_it(model: MultiLabelClassifier, split: str) -> None:
    records = read_scenes("", split, count=6, size=64)
    effects = measure_direct_effects(model, records, batch_size=4)
    store = records.images
    assert isinstance(store, SceneStore)
    for scene in range(6):
        plan = store.plan(scene)
        there = ask(model, draw_scene(plan, without=plan.removed))
        assert effects.shown[scene].nonzero().flatten().tolist() == list(plan.labels)
        assert effects.logits["image"][scene].tolist() == pytest.approx(there.tolist(), abs=1e-4)
        for label in range(len(SCENE_LABELS)):
            gone = ask(model, draw_scene(plan, without=plan.removed | {label}))
            wanted = (there - gone)[label].item() if label in plan.labels else 0.0
            assert effects.effect[scene, label].item() == pytest.approx(wanted, abs=1e-4)


def test_labels_may_stand_in_another_order_and_beside_others(model: MultiLabelClassifier) -> None:
    records = read_scenes("", "test-same", count=8, size=64)
    strong = deepcopy(model)
    with torch.no_grad():
        for weight in strong.head.parameters():
            weight.mul_(100)  # else all effects are near 0
    other = MultiLabelClassifier("test_resnet", [*reversed(SCENE_LABELS.names), "cat"], image_size=64).eval()
    load_relabelled(other, strong)
    expected, found = (measure_direct_effects(PatchInference(asked), records) for asked in (strong, other))
    assert expected.effect.std() > 0.02
    torch.testing.assert_close(found.effect, expected.effect, atol=1e-3, rtol=0)
    torch.testing.assert_close(dict(found.logits), dict(expected.logits), atol=1e-3, rtol=0)


def make_effects(noise: float) -> DirectEffects:
    """Image logits that follow the effect loosely, and TDE logits that follow it up to `noise`."""
    generator = torch.Generator().manual_seed(0)
    shown = torch.rand(600, 3, generator=generator) < 0.4
    effect = torch.rand(600, 3, generator=generator).masked_fill(~shown, 0.0)
    image = effect + torch.randn(600, 3, generator=generator)
    tde = effect + noise * torch.randn(600, 3, generator=generator)
    return DirectEffects(("a", "b", "c"), shown, effect, {"image": image, "tde": tde})


@pytest.mark.parametrize("among", ["objects", "scenes"])
def test_tracking_is_scipys_correlation_of_what_is_ranked(among: Among) -> None:
    effects = make_effects(0.3)
    effects.shown[:, 1] = False  # a label that no scene shows is left out of the mean
    effects.effect[:, 1] = 0.0
    for row in track_effects(effects, among=among, resamples=50, generator=torch.Generator().manual_seed(0)):
        assert row.per_label[1] is None
        for place, bound in ((0, row.per_label[0]), (2, row.per_label[2])):
            rows = effects.shown[:, place] if among == "objects" else slice(None)
            oracle = spearmanr(effects.logits[row.kind][rows, place], effects.effect[rows, place]).statistic
            assert bound is not None
            assert bound.value == pytest.approx(oracle)
            assert row.counts[place] == (effects.shown[:, place].sum() if among == "objects" else 600)
        assert row.mean is not None
        assert row.mean.value == pytest.approx(np.mean([bound.value for bound in row.per_label if bound]))
        assert json.dumps(asdict(row), allow_nan=False)


def test_logits_that_are_the_effect_track_it_perfectly_and_better_than_the_image() -> None:
    image, tde = track_effects(make_effects(0.0), resamples=200, generator=torch.Generator().manual_seed(0))
    assert image.mean is not None
    assert tde.mean is not None
    assert tde.mean.value == tde.mean.low == pytest.approx(1.0)
    assert image.over_image is None
    assert tde.over_image is not None
    assert tde.over_image.value == pytest.approx(1 - image.mean.value)


def test_intervals_cover_what_many_scenes_would_say() -> None:
    """Of a normal pair with correlation 0.5, Spearman's is 6 / pi asin(0.25)."""
    truth = 6 / np.pi * np.arcsin(0.25)
    covered = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        effect = torch.randn(150, 1, generator=generator)
        logits = 0.5 * effect + (1 - 0.25) ** 0.5 * torch.randn(150, 1, generator=generator)
        effects = DirectEffects(("a",), torch.ones(150, 1, dtype=torch.bool), effect, {"image": logits})
        (row,) = track_effects(effects, resamples=200, generator=generator)
        assert row.mean is not None
        covered += row.mean.low <= truth <= row.mean.high
    assert 50 <= covered <= 60


def test_what_effects_are_not_known_of_is_refused(model: MultiLabelClassifier) -> None:
    records = made_scores.make_records(made_scores.make_scores(("a",), count=1))
    with pytest.raises(InputError, match="made:<up>: direct effects are known on scenes only; give scenes:"):
        measure_direct_effects(model, records)
    other = MultiLabelClassifier("test_resnet", ["cat"], image_size=64)
    with pytest.raises(InputError, match="does not know 10 of the 10 labels of scenes"):
        measure_direct_effects(other, read_scenes("", "val", count=2))
