"""Conditional rates against a loop over pictures, written from the paper's words."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from torch import Tensor

from pivotpatch.audit import cooccurrence
from pivotpatch.audit.cooccurrence import (
    PairRates,
    conditional_rates,
    decide,
    find_false_positives,
    rank_pairs,
    rate_pairs,
    wilson_interval,
)
from pivotpatch.core.policies import Fixed, PriorMatched, ThresholdPolicy, TopK
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores

NAN = float("nan")


@st.composite
def judgements(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    pictures, labels = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    size = pictures * labels
    decided = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    target = draw(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=size, max_size=size))
    return torch.tensor(decided).bool().view(pictures, labels), torch.tensor(target).view(pictures, labels)


def count_slowly(decided: Tensor, target: Tensor, i: int, *, j: int, shown: float) -> list[bool]:
    """The decisions about i in each picture that shows j and whose i is `shown`."""
    pairs = zip(decided.tolist(), target.tolist(), strict=True)
    return [given_labels[i] for given_labels, truth in pairs if truth[j] == 1 and truth[i] == shown]


@given(judgements())
def test_rates_are_those_of_a_loop_over_pictures(case: tuple[Tensor, Tensor]) -> None:
    decided, target = case
    rates = conditional_rates(decided, target)
    for i in range(target.shape[1]):
        for j in range(target.shape[1]):
            for rate, count, shown in ((rates.tpr, rates.tpr_counts, 1.0), (rates.fpr, rates.fpr_counts, 0.0)):
                answers = count_slowly(decided, target, i, j=j, shown=shown)
                assert count[i, j] == len(answers)
                if answers:
                    assert rate[i, j].item() == pytest.approx(sum(answers) / len(answers))
                else:
                    assert math.isnan(rate[i, j])


def test_pictures_in_several_chunks_count_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    decided = torch.rand(50, 5, generator=generator) < 0.5
    target = torch.randint(0, 2, (50, 5), generator=generator).float()
    whole = conditional_rates(decided, target)
    monkeypatch.setattr(cooccurrence, "_CHUNK", 35)
    for parts, once in zip(conditional_rates(decided, target), whole, strict=True):
        assert torch.equal(parts.nan_to_num(-1), once.nan_to_num(-1))


def test_the_second_label_is_the_condition() -> None:
    """A model that gives "bat" wherever it sees "glove" is caught in {bat; glove} and not in {glove; bat}."""
    target = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])  # bat, glove
    rates = conditional_rates(torch.tensor([[True, True], [True, True], [True, False]]), target)
    assert rates.fpr[0, 1] == 1
    assert rates.fpr[1, 0] == 0


@pytest.mark.parametrize(
    ("decided", "target", "message"),
    [
        (torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 2), "shape"),
        (torch.ones(3, dtype=torch.bool), torch.ones(3), "shape"),
        (torch.ones(2, 2), torch.ones(2, 2), "decided is torch.float32; give decisions"),
        (torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]]), "target holds -1"),
    ],
)
def test_what_is_no_judgement_is_refused(decided: Tensor, target: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        conditional_rates(decided, target)


def make_scores(pictures: int = 300, labels: int = 6, *, unknown: float = 0.1, seed: int = 0) -> Scores:
    generator = torch.Generator().manual_seed(seed)
    target = (torch.rand(pictures, labels, generator=generator) < 0.4).float()
    target[torch.rand(pictures, labels, generator=generator) < unknown] = NAN
    logits = 2 * target.nan_to_num(0) - 1 + torch.randn(pictures, labels, generator=generator)
    names = tuple(f"label {place}" for place in range(labels))
    return Scores(names, tuple(f"{place}.jpg" for place in range(pictures)), target, {"image": logits})


@pytest.mark.parametrize("limit", [0.0, 0.4, 0.99])
def test_pairs_are_those_above_the_limit_with_the_rates_of_all(limit: float) -> None:
    scores = make_scores()
    policy = Fixed(0.6)
    rates = rate_pairs(scores, policy=policy, min_probability=limit)
    decided = policy.decide(scores.probs("image"))
    wanted = {}
    for i, label in enumerate(scores.labels):
        wrong = count_slowly(decided, scores.target, i, j=i, shown=0.0)
        assert wrong == []  # a label is no company of its own
        absent = [
            given_labels[i]
            for given_labels, t in zip(decided.tolist(), scores.target.tolist(), strict=True)
            if t[i] == 0
        ]
        for j, company in enumerate(scores.labels):
            both = count_slowly(decided, scores.target, i, j=j, shown=1.0)
            alone = count_slowly(decided, scores.target, i, j=j, shown=0.0)
            share = len(both) / (len(both) + len(alone))
            if i != j and share > limit:
                wanted[label, company] = (
                    share,
                    sum(both) / len(both),
                    sum(alone) / len(alone),
                    sum(absent) / len(absent),
                )
    found = zip(
        rates.probability.tolist(), rates.tpr.tolist(), rates.fpr.tolist(), rates.overall_fpr.tolist(), strict=True
    )
    assert {pair: pytest.approx(row) for pair, row in zip(rates.names, found, strict=True)} == wanted
    assert rates.definition == "fixed threshold 0.6"


def test_given_pairs_are_rated_whatever_their_probability() -> None:
    scores = make_scores()
    chosen = [("label 3", "label 1"), ("label 0", "label 5")]
    rates = rate_pairs(scores, pairs=chosen)
    assert rates.names == tuple(chosen)
    everything = rate_pairs(scores, min_probability=0.0)
    place = everything.names.index(chosen[0])
    for row, whole in zip(rates.to_dict()["pairs"], [everything.to_dict()["pairs"][place]], strict=False):
        assert row == whole


def test_a_policy_that_matches_priors_decides_about_known_pictures_only() -> None:
    scores = make_scores(unknown=0.3)
    decided = decide(scores, policy=PriorMatched.from_target(scores.target))
    assert not decided[scores.target.isnan()].any()
    assert decided.sum(0).tolist() == (scores.target == 1).sum(0).tolist()


@given(st.integers(0, 40), st.integers(1, 40))
def test_intervals_are_those_of_scipy(hits: int, count: int) -> None:
    hits = min(hits, count)
    low, high = wilson_interval(torch.tensor(hits / count, dtype=torch.float64), torch.tensor(count))
    oracle = binomtest(hits, count).proportion_ci(method="wilson")
    assert [low.item(), high.item()] == pytest.approx([oracle.low, oracle.high], abs=1e-9)


def test_nothing_is_known_of_a_rate_without_pictures() -> None:
    scores = Scores(("a", "b"), ("x",), torch.tensor([[1.0, 1.0]]), {"image": torch.zeros(1, 2)})
    rates = rate_pairs(scores, pairs=[("a", "b")])
    (row,) = rates.to_dict()["pairs"]
    assert (row["cfpr"], row["cfpr_low"], row["cfpr_high"], row["cfpr_pictures"]) == (None, 0.0, 1.0, 0)
    assert row["cfpr_few"]
    assert len(rank_pairs(rates)) == 0
    assert json.loads(json.dumps(rates.to_dict(), allow_nan=False))


def make_rates(fpr: list[float], counts: list[int], overall: list[float] | None = None) -> PairRates:
    size = len(fpr)
    names = tuple(f"label {place}" for place in range(size))
    ones = torch.ones(size)
    return PairRates(
        names,
        "",
        label=torch.arange(size),
        company=torch.arange(size).roll(1),
        probability=ones,
        tpr=ones,
        fpr=torch.tensor(fpr),
        tpr_counts=ones.int(),
        fpr_counts=torch.tensor(counts),
        overall_fpr=torch.tensor(overall or [0.0] * size),
    )


def test_one_unlucky_picture_is_listed_but_does_not_lead() -> None:
    ranked = rank_pairs(make_rates([1.0, 0.8, 0.1], [1, 200, 500]))
    assert ranked.label.tolist() == [1, 0, 2]
    assert [row["cfpr_few"] for row in ranked.to_dict()["pairs"]] == [False, True, False]


def test_the_gap_asks_how_much_company_adds() -> None:
    rates = make_rates([0.8, 0.5], [300, 300], [0.75, 0.05])
    assert rank_pairs(rates, by="rate").label.tolist() == [0, 1]
    assert rank_pairs(rates, by="gap").label.tolist() == [1, 0]
    with pytest.raises(InputError, match="unknown order 'gaps'; did you mean 'gap'"):
        rank_pairs(rates, by="gaps")  # type: ignore[arg-type]


def test_false_positives_are_found_most_confident_first() -> None:
    target = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [NAN, 1.0]])
    logits = torch.tensor([[1.0, 0], [3.0, 0], [5.0, 0], [5.0, 0], [-1.0, 0], [9.0, 0]])
    scores = Scores(("bat", "glove"), tuple("abcdef"), target, {"image": logits})
    found = find_false_positives(scores, "bat", company="glove", policy=Fixed(0.5))
    assert [(one.picture, one.row) for one in found] == [("b", 1), ("a", 0)]
    assert found[0].probability == pytest.approx(1 / (1 + math.exp(-3)))
    rate = rate_pairs(scores, policy=Fixed(0.5), pairs=[("bat", "glove")])
    assert rate.fpr.item() == pytest.approx(len(found) / 3)


def test_without_a_policy_each_label_is_given_as_often_as_the_target_has_it() -> None:
    scores = make_scores()
    known = ~scores.target.isnan()
    assert torch.equal((decide(scores) & known).sum(0), (scores.target == 1).sum(0))
    assert rate_pairs(scores).definition == PriorMatched.from_target(scores.target).definition
    label, company = rank_pairs(rate_pairs(scores)).names[0]
    wanted = find_false_positives(scores, label, company=company, decided=decide(scores))
    assert find_false_positives(scores, label, company=company) == wanted != []


def test_an_unknown_name_or_limit_is_refused() -> None:
    scores = make_scores(20)
    with pytest.raises(InputError, match="unknown label 'label 9'; did you mean 'label"):
        rate_pairs(scores, pairs=[("label 1", "label 9")])
    with pytest.raises(InputError, match="min_probability is 1.5; give a share"):
        rate_pairs(scores, min_probability=1.5)


@pytest.mark.parametrize("policy", [PriorMatched((0.25, 0.25)), TopK(1)])
def test_rules_that_rank_tell_logits_apart_whose_probabilities_are_all_one(policy: ThresholdPolicy) -> None:
    logits = torch.tensor([[30.0, 31.0], [33.0, 32.0], [34.0, 35.0], [37.0, 36.0]])
    scores = Scores(("a", "b"), tuple("wxyz"), torch.zeros(4, 2), {"image": logits})
    assert (scores.probs("image") == 1).all()
    assert torch.equal(decide(scores, policy=policy), policy.decide(logits - 33))
    assert decide(scores, policy=policy).sum() == (2 if isinstance(policy, PriorMatched) else 4)


def test_given_pairs_know_their_own_labels_alone() -> None:
    scores = make_scores()
    few = Scores(scores.labels[1:4], scores.pictures, scores.target[:, 1:4], {"image": scores.get("image")[:, 1:4]})
    pairs = [("label 3", "label 1")]
    one, other = rate_pairs(scores, pairs=pairs), rate_pairs(few, pairs=pairs)
    assert one.labels == other.labels == ("label 3", "label 1")
    assert one.to_dict() == other.to_dict()
    assert len(rate_pairs(scores, pairs=[])) == 0
