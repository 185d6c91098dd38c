"""What is fitted is what its parts fit, in order, and what is told of it is honest."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from made_scores import make_scores
from sklearn.metrics import average_precision_score

from pivotpatch.core.metrics import average_precision, precision_recall
from pivotpatch.core.policies import Fixed, PerLabel
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.values import Patching
from pivotpatch.tuning.calibration import (
    METHODS,
    Method,
    calibrate_out_of_fold,
    draw_folds,
    fit_calibration,
    judge_calibration,
)
from pivotpatch.tuning.mixing import MixingStudy, fit_mixing
from pivotpatch.tuning.thresholds import BEST_F1, PREFERRED, fit_thresholds, parse_goal
from pivotpatch.tuning.tune import (
    EFFORTS,
    EffortCurve,
    EffortPoint,
    Mixing,
    Scaling,
    effort_curve,
    fit_adaptive,
    tune_scores,
)

LABELS = tuple("abcde")
SHARP = make_scores(LABELS, count=200)
NOISE = 3 * torch.randn(SHARP.target.shape, generator=torch.Generator().manual_seed(0))
SCORES = replace(
    SHARP, logits={**SHARP.logits, "image": SHARP.get("image") + NOISE}
).remix()  # so that a larger lam pays
PLAIN = make_scores(LABELS, count=200, patches=False)
MODEL = PatchClassifier("test_resnet", LABELS, image_size=32)
CLOSER = replace(make_scores(LABELS, count=200, seed=1), closer_size=40)


@cache
def tune(
    scores: Scores,
    *,
    mixing: Mixing = "auto",
    calibration: Scaling = "auto",
    goal: str = "f1",
    closer: Scores | None = None,
) -> Any:
    return tune_scores(
        scores,
        mixing=mixing,
        calibration=calibration,
        goal=goal if goal in PREFERRED else parse_goal(goal),
        model=MODEL,
        closer=closer,
        resamples=50,
        generator=torch.Generator().manual_seed(0),
    )


@cache
def fit(scores: Scores) -> MixingStudy:
    return fit_mixing(scores, resamples=50, generator=torch.Generator().manual_seed(0))


def test_calibration_belongs_to_the_new_mixture_and_thresholds_to_calibrated_probabilities() -> None:
    found = tune(SCORES, calibration="platt")
    mixture = fit(SCORES)
    assert [found.lam, found.temperature] == [*mixture.fitted]
    assert found.lam != 1  # else this test would say nothing
    mixed = SCORES.remix(**mixture.fitted._asdict())
    calibration = fit_calibration(mixed.scaled("tde"), SCORES.target, kind="tde", method="platt")
    assert found.calibration == calibration
    honest = judge_calibration(mixture.scores.probs("tde"), SCORES.target)
    assert found.qualities["none"] == honest  # and the new mixture is judged out of fold
    assert honest != judge_calibration(mixed.probs("tde"), SCORES.target)
    probs = calibration.apply(mixed.scaled("tde"))
    assert found.thresholds == fit_thresholds(probs, SCORES.target, goal=BEST_F1, labels=LABELS)


def test_probabilities_are_judged_out_of_fold() -> None:
    found = tune(SCORES, mixing="keep")
    logits, target = SCORES.scaled("tde"), SCORES.target
    assert list(found.qualities) == ["before", *METHODS]
    assert found.qualities["before"] == found.qualities["none"]
    for method in METHODS[1:]:
        honest = calibrate_out_of_fold(logits, target, method=method)
        assert found.qualities[method] == judge_calibration(honest, target)
    best = min(found.qualities, key=lambda name: found.qualities[name].log_loss)
    assert found.method == best
    assert found.curves["after"].ece == pytest.approx(found.qualities[best].ece)


def test_decisions_are_judged_out_of_fold() -> None:
    found = tune(PLAIN, calibration="platt")
    logits, target = PLAIN.get("image"), PLAIN.target
    decided = torch.zeros(target.shape)
    for rows in draw_folds(len(PLAIN)):
        fitted = fit_calibration(logits[~rows], target[~rows], kind="image", method="platt")
        thresholds = fit_thresholds(fitted.apply(logits[~rows]), target[~rows], goal=BEST_F1)
        decided[rows] = thresholds.policy.decide(fitted.apply(logits[rows])).float()
    expected = precision_recall(decided, target, labels=LABELS)
    assert found.after == replace(expected, definition="fitted thresholds, out of fold")
    assert found.before == precision_recall(PLAIN.probs("image"), target, labels=LABELS)
    rule = PerLabel(found.thresholds.values)
    fitted_to = precision_recall(found.calibration.apply(logits), target, policy=rule, labels=LABELS)
    assert found.after.macro_f1 < fitted_to.macro_f1  # thresholds flatter the images that chose them


def test_preferences_are_fitted_besides_and_judged_out_of_fold() -> None:
    found, other = tune(PLAIN), tune(PLAIN, goal="recall")
    probs = found.calibration.apply(PLAIN.get("image"))
    judged = {
        name: precision_recall(probs, PLAIN.target, policy=fitted.policy) for name, fitted in found.preferences.items()
    }
    assert judged["precision"].OP >= 0.86
    assert judged["recall"].OR >= 0.8
    cuts = (Fixed(step / 400) for step in range(401))
    best = max(precision_recall(probs, PLAIN.target, policy=cut).OF1 for cut in cuts)
    assert best - 1e-9 <= judged["balance"].OF1 <= best + 0.01
    assert other.preferences == found.preferences
    assert (other.thresholds, other.after) == (found.preferences["recall"], found.preferred["recall"])
    decided = {name: (each.OP, each.OR) for name, each in found.preferred.items()}  # on images that had no part in it
    assert decided["precision"][0] == pytest.approx(0.86, abs=0.05)
    assert decided["recall"][1] == pytest.approx(0.8, abs=0.05)
    model = MultiLabelClassifier("test_vit", LABELS, image_size=32)
    other.store(model)
    assert model.preferences == {name: fitted.values for name, fitted in found.preferences.items()}
    some = tune(PLAIN.keep_labels([1, 3]), goal="recall")
    before = dict(model.preferences)
    some.store(model)
    for name, values in model.preferences.items():
        expected = [*before[name]]
        expected[1], expected[3] = some.preferences[name].values
        assert list(values) == expected
    model.thresholds = None
    assert model.preferences == {}


def test_targets_of_noise_gain_nothing() -> None:
    """Fitted and judged on the same images, thresholds of pure noise would seem to help."""
    generator = torch.Generator().manual_seed(5)
    scores = make_scores(LABELS, count=400)
    found = tune(replace(scores, target=(torch.rand(scores.target.shape, generator=generator) < 0.3).float()))
    assert not found.mixing.pays
    assert found.after.OP == pytest.approx(0.3, abs=0.05)
    assert found.qualities[found.method].ece < 0.05


def test_a_model_keeps_what_was_fitted() -> None:
    model = PatchClassifier("test_resnet", LABELS, image_size=32, patching=Patching(closer_size=48))
    found = tune(SCORES, calibration="none")
    found.store(model)
    assert model.closer_size == 48  # no effort was fitted, so that what it was trained for stays
    assert (model.patching.lam, model.patching.temperature) == (found.lam, found.temperature)
    assert (model.calibration, model.thresholds) == (None, found.thresholds.values)
    assert (found.adaptive, found.effort) == (None, None)
    for found in (tune(SCORES, mixing="keep", closer=CLOSER), tune(SCORES, mixing="keep")):
        found.store(model)
        assert model.closer_size == found.closer_size
        assert model.adaptive == found.adaptive
    some = replace(tune(SCORES.keep_labels([0, 2]), mixing="keep"), lam=0.125)
    with pytest.raises(InputError, match="store: lam 0.125 and temperature .* are not those of the model's labels"):
        some.store(model)
    plain, found = MultiLabelClassifier("test_vit", LABELS, image_size=32), tune(PLAIN, goal="precision:0.9")
    found.store(plain)
    assert (found.kind, found.mixing, found.effort) == ("image", None, None)
    assert (plain.calibration, plain.thresholds) == (found.calibration, found.thresholds.values)


def test_effort_is_fitted_to_the_new_mixture_and_judged_on_honest_logits() -> None:
    found = tune(SCORES, calibration="platt")
    assert found.adaptive == fit_adaptive(SCORES.get("image"), SCORES.target)  # the image's logits know of no lam
    assert found.effort.points[-1].mean == pytest.approx(found.mixing.mean_fitted)
    assert found.effort.points[0].mean == pytest.approx(average_precision(SCORES.get("image"), SCORES.target).mean)
    kept = tune(SCORES, mixing="keep", calibration="temperature")
    assert kept.effort == effort_curve(SCORES, patch_cost=4.0, method="temperature")


def test_a_closer_look_is_mixed_as_the_patches_are_out_of_fold() -> None:
    found = tune(SCORES, calibration="platt", closer=CLOSER)
    plain = tune(SCORES, calibration="platt")
    mixture = fit(SCORES)
    expected, other = (
        effort_curve(mixture.scores, patch_cost=4.0, closer=closer, closer_cost=1.25**2, method="platt")
        for closer in (mixture.mix(CLOSER), CLOSER)
    )
    assert found.effort == expected
    assert found.effort not in (other, plain.effort)
    assert expected.points[-1] == plain.effort.points[-1]
    # All else knows of no closer look, but for its own calibration.
    remixed = CLOSER.remix(**mixture.fitted._asdict())
    own = fit_calibration(remixed.scaled("tde"), remixed.target, kind="tde", method="platt")
    expected_rule = plain.lam, plain.calibration, plain.thresholds, replace(plain.adaptive, again=own)
    assert (found.lam, found.calibration, found.thresholds, found.adaptive) == expected_rule


def place_by_hand(
    scores: Scores, effort: float, method: Method, closer: Scores | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Ranks (N,L), and which images got a second look (N,): fitted without an image's fold, in plain loops."""
    folds = draw_folds(len(scores)).numpy()
    image = scores.get("image")
    again = (scores if closer is None else closer).scaled("tde")
    places, looked = np.zeros(image.shape), np.zeros(len(scores), bool)
    for inside in folds:
        others = torch.from_numpy(np.flatnonzero(~inside))
        target = scores.target[others]
        alone = fit_calibration(image[others], target, kind="image").apply(image).numpy()
        both = torch.sigmoid(again).numpy()
        if method != "none":
            both = fit_calibration(again[others], target, kind="tde", method=method).apply(again).numpy()
        doubt = (alone * (1 - alone)).sum(1)
        seen = doubt >= np.quantile(doubt[others], 1 - effort)
        probs = np.where(seen[:, None], both, alone)
        for row in np.flatnonzero(inside):
            places[row], looked[row] = (probs < probs[row]).sum(0), seen[row]
    return places, looked


def judge(places: np.ndarray, target: torch.Tensor) -> float:
    """mAP of places (N,L), by another library."""
    truth, known = target.numpy(), ~np.isnan(target.numpy())
    return float(
        np.mean([average_precision_score(truth[known[:, c], c], places[known[:, c], c]) for c in range(len(LABELS))])
    )


@pytest.mark.parametrize(
    ("method", "closer"),
    [("temperature", None), ("none", None), ("platt_per_label", make_scores(LABELS, count=60, seed=4).remix(lam=0.5))],
)
def test_a_point_is_the_definition(method: Method, closer: Scores | None) -> None:
    """A closer look takes the place of the patches below effort 1, calibrated like these, with a lam of its own."""
    scores = make_scores(LABELS, count=60, seed=3)
    cost = 4 if closer is None else 2.25
    curve = effort_curve(scores, patch_cost=4, closer=closer, closer_cost=2.25, method=method)
    for effort in (0.4, 0.7):
        point = curve.points[EFFORTS.index(effort)]
        places, looked = place_by_hand(scores, effort, method, closer)
        assert point.mean == pytest.approx(judge(places, scores.target), abs=1e-6)
        assert point.share == pytest.approx(looked.mean())
        assert point.passes == pytest.approx(1 + cost * looked.mean())
    first, last = (average_precision(scores.get(kind), scores.target).mean for kind in ("image", "tde"))
    assert (curve.points[0], curve.points[-1]) == (EffortPoint(0, 0, 1, first), EffortPoint(1, 1, 5, last))
    assert tuple(point.effort for point in curve.points) == EFFORTS
    assert curve.gain == pytest.approx(last - first)


def make_curve(*means: float) -> EffortCurve:
    efforts = np.linspace(0, 1, len(means)).tolist()
    pairs = zip(efforts, means, strict=True)
    return EffortCurve(tuple(EffortPoint(effort, effort, 1 + 4 * effort, mean) for effort, mean in pairs))


def test_the_cheapest_point_that_keeps_enough_is_found() -> None:
    curve = make_curve(0.5, 0.6, 0.68, 0.71, 0.7)
    assert [curve.find(kept) for kept in (0, 0.5, 0.9, 1)] == [curve.points[place] for place in (0, 1, 2, 3)]
    assert make_curve(0.5, 0.6, 0.5).find(0.9) is None
    assert make_curve(0.5, 0.4).find(0.9) is None
    dear = EffortCurve((*(point._replace(passes=2 * point.passes) for point in curve.points[:-1]), curve.points[-1]))
    assert dear.find(0.9) == curve.points[-1]  # where a closer look costs more than the patches of all


def test_labels_that_were_not_tuned_stay_where_they_were() -> None:
    plain: Any = MultiLabelClassifier("test_vit", LABELS, image_size=32)
    some = tune(PLAIN.keep_labels([1, 3]))
    some.store(plain)
    (a, b), (c, d) = some.calibration.slope, some.calibration.offset
    assert (plain.calibration.slope, plain.calibration.offset) == ((1, a, 1, b, 1), (0, c, 0, d, 0))
    model: Any = PatchClassifier("test_resnet", LABELS, image_size=32)
    few, near = (scores.keep_labels([1, 3]) for scores in (SCORES, CLOSER))
    whole = tune(SCORES, mixing="keep", closer=CLOSER)
    some = tune(few, mixing="keep", calibration="platt", closer=near)
    whole.store(model)
    patching = model.patching
    some.store(model)
    assert (model.patching, model.adaptive.cutoffs) == (patching, whole.adaptive.cutoffs)
    assert model.thresholds == lay_over(whole.thresholds.values, some.thresholds.values)
    for new, old, fitted in (
        (model.calibration, whole.calibration, some.calibration),
        (model.adaptive.calibration, whole.adaptive.calibration, some.adaptive.calibration),
        (model.adaptive.again, whole.adaptive.again, some.adaptive.again),
    ):
        assert (new.slope, new.offset) == (lay_over(old.slope, fitted.slope), lay_over(old.offset, fitted.offset))


def lay_over(old: tuple[float, ...], new: tuple[float, ...]) -> tuple[float, ...]:
    return old[0], new[0], old[2], new[1], old[4]
