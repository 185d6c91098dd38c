import multiprocessing
import pickle
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from pivotpatch.data.address import open_records
from pivotpatch.data.scenes import (
    SCENE_LABELS,
    SPLITS,
    ScenePlan,
    SceneStore,
    Split,
    companion,
    draw_scene,
    read_scenes,
)
from pivotpatch.runtime.values import PatchBox


def plans_of(split: Split, count: int = 200, *, company: float = 0.8) -> list[ScenePlan]:
    store = SceneStore(split=split, count=count, seed=3, company=company)
    return [store.plan(index) for index in range(count)]


def inside(box: PatchBox, size: int) -> NDArray[np.bool_]:
    mask = np.zeros((size, size), dtype=bool)
    mask[box.top : box.bottom, box.left : box.right] = True
    return mask


def draw_pixels(store: SceneStore) -> list[bytes]:
    return [store.source(index).tobytes() for index in reversed(range(len(store)))]


@pytest.mark.slow
def test_pixels_are_the_same_in_another_process_and_another_order() -> None:
    store = SceneStore(split="train", count=6, seed=5, size=64, company=0.8)
    here = [store.source(index).tobytes() for index in range(6)]
    others = (replace(store, seed=6), replace(store, split="val"))
    assert not set(here) & {other.source(0).tobytes() for other in others}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.apply(draw_pixels, (pickle.loads(pickle.dumps(store)),))
    assert there[::-1] == here
    assert len(set(here)) == 6


@pytest.mark.parametrize("split", SPLITS)
def test_objects_show_digits_of_their_label_and_keep_apart_within_the_image(split: Split) -> None:
    truth = load_digits().target
    for plan in plans_of(split):
        things = [*plan.objects, *plan.distractors]
        assert all(truth[item.sample] == item.label for item in things)
        assert len({item.label for item in plan.objects}) == len(plan.objects)
        covered = sum(inside(item.box, plan.size).astype(int) for item in things)
        assert np.max(covered) == 1
        for box in (item.box for item in things):
            assert 0 <= box.left < box.right <= plan.size
            assert 0 <= box.top < box.bottom <= plan.size
            assert 0.08 < (box.right - box.left) / plan.size <= 0.4


def test_no_digit_serves_in_two_parts() -> None:
    used: dict[str, set[int]] = {}
    for split in SPLITS:
        things = [item for plan in plans_of(split) for item in (*plan.objects, *plan.distractors)]
        used.setdefault(split.partition("-")[0], set()).update(item.sample for item in things)
    assert set(used) == {"train", "val", "test"}
    for one, other in combinations(used.values(), 2):
        assert not one & other


@pytest.mark.parametrize("company", [0.0, 0.3, 1.0])
def test_company_is_how_often_a_host_brings_its_companion(company: float) -> None:
    plans = plans_of("train", 600, company=company)
    # The first object of a plan is always a host.
    came = np.mean([companion(plan.objects[0].label) in plan.labels for plan in plans])
    assert came == pytest.approx(company, abs=4 * np.sqrt(company * (1 - company) / len(plans)))


def test_broken_company_has_as_many_objects_but_no_companions() -> None:
    same, broken = (read_scenes("", split, count=1000).target() for split in ("test-same", "test-broken"))
    brought = [companion(label) for label in range(len(SCENE_LABELS))]
    assert not (broken * broken[:, brought]).any()
    assert (same * same[:, brought]).any(dim=1).float().mean() > 0.8
    assert broken.sum(dim=1).mean().item() == pytest.approx(same.sum(dim=1).mean().item(), abs=0.1)


def test_a_removed_object_is_gone_from_labels_and_image_and_its_host_stays() -> None:
    store = SceneStore(split="test-removed", count=40, seed=0, size=96, company=0.8)
    for index in range(len(store)):
        plan = store.plan(index)
        (gone,) = [item for item in plan.objects if item.label in plan.removed]
        hosts = {label for label in plan.labels if companion(label) == gone.label}
        assert len(hosts) == 1
        assert gone.label not in plan.labels
        whole = draw_scene(replace(plan, removed=frozenset()))
        assert (whole != store.source(index)).any(axis=2)[inside(gone.box, 96)].mean() > 0.2


@pytest.mark.parametrize("split", SPLITS)
def test_leaving_an_object_out_changes_its_box_and_nothing_else(split: Split) -> None:
    for plan in plans_of(split, 20):
        whole = draw_scene(plan)
        for item in plan.objects:
            changed = (draw_scene(plan, without=frozenset((item.label,))) != whole).any(axis=2)
            box = inside(item.box, plan.size)
            assert not changed[~box].any()
            assert changed[box].any()
        everything = frozenset(item.label for item in plan.objects)
        bare = draw_scene(replace(plan, objects=()))
        np.testing.assert_array_equal(draw_scene(plan, without=everything), bare)


def test_records_agree_with_plans() -> None:
    assert open_records("scenes:?count=3")[0].name == "train/0"
    records = open_records("scenes:@test-removed?count=30&size=48&company=0.5&seed=9")
    assert isinstance(records.images, SceneStore)
    assert records.labels is SCENE_LABELS
    for index in range(30):
        assert records[index].positive == records.images.plan(index).labels
        assert records[index].name == f"test-removed/{index}"
    assert records.images.source(0).shape == (48, 48, 3)
