"""The order of review: what must come first, whatever the numbers."""

import numpy as np
import pytest

from pivotpatch.review.order import Doubts, Floats, Pair, order_images, order_label, rate_doubts
from pivotpatch.runtime.values import rate_self_confidence

LABELS = ("cup", "fork", "knife")
HALF = np.full(3, 0.5)
EVEN = np.full(3, 10.0)  # no label is rare


def rate(probs: Floats, **options: object) -> Doubts:
    return rate_doubts(np.asarray(probs), **{"labels": LABELS, "thresholds": HALF, "counts": EVEN, **options})  # type: ignore[arg-type]


def test_the_nearer_a_label_is_to_its_own_threshold_the_earlier_the_image_comes() -> None:
    generator = np.random.default_rng(0)
    thresholds = np.array([0.2, 0.5, 0.8])
    sure = generator.choice([0.01, 0.99], (40, 3))
    probs = np.concatenate([sure, sure[:3]])
    for row, label in ((40, 0), (41, 1), (42, 2)):
        probs[row, label] = thresholds[label]
    doubts = rate(probs, thresholds=thresholds)
    assert {*order_images(doubts)[:3].tolist()} == {40, 41, 42}
    assert doubts.explain_image(40) == "cup: 0.20, near its threshold 0.20"
    assert doubts.level[40, 0] == pytest.approx(0.5)
    grid = np.linspace(0.01, 0.99, 99)[:, None]
    near = rate(np.concatenate([grid, np.full((99, 2), 0.001)], axis=1), thresholds=thresholds).doubt[:, 0]
    assert near.argmax() == 19  # 0.20
    assert (np.diff(near[:20]) > 0).all()
    assert (np.diff(near[19:]) < 0).all()


def test_a_given_label_that_is_strongly_contradicted_comes_before_every_other_doubt() -> None:
    generator = np.random.default_rng(1)
    given = (generator.random((60, 3)) < 0.5).astype(float)
    probs = np.where(given == 1, 0.97, 0.03)
    probs[7, 1] = 1 - probs[7, 1]
    given[8] = np.nan
    probs[8] = [0.5, 0.03, 0.03]
    doubts = rate(probs, given=given, counts=np.array([1.0, 100, 100]))
    assert order_images(doubts)[:2].tolist() == [7, 8]
    word = "given" if given[7, 1] else "not given"
    assert doubts.explain_image(7) == f"fork: {word}, but its probability is {probs[7, 1]:.2f}"


def test_self_confidence_is_a_loops() -> None:
    generator = np.random.default_rng(2)
    level = generator.random((50, 3))
    given = generator.choice([0.0, 1.0, np.nan], (50, 3))
    found = rate_self_confidence(level, given)
    for row, label in np.ndindex(50, 3):
        alike = [level[other, label] for other in range(50) if given[other, label] == given[row, label]]
        own = [p if given[row, label] == 1 else 1 - p for p in (level[row, label], *alike)]
        expected = own[0] / np.mean(own[1:]) if alike else np.nan
        assert found[row, label] == pytest.approx(expected, nan_ok=True)


def test_image_and_patches_that_disagree_and_labels_claimed_from_co_occurrence_are_doubted() -> None:
    probs = np.array([[0.95, 0.02, 0.02], [0.95, 0.02, 0.02], [0.02, 0.95, 0.95], [0.02, 0.02, 0.95]])
    whole, parts = probs.copy(), probs.copy()
    whole[1, 0], parts[1, 0] = 0.99, 0.05
    doubts = rate(probs, image_probs=whole, patch_probs=parts, pairs=[Pair(label=2, context=1, rate=0.6)])
    assert order_images(doubts)[:2].tolist() == [1, 2]
    assert doubts.explain_image(1) == "cup: 0.95; the whole image says 0.99, its patches 0.05"
    assert doubts.explain_image(2) == "knife: 0.95; often claimed where there is fork"
    assert doubts.explain_image(3) == "knife: 0.95, the model is sure"


def test_a_rare_label_weighs_more() -> None:
    probs = np.array([[0.5, 0.01, 0.01], [0.01, 0.5, 0.01]])
    for counts, first in (([5.0, 500, 50], 0), ([500.0, 5, 50], 1)):
        assert order_images(rate(probs, counts=np.array(counts)))[0] == first


def test_no_label_fills_an_hour_and_the_order_is_one_of_all_images() -> None:
    """500 near copies for one label, a few that are a little less doubtful for another."""
    probs = np.full((520, 3), 0.01)
    probs[:500, 0], probs[500:, 1] = np.linspace(0.49, 0.5, 500), 0.3
    doubts = rate(probs)
    order = order_images(doubts)
    assert sorted(order.tolist()) == list(range(520))
    assert (order[:12] >= 500).any()
    assert (order[:80] >= 500).sum() >= 20  # none of them waits behind the 500
    one = order[order < 500]
    assert one.tolist() == sorted(one.tolist(), reverse=True)  # within a label, the more doubtful first


def test_unknown_labels_cost_no_doubt_but_are_asked_about() -> None:
    probs = np.array([[np.nan, 0.9, 0.1], [np.nan, 0.9, 0.1]])
    doubts = rate(probs, given=np.array([[1.0, np.nan, np.nan], [np.nan, np.nan, np.nan]]))
    assert (doubts.doubt[:, 0] == 0).all()
    assert doubts.explain(0, 0) == "cup: the model does not know it"
    assert doubts.choose(0) == [1, 0, 2]  # claimed first
    assert doubts.choose(1) == [1, 2, 0]
    assert order_label(doubts, 0).tolist() == [0]
    assert order_label(doubts, 0, claimed=False).tolist() == [1]


def test_images_of_which_nothing_is_known_come_last_as_a_sample() -> None:
    probs = np.full((200, 3), np.nan)
    probs[150] = [0.5, 0.01, 0.01]
    order = order_images(rate(probs))
    assert order[0] == 150
    assert sorted(order.tolist()) == list(range(200))
    assert 60 < order[1:100].mean() < 140  # not the first of a folder first
    np.testing.assert_array_equal(order, order_images(rate(probs)))


def test_a_grid_shows_the_most_doubtful_of_a_label_first() -> None:
    probs = np.stack([np.array([0.9, 0.55, 0.7, 0.45, 0.02, 0.2]), *np.full((2, 6), 0.5)], axis=1)
    doubts = rate(probs)
    assert order_label(doubts, 0).tolist() == [1, 2, 0]
    assert order_label(doubts, 0, claimed=False).tolist() == [3, 5, 4]


def test_of_many_labels_those_claimed_and_doubtful_are_asked_about() -> None:
    names = tuple(f"label {place}" for place in range(80))
    probs = np.full((3, 80), 0.001)
    probs[0, 40:43], probs[0, 50] = (0.9, 0.7, 0.45), 0.8
    probs[1, :30] = 0.9
    doubts = rate_doubts(probs, labels=names, thresholds=np.full(80, 0.5), counts=np.ones(80))
    assert doubts.choose(0) == [40, 50, 41, 42]
    assert doubts.choose(1) == list(range(30))  # every claim is looked at
    assert len(doubts.choose(2)) == 3
