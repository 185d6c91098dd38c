"""Calibration against scikit-learn and brute force, and its measures against loops."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, log_loss
from torch import Tensor
from torch.nn import functional as F

from pivotpatch.errors import InputError
from pivotpatch.tuning.calibration import (
    METHODS,
    Method,
    _prior_strength,
    calibrate_out_of_fold,
    draw_folds,
    fit_calibration,
    judge_calibration,
    reliability,
)

NAN = float("nan")


def draw(
    rows: int = 2000, labels: int = 5, *, slope: float | Tensor = 1.0, offset: float | Tensor = 0.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits (N,L) and a target that is there with probability sigmoid(slope * logits + offset)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.linspace(-3, 1, labels) + 1.5 * torch.randn(rows, labels, generator=generator)
    chance = torch.sigmoid(slope * logits + offset)
    return logits, (torch.rand(rows, labels, generator=generator) < chance).float()


def loss(probs: Tensor, target: Tensor) -> float:
    return judge_calibration(probs, target).log_loss


def test_platt_is_an_unpenalised_logistic_regression() -> None:
    logits, target = draw(slope=0.6, offset=-0.5)
    fitted = fit_calibration(logits, target, kind="image", method="platt")
    oracle = LogisticRegression(C=1e12, tol=1e-10, max_iter=1000)
    oracle.fit(logits.reshape(-1, 1).double().numpy(), target.flatten().numpy())
    assert set(fitted.slope) == {fitted.slope[0]}
    assert fitted.slope[0] == pytest.approx(oracle.coef_[0, 0], abs=1e-5)
    assert fitted.offset[0] == pytest.approx(oracle.intercept_[0], abs=1e-5)


@pytest.mark.parametrize("shift", [0, 6])
def test_temperature_is_the_best_single_number_that_reverses_no_ranking(shift: float) -> None:
    """Where all logits are too high, as a loss may make them, the best number would be below 0, and 0.01 is taken."""
    logits, target = draw(slope=0.4)
    logits = logits + shift
    fitted = fit_calibration(logits, target, kind="image", method="temperature")
    tried = torch.linspace(0.01, 1, 991, dtype=torch.float64)
    losses = [(F.softplus(slope * logits) - slope * logits * target).sum().item() for slope in tried]
    assert fitted.slope[0] == pytest.approx(tried[np.argmin(losses)].item(), abs=0.001)
    assert (fitted.slope[0] == pytest.approx(0.01)) == (shift > 0)
    assert fitted.offset == (0.0,) * 5


def test_labels_with_few_images_lean_on_the_others() -> None:
    """On new images the shrunk numbers beat both the common ones and each label's own."""
    generator = torch.Generator().manual_seed(1)
    slope, offset = 1 + 0.3 * torch.randn(40, generator=generator), 0.6 * torch.randn(40, generator=generator)
    logits, target = draw(120, 40, slope=slope, offset=offset, seed=2)
    fresh, truth = draw(4000, 40, slope=slope, offset=offset, seed=3)
    shrunk = fit_calibration(logits, target, kind="image")
    common = fit_calibration(logits, target, kind="image", method="platt")
    own = [fit_calibration(logits[:, [k]], target[:, [k]], kind="image", method="platt") for k in range(40)]
    apart = torch.cat([fit.apply(fresh[:, [k]]) for k, fit in enumerate(own)], dim=1)
    assert loss(shrunk.apply(fresh), truth) < loss(common.apply(fresh), truth)
    assert loss(shrunk.apply(fresh), truth) < loss(apart, truth)


@pytest.mark.parametrize("method", METHODS)
def test_scores_without_a_mistake_and_labels_without_a_positive_stay_finite(method: Method) -> None:
    target = (torch.arange(200)[:, None] % 5 == torch.arange(4)).float()
    target[:, 3] = 0
    fitted = fit_calibration(100 * (target - 0.5), target, kind="image", method=method)
    probs = fitted.apply(100 * (target - 0.5))
    assert torch.equal(probs > 0.5, target == 1)
    unlucky = fit_calibration(100 * (0.5 - target), target, kind="image", method=method)
    assert all(map(math.isfinite, unlucky.slope + unlucky.offset))


def ece_by_loop(probs: list[float], truth: list[float]) -> float:
    total = 0.0
    for number in range(15):
        low, high, last = number / 15, (number + 1) / 15, number == 14
        chosen = [i for i, prob in enumerate(probs) if low <= prob and (prob < high or last)]
        total += abs(sum(probs[i] for i in chosen) - sum(truth[i] for i in chosen))
    return total / len(probs)


@pytest.mark.parametrize("levels", [None, 8])
def test_expected_calibration_error_is_the_loop(levels: int | None) -> None:
    logits, target = draw(64, 4, slope=0.3)
    probs = torch.sigmoid(logits).double()
    probs = (probs * levels).round() / levels if levels else probs
    target[3, 1], target[:, 3] = NAN, NAN  # of the last nothing is known
    judged, columns = judge_calibration(probs, target), [(probs[:, k], target[:, k]) for k in range(3)]
    overall, *labels = (
        ece_by_loop(said[~truth.isnan()].tolist(), truth[~truth.isnan()].tolist())
        for said, truth in ((probs, target), *columns)
    )
    assert (judged.ece, judged.ece_per_label) == pytest.approx((overall, sum(labels) / 3))
    assert reliability(probs, target).ece == judged.ece


def test_brier_and_log_loss_are_scikit_learns() -> None:
    logits, target = draw()
    probs = torch.sigmoid(logits)
    probs[0, 0], target[0, 0] = 1.0, 0.0  # a sure mistake
    target[:, 2] = NAN
    judged, known = judge_calibration(probs, target), ~torch.isnan(target)
    p, t = probs[known].numpy(), target[known].numpy()
    assert judged.brier == pytest.approx(brier_score_loss(t, p), abs=1e-6)
    assert judged.log_loss == pytest.approx(log_loss(t, p), abs=1e-6)


def test_an_images_own_fold_has_no_say() -> None:
    logits, target = draw(300, 4, slope=0.5)
    folds = draw_folds(300)
    changed = target.clone()
    changed[folds[2]] = 1 - changed[folds[2]]
    one, other = calibrate_out_of_fold(logits, target), calibrate_out_of_fold(logits, changed)
    assert torch.equal(one[folds[2]], other[folds[2]])
    assert not torch.isclose(one[folds[1]], other[folds[1]]).any()


def test_what_cannot_be_fitted_or_judged_is_named() -> None:
    logits, target = draw(10)
    with pytest.raises(InputError, match="there is no positive or no negative image"):
        fit_calibration(logits, torch.zeros_like(target), kind="image")
    with pytest.raises(InputError, match="calibration: unknown method 'plat'; did you mean 'platt'"):
        fit_calibration(logits, target, kind="image", method="plat")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="judge_calibration: no label is known"):
        judge_calibration(logits.sigmoid(), torch.full_like(target, NAN))


def test_labels_are_drawn_to_what_they_share_as_strongly_as_they_differ() -> None:
    generator, common = torch.Generator().manual_seed(0), torch.tensor([[0.8], [-0.5]], dtype=torch.float64)
    logits = 1.5 * torch.randn(400, 400, generator=generator, dtype=torch.float64)
    for spread in (torch.tensor([[0.3], [0.6]]), torch.zeros(2, 1)):  # of the labels' own slopes and offsets
        own = common + spread * torch.randn(2, 400, generator=generator, dtype=torch.float64)
        target = (torch.rand(logits.shape, generator=generator) < torch.sigmoid(own[0] * logits + own[1])).double()
        assert (_prior_strength(logits, target, common).rsqrt() - spread).abs().max() < 0.1
