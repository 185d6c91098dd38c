"""Curves and shares against a loop over pairs."""

import json
from dataclasses import replace

import pytest
import torch

from pivotpatch.audit.cooccurrence import PairRates, rate_pairs
from pivotpatch.audit.pair_comparison import compare_pairs
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores

NAN = float("nan")


def make_scores(company: float, *, seed: int) -> Scores:
    """A model that is pulled towards label i + 1 by label i."""
    generator = torch.Generator().manual_seed(0)
    target = (torch.rand(400, 8, generator=generator) < 0.3).float()
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * target - 2 + company * target.roll(1, dims=1) + torch.randn(400, 8, generator=generator)
    return Scores(tuple("abcdefgh"), tuple(map(str, range(400))), target, {"image": logits})


def test_counts_are_those_of_a_loop_and_sum_to_all_pairs() -> None:
    model, baseline = (rate_pairs(make_scores(pull, seed=seed)) for pull, seed in ((0.3, 1), (1.5, 2)))
    found = compare_pairs(model, baseline)
    for curve, ours, theirs, sign in (
        (found.cfpr, model.fpr, baseline.fpr, -1),
        (found.ctpr, model.tpr, baseline.tpr, 1),
    ):
        gains = [sign * (a - b) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)]
        assert curve.improved == sum(gain > 0 for gain in gains)
        assert curve.worse == sum(gain < 0 for gain in gains)
        assert curve.tied == sum(gain == 0 for gain in gains)
        assert curve.improved + curve.worse + curve.tied + curve.undefined == len(model)
        assert curve.share_improved == curve.improved / len(gains)


def test_curves_rise_with_the_baseline_and_keep_pairs_together() -> None:
    model, baseline = (rate_pairs(make_scores(pull, seed=seed)) for pull, seed in ((0.3, 1), (1.5, 2)))
    for curve, rate in ((compare_pairs(model, baseline).cfpr, "fpr"), (compare_pairs(model, baseline).ctpr, "tpr")):
        assert (curve.baseline.diff() >= 0).all()
        assert torch.equal(curve.baseline, getattr(baseline, rate)[curve.pairs])
        assert torch.equal(curve.model, getattr(model, rate)[curve.pairs])


def test_a_model_that_company_does_not_pull_improves_the_pairs_that_it_pulled() -> None:
    model, baseline = make_scores(0.0, seed=1), make_scores(3.0, seed=1)
    pairs = [(baseline.labels[(place + 1) % 8], baseline.labels[place]) for place in range(8)]
    found = compare_pairs(rate_pairs(model, pairs=pairs), rate_pairs(baseline, pairs=pairs))
    assert found.cfpr.share_improved == 1.0
    assert found.ctpr.improved == 0  # company also helped where the object was there


def make_rates(fpr: list[float]) -> PairRates:
    counts = torch.tensor([0 if value != value else 10 for value in fpr])
    ones = torch.ones(len(fpr))
    places = torch.arange(len(fpr))
    return PairRates(("a", "b"), "", places, places, ones, ones, torch.tensor(fpr), counts, counts, ones)


def test_ties_and_pairs_without_pictures_are_counted_apart() -> None:
    found = compare_pairs(make_rates([0.1, 0.2, 0.3, NAN]), make_rates([0.2, 0.2, 0.1, NAN])).cfpr
    assert (found.improved, found.worse, found.tied, found.undefined) == (1, 1, 1, 1)
    assert found.share_improved == pytest.approx(1 / 3)


def test_no_pair_at_all_is_no_number() -> None:
    found = compare_pairs(make_rates([NAN]), make_rates([NAN]))
    assert found.cfpr.to_dict()["share_improved"] is None
    assert json.dumps(found.to_dict(), allow_nan=False)


def test_models_of_other_pictures_or_labels_are_refused() -> None:
    rates = rate_pairs(make_scores(1.0, seed=1))
    for other in (
        replace(rates, labels=rates.labels[::-1]),
        replace(rates, fpr_counts=rates.fpr_counts + 1),
        rates.select(torch.arange(3)),
    ):
        with pytest.raises(InputError, match="not judged on the same pictures, labels and pairs; score the same data"):
            compare_pairs(rates, other)
