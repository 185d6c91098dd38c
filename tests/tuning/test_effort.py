"""What each effort keeps, against the definition written out image by image."""

import numpy as np
import pytest
import torch
from made_scores import make_scores
from sklearn.metrics import average_precision_score

from pivotpatch.core.metrics import average_precision
from pivotpatch.inference.scores import Scores
from pivotpatch.tuning.calibration import Method, draw_folds, fit_calibration
from pivotpatch.tuning.tune import EFFORTS, EffortCurve, EffortPoint, effort_curve

LABELS = tuple("abcd")
SCORES = make_scores(LABELS, count=400)


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
    assert (curve.points[0].passes, curve.points[-1].passes) == (1, 5)


def test_the_ends_are_the_image_alone_and_the_patches_of_all() -> None:
    curve = effort_curve(SCORES, patch_cost=4)
    first, *_, last = curve.points
    assert tuple(point.effort for point in curve.points) == EFFORTS
    assert first == EffortPoint(0, 0, 1, average_precision(SCORES.get("image"), SCORES.target).mean)
    assert last == EffortPoint(1, 1, 5, average_precision(SCORES.get("tde"), SCORES.target).mean)
    assert [point.share for point in curve.points] == pytest.approx(EFFORTS, abs=0.04)
    assert curve.gain == pytest.approx(last.mean - first.mean)
    half = curve.points[EFFORTS.index(0.5)]  # patches help most where the image is unsure
    assert half.mean - first.mean > 0.65 * curve.gain > 0.02


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
