"""What is fitted is what its parts fit, in order, and what is told of it is honest."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from made_scores import make_scores

from pivotpatch.core.metrics import average_precision, precision_recall
from pivotpatch.core.policies import PerLabel
from pivotpatch.inference.scores import Scores
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.tuning.calibration import METHODS, calibrate_out_of_fold, draw_folds, fit_calibration, judge_calibration
from pivotpatch.tuning.mixing import MixingStudy, fit_mixing
from pivotpatch.tuning.thresholds import BestF1, Goal, PrecisionAtLeast, fit_thresholds
from pivotpatch.tuning.tune import CloserLook, Mixing, Scaling, Tuning, effort_curve, fit_adaptive, tune_scores

LABELS = tuple("abcde")
SCORES = make_scores(LABELS, count=200)
PLAIN = make_scores(LABELS, count=200, patches=False)
BEST_F1 = BestF1()


@cache
def tune(
    scores: Scores,
    *,
    mixing: Mixing = "auto",
    calibration: Scaling = "auto",
    goal: Goal = BEST_F1,
    closer: CloserLook | None = None,
    resamples: int = 50,
) -> Tuning:
    return tune_scores(
        scores,
        mixing=mixing,
        calibration=calibration,
        goal=goal,
        closer=closer,
        resamples=resamples,
        generator=torch.Generator().manual_seed(0),
    )


@cache
def fit(scores: Scores) -> MixingStudy:
    return fit_mixing(scores, resamples=50, generator=torch.Generator().manual_seed(0))


def test_calibration_belongs_to_the_new_mixture_and_thresholds_to_calibrated_probabilities() -> None:
    found = tune(SCORES, mixing="global", calibration="platt")
    mixture = fit(SCORES).shared
    assert found.lam == mixture.lam
    assert found.lam != 1  # else this test would say nothing
    mixed = SCORES.remix(lam=mixture.lam, temperature=mixture.temperature)
    calibration = fit_calibration(mixed.scaled("tde"), SCORES.target, kind="tde", method="platt")
    assert found.calibration == calibration
    honest = judge_calibration(torch.sigmoid(mixture.logits), SCORES.target, labels=LABELS)
    assert found.qualities["none"] == honest  # and the new mixture is judged out of fold
    assert honest != judge_calibration(mixed.probs("tde"), SCORES.target, labels=LABELS)
    probs = calibration.apply(mixed.scaled("tde"))
    assert found.thresholds == fit_thresholds(probs, SCORES.target, goal=BEST_F1, labels=LABELS)


def test_probabilities_are_judged_out_of_fold() -> None:
    found = tune(SCORES, mixing="keep")
    logits, target = SCORES.scaled("tde"), SCORES.target
    assert list(found.qualities) == ["before", "none", *METHODS]
    assert found.qualities["before"] == found.qualities["none"]
    for method in METHODS:
        honest = calibrate_out_of_fold(logits, target, method=method)
        assert found.qualities[method] == judge_calibration(honest, target, labels=LABELS)
    best = min(found.qualities, key=lambda name: found.qualities[name].overall.log_loss)
    assert found.method == best
    assert found.curves["after"].ece == pytest.approx(found.qualities[best].overall.ece_width)


def test_decisions_are_judged_out_of_fold() -> None:
    found = tune(PLAIN, calibration="platt")
    logits, target = PLAIN.get("image"), PLAIN.target
    fold, decided = draw_folds(len(PLAIN)), torch.zeros(target.shape)
    for number in range(5):
        rows, others = (fold == number).nonzero()[:, 0], (fold != number).nonzero()[:, 0]
        fitted = fit_calibration(logits[others], target[others], kind="image", method="platt")
        thresholds = fit_thresholds(fitted.apply(logits[others]), target[others], goal=BEST_F1)
        decided[rows] = thresholds.policy.decide(fitted.apply(logits[rows])).float()
    assert found.after == precision_recall(decided, target, labels=LABELS)
    assert found.before == precision_recall(PLAIN.probs("image"), target, labels=LABELS)
    assert found.calibration is not None
    rule = PerLabel(found.thresholds.values)
    fitted_to = precision_recall(found.calibration.apply(logits), target, policy=rule, labels=LABELS)
    assert found.after.macro_f1 < fitted_to.macro_f1  # thresholds flatter the images that chose them


def test_targets_of_noise_gain_nothing() -> None:
    """Fitted and judged on the same images, thresholds of pure noise would seem to help."""
    generator = torch.Generator().manual_seed(5)
    scores = make_scores(LABELS, count=400)
    found = tune(replace(scores, target=(torch.rand(scores.target.shape, generator=generator) < 0.3).float()))
    assert found.mixing is not None
    assert found.mixing.chosen is found.mixing.before
    assert found.after.OP == pytest.approx(0.3, abs=0.05)
    assert found.qualities[found.method].overall.ece_width < 0.05


def test_a_model_keeps_what_was_fitted() -> None:
    model = PatchClassifier("test_resnet", LABELS, image_size=32, closer_size=48)
    found = tune(SCORES, mixing="global", calibration="none")
    found.store(model)
    assert model.closer_size == 48  # no effort was fitted, so that what it was trained for stays
    assert (model.lam, model.temperature) == (found.lam, found.temperature)
    assert (model.calibration, model.thresholds) == (None, found.thresholds.values)
    assert (found.adaptive, found.effort) == (None, None)
    closer = CloserLook(64, 4, make_scores(LABELS, count=200, seed=1))
    for found in (tune(SCORES, mixing="keep", closer=closer), tune(SCORES, mixing="keep")):
        found.store(model)
        assert model.closer_size == found.closer_size
        assert model.adaptive == found.adaptive
    plain, found = MultiLabelClassifier("test_vit", LABELS, image_size=32), tune(PLAIN, goal=PrecisionAtLeast(0.9))
    found.store(plain)
    assert (found.kind, found.mixing, found.effort) == ("image", None, None)
    assert (plain.calibration, plain.thresholds) == (found.calibration, found.thresholds.values)


def test_effort_is_fitted_to_the_new_mixture_and_judged_on_honest_logits() -> None:
    found = tune(SCORES, mixing="global", calibration="platt")
    assert found.mixing is not None
    assert found.adaptive == fit_adaptive(SCORES)  # the image's logits know of no lam
    assert found.effort is not None
    assert found.effort.points[-1].mean == pytest.approx(found.mixing.shared.mean)
    assert found.effort.points[0].mean == pytest.approx(average_precision(SCORES.get("image"), SCORES.target).mean)
    kept = tune(SCORES, mixing="keep", calibration="temperature")
    assert kept.effort == effort_curve(SCORES, patch_cost=4.0, method="temperature")


def test_a_closer_look_is_mixed_as_the_patches_are_out_of_fold() -> None:
    closer = CloserLook(48, 2.25, make_scores(LABELS, count=200, seed=1))
    found = tune(SCORES, mixing="global", calibration="platt", closer=closer)
    plain = tune(SCORES, mixing="global", calibration="platt")
    mixture = fit(SCORES).shared
    final = SCORES.remix(lam=mixture.lam, temperature=mixture.temperature)
    unseen = replace(final, logits={**final.logits, "tde": mixture.logits * (1 + mixture.lam)})
    remixed = closer.scores.remix(lam=mixture.lam, temperature=mixture.temperature)
    mixed = mixture.mix(closer.scores) * (1 + mixture.lam)
    again = closer._replace(scores=replace(remixed, logits={**remixed.logits, "tde": mixed}))
    assert found.effort == effort_curve(unseen, patch_cost=4.0, closer=again, method="platt")
    assert found.effort != effort_curve(unseen, patch_cost=4.0, closer=closer, method="platt")
    assert found.effort != plain.effort
    assert plain.effort is not None
    assert found.effort.points[-1] == plain.effort.points[-1]
    # All else knows of no closer look, but for its own calibration.
    own = fit_calibration(remixed.scaled("tde"), remixed.target, kind="tde", method="platt")
    assert plain.adaptive is not None
    assert (found.calibration, found.thresholds, found.adaptive) == (
        plain.calibration,
        plain.thresholds,
        replace(plain.adaptive, again=own),
    )
    assert found.lam == plain.lam
