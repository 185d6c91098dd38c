"""Conditional rates against a loop over images, written from the paper's words; curves against a loop over pairs."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_scores import make_scores
from scipy.stats import binomtest
from torch import Tensor

from pivotpatch.audit.cooccurrence import (
    PairRates,
    bound_lower,
    compare_pairs,
    conditional_rates,
    decide,
    find_false_positives,
    match_recall,
    rank_pairs,
    rate_pairs,
)
from pivotpatch.core.bootstrap import wilson_interval
from pivotpatch.core.policies import Fixed, PriorMatched, ThresholdPolicy, TopK
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores

NAN = float("nan")


@st.composite
def judgements(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    images, labels = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    size = images * labels
    decided = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    target = draw(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=size, max_size=size))
    return torch.tensor(decided).bool().view(images, labels), torch.tensor(target).view(images, labels)


def count_slowly(decided: Tensor, target: Tensor, i: int, *, j: int, shown: float) -> list[bool]:
    """The decisions about i in each image that shows j and whose i is `shown`."""
    pairs = zip(decided.tolist(), target.tolist(), strict=True)
    return [given_labels[i] for given_labels, truth in pairs if truth[j] == 1 and truth[i] == shown]


@given(judgements())
def test_rates_are_those_of_a_loop_over_images(case: tuple[Tensor, Tensor]) -> None:
    decided, target = case
    rates = conditional_rates(decided, target)
    for i in range(target.shape[1]):
        for j in range(target.shape[1]):
            for rate, count, shown in ((rates.tpr, rates.tpr_counts, 1.0), (rates.fpr, rates.fpr_counts, 0.0)):
                answers = count_slowly(decided, target, i, j=j, shown=shown)
                assert count[i, j] == len(answers)
                expected = sum(answers) / len(answers) if answers else NAN
                assert rate[i, j].item() == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("decided", "message"),
    [
        (torch.ones(2, 3), "conditional_rates: decided is torch.float32; give booleans"),
        (torch.ones(2, 1).bool(), r"conditional_rates: got decided \(2, 1\), target \(2, 3\)"),
    ],
)
def test_what_are_no_decisions_is_refused(decided: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        conditional_rates(decided, torch.ones(2, 3))


SCORES = make_scores(tuple(f"label {place}" for place in range(6)), count=300, patches=False)


@pytest.mark.parametrize("limit", [0.0, 0.4])
def test_pairs_are_those_above_the_limit_with_the_rates_of_all(limit: float) -> None:
    scores, policy = SCORES, Fixed(0.6)
    rates = rate_pairs(scores, policy=policy, min_probability=limit)
    decided = policy.decide(scores.probs("image"))
    wanted = {}
    for i, label in enumerate(scores.labels):
        absent = decided[scores.target[:, i] == 0, i].float().mean().item()
        for j, context in enumerate(scores.labels):
            both = count_slowly(decided, scores.target, i, j=j, shown=1.0)
            alone = count_slowly(decided, scores.target, i, j=j, shown=0.0)
            share = len(both) / (len(both) + len(alone))
            if i != j and share > limit:
                wanted[label, context] = share, sum(both) / len(both), sum(alone) / len(alone), absent
    columns = rates.probability, rates.tpr, rates.fpr, rates.overall_fpr
    found = zip(*(column.tolist() for column in columns), strict=True)
    assert {pair: pytest.approx(row) for pair, row in zip(rates.names, found, strict=True)} == wanted
    assert rates.definition == "fixed threshold 0.6"


def test_given_pairs_are_rated_whatever_their_probability_and_need_their_own_labels_alone() -> None:
    scores, pairs = SCORES, [("label 3", "label 1")]
    rates, everything = rate_pairs(scores, pairs=pairs), rate_pairs(scores, min_probability=0.0)
    assert rates.to_dict()["pairs"] == [everything.to_dict()["pairs"][everything.names.index(pairs[0])]]
    assert rate_pairs(scores.keep_labels([1, 2, 3]), pairs=pairs).to_dict() == rates.to_dict()
    with pytest.raises(InputError, match="unknown label 'label 9'; did you mean 'label"):
        rate_pairs(scores, pairs=[("label 1", "label 9")])


def test_without_a_policy_each_label_is_given_to_known_images_as_often_as_the_target_has_it() -> None:
    decided, target = decide(SCORES), SCORES.target
    assert target.isnan().any()
    assert not decided[target.isnan()].any()
    assert decided.sum(0).tolist() == (target == 1).sum(0).tolist()
    assert torch.equal(decided, decide(SCORES, policy=PriorMatched.from_target(target)))


@given(st.integers(0, 40), st.integers(1, 40))
def test_intervals_are_those_of_scipy(hits: int, count: int) -> None:
    hits = min(hits, count)
    low, high = wilson_interval(torch.tensor(hits / count, dtype=torch.float64), torch.tensor(count))
    oracle = binomtest(hits, count).proportion_ci(method="wilson")
    assert [low.item(), high.item()] == pytest.approx([oracle.low, oracle.high], abs=1e-9)


def test_nothing_is_known_of_a_rate_without_images() -> None:
    scores = Scores(("a", "b"), ("x",), torch.tensor([[1.0, 1.0]]), {"image": torch.zeros(1, 2)})
    rates = rate_pairs(scores, pairs=[("a", "b")])
    (row,) = rates.to_dict()["pairs"]
    assert (row["cfpr"], row["cfpr_low"], row["cfpr_high"], row["cfpr_pictures"]) == (None, 0.0, 1.0, 0)
    assert row["cfpr_few"]
    assert json.dumps(compare_pairs(rates, rates).to_dict(), allow_nan=False)


def make_rates(fpr: list[float], counts: list[int] | None = None, overall: list[float] | None = None) -> PairRates:
    ones = torch.ones(len(fpr))
    names = tuple((f"label {place}", "context") for place in range(len(fpr)))
    found = torch.tensor(counts or [10] * len(fpr)), torch.tensor(overall or [0.0] * len(fpr))
    return PairRates("", names, ones, ones, torch.tensor(fpr), ones.int(), *found)


def test_one_unlucky_image_is_listed_but_does_not_lead() -> None:
    ranked = rank_pairs(make_rates([1.0, NAN, 0.8, 0.1], [1, 0, 200, 500]))
    assert [label for label, _ in ranked.names] == ["label 2", "label 0", "label 3", "label 1"]  # the last has no rate
    assert [row["cfpr_few"] for row in ranked.to_dict()["pairs"]] == [False, True, False, True]
    rates = make_rates([0.8, 0.5], [300, 300], [0.75, 0.05])
    assert rank_pairs(rates, by="rate").names == rates.names
    assert rank_pairs(rates, by="gap").names == rates.names[::-1]  # how much the context adds


def test_false_positives_are_found_most_confident_first() -> None:
    target = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [NAN, 1.0]])
    logits = torch.tensor([[1.0, 0], [3.0, 0], [5.0, 0], [5.0, 0], [-1.0, 0], [9.0, 0]])
    scores = Scores(("bat", "glove"), tuple("abcdef"), target, {"image": logits})
    found = find_false_positives(scores, "bat", context="glove", decided=decide(scores, policy=Fixed(0.5)))
    assert [(one.picture, one.row) for one in found] == [("b", 1), ("a", 0)]
    assert found[0].probability == pytest.approx(1 / (1 + math.exp(-3)))
    rate = rate_pairs(scores, policy=Fixed(0.5), pairs=[("bat", "glove")])
    assert rate.fpr.item() == pytest.approx(len(found) / 3)


@pytest.mark.parametrize("policy", [PriorMatched((0.25, 0.25)), TopK(1)])
def test_rules_that_rank_tell_logits_apart_whose_probabilities_are_all_one(policy: ThresholdPolicy) -> None:
    logits = torch.tensor([[30.0, 31.0], [33.0, 32.0], [34.0, 35.0], [37.0, 36.0]])
    scores = Scores(("a", "b"), tuple("wxyz"), torch.zeros(4, 2), {"image": logits})
    assert (scores.probs("image") == 1).all()
    assert torch.equal(decide(scores, policy=policy), policy.decide(logits - 33))


def test_curves_and_counts_are_those_of_a_loop() -> None:
    other = make_scores(SCORES.labels, count=300, patches=False, seed=1, skill=1.0)
    model, baseline = rate_pairs(SCORES), rate_pairs(other)
    found = compare_pairs(model, baseline)
    for curve, rate, sign in ((found.cfpr, "fpr", -1), (found.ctpr, "tpr", 1)):
        pairs = sorted(zip(getattr(baseline, rate).tolist(), getattr(model, rate).tolist(), strict=True))
        assert curve.baseline.tolist() == [theirs for theirs, _ in pairs]
        assert sorted(zip(curve.baseline.tolist(), curve.model.tolist(), strict=True)) == pairs
        gains = [sign * (ours - theirs) for theirs, ours in pairs]
        assert curve.improved == sum(gain > 0 for gain in gains)
        assert curve.worse == sum(gain < 0 for gain in gains)
        assert curve.improved + curve.worse + curve.tied == len(model)
        assert curve.share_improved == curve.improved / len(gains)
    few = compare_pairs(make_rates([0.1, 0.2, 0.3, NAN]), make_rates([0.2, 0.2, 0.1, NAN])).cfpr
    assert (few.improved, few.worse, few.tied, few.undefined, few.share_improved) == (1, 1, 1, 1, 1 / 3)


def test_models_of_other_images_or_pairs_are_refused() -> None:
    rates = rate_pairs(SCORES)
    for other in (replace(rates, fpr_counts=rates.fpr_counts + 1), rates.select(torch.arange(3))):
        with pytest.raises(InputError, match="not judged on the same images and pairs; score the same data"):
            compare_pairs(rates, other)


def decide_slowly(scores: Scores, wanted: list[int]) -> Tensor:
    """Image after image from the highest score on, until so many of a label's positives are found."""
    given_labels = torch.zeros_like(scores.target, dtype=torch.bool)
    for label, count in enumerate(wanted):
        logits, truth = scores.get(scores.ranking)[:, label].tolist(), scores.target[:, label].tolist()
        found = 0
        for row in sorted(range(len(truth)), key=lambda row: -logits[row]):
            if found == count:
                break
            given_labels[row, label] = not math.isnan(truth[row])
            found += truth[row] == 1
    return given_labels


BETTER = make_scores(SCORES.labels, count=300, patches=False, seed=7, skill=2.3)


def test_at_equal_recall_both_find_as_many_and_give_no_more_than_that_takes() -> None:
    found = [int(each) for each in (decide(SCORES) & (SCORES.target == 1)).sum(0)]
    for matched, scores in zip(match_recall(BETTER, SCORES)[:2], (BETTER, SCORES), strict=True):
        torch.testing.assert_close(matched.decisions, decide_slowly(scores, found))
        assert (matched.decisions & (scores.target == 1)).sum(0).tolist() == found
    with pytest.raises(InputError, match="scores: images differ"):
        match_recall(BETTER, SCORES.select(torch.arange(299)))


def test_rounded_scores_are_as_good_at_equal_recall() -> None:
    """Whole blocks of equal scores, taken or left, would make a model worse than the same model with more digits."""
    rng = np.random.default_rng(0)
    target = (rng.random((2000, 12)) < 0.2).astype(np.float32)
    logits = torch.from_numpy(2.2 * target + rng.standard_normal(target.shape))
    labels, names = tuple("abcdefghijkl"), tuple(map(str, range(len(target))))
    exact, rough = (Scores(labels, names, torch.from_numpy(target), {"image": x}) for x in (logits, logits.round()))
    for first, second in ((exact, rough), (rough, exact)):
        matched = match_recall(first, second)
        ours, theirs = matched.model.decisions, matched.baseline.decisions
        assert (ours & (first.target == 1)).sum(0).tolist() == (theirs & (first.target == 1)).sum(0).tolist()
        alarms = [float((each & (first.target == 0)).sum()) for each in (ours, theirs)]
        assert 0.75 < alarms[0] / alarms[1] < 1.35
    blind = Scores(labels, names, exact.target, {"image": torch.zeros_like(logits)})  # what it finds, it finds by luck
    given, recall = match_recall(blind, exact).model.decisions, match_recall(blind, exact).recall
    torch.testing.assert_close(given.double().mean(0), recall.double(), atol=0.06, rtol=0)


def test_the_interval_of_lower_rates_is_that_of_resampled_images_with_thresholds_of_their_own() -> None:
    *policies, recall = match_recall(BETTER, SCORES)
    rates = [rate_pairs(scores, policy=each) for scores, each in zip((BETTER, SCORES), policies, strict=True)]
    curve = compare_pairs(*rates).cfpr
    interval = bound_lower(
        BETTER, SCORES, rates[0].names, recall=recall, resamples=60, generator=torch.Generator().manual_seed(0)
    )
    assert interval.value == pytest.approx(curve.improved / (curve.improved + curve.worse))
    generator, shares = torch.Generator().manual_seed(1), []
    for _ in range(60):
        rows = torch.randint(300, (300,), generator=generator)
        drawn = [scores.select(rows) for scores in (BETTER, SCORES)]
        wanted = [round(float(each)) for each in recall * (drawn[0].target == 1).sum(0)]
        counts = [conditional_rates(decide_slowly(scores, wanted), scores.target).fpr for scores in drawn]
        places = [(SCORES.labels.index(label), SCORES.labels.index(context)) for label, context in rates[0].names]
        signs = [float((counts[0] - counts[1])[place].sign()) for place in places]
        shares.append(signs.count(-1) / (signs.count(-1) + signs.count(1)))
    spread = torch.tensor(shares).quantile(torch.tensor([0.025, 0.975]))
    assert interval.high - interval.low == pytest.approx(float(spread[1] - spread[0]), abs=0.12)
    assert interval.low < interval.value < interval.high


def test_at_equal_recall_a_label_that_is_never_found_is_never_given() -> None:
    scores = make_scores(("a", "b", "c"), count=60, patches=False)
    scores.target[:, 1] = 0.0  # shown by no image
    for matched in match_recall(scores, scores)[:2]:
        assert matched.decisions.any(0).tolist() == [True, False, True]
    for matched in match_recall(scores, scores, policy=Fixed(1.0))[:2]:  # which finds none of any label
        assert not matched.decisions.any()
