from dataclasses import replace
from typing import Any

import pytest
import torch

from pivotpatch.audit.evaluation import evaluate_scores
from pivotpatch.core.bootstrap import Interval
from pivotpatch.core.calibration import Calibration
from pivotpatch.core.metrics import Definition, average_precision, precision_recall
from pivotpatch.core.policies import Fixed, PerLabel, PriorMatched, TopK
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores

LABELS = ("cat", "dog", "fish", "never")


def make_scores(seed: int = 0) -> Scores:
    generator = torch.Generator().manual_seed(seed)
    target = (torch.rand(80, 4, generator=generator) < 0.3).float()
    target[:, 3] = 0.0
    image, patch = (torch.randn(80, 4, generator=generator) + gain * target for gain in (0.8, 1.5))
    pictures = tuple(f"{row}.jpg" for row in range(80))
    return Scores(LABELS, pictures, target, {"image": image, "patch": patch, "tde": image + 0.5 * patch}, lam=0.5)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("definition", ["step", "envelope"])
def test_each_kind_is_measured_as_the_metrics_do(definition: Definition) -> None:
    scores = make_scores()
    found = evaluate_scores(scores, definition=definition, resamples=50, generator=seeded())
    assert (found.pictures, found.ranking, found.definition) == (80, "tde", definition)
    assert list(found.kinds) == ["image", "patch", "tde"]
    for kind, each in found.kinds.items():
        logits = scores.logits[kind]
        expected = average_precision(logits, scores.target, definition=definition, labels=LABELS)
        assert each.precision == expected
        assert each.precision.skipped == ("never",)
        assert each.interval is not None
        assert each.interval.value == pytest.approx(expected.mean)
        assert each.interval.low < expected.mean < each.interval.high
        assert each.label_intervals is not None
        assert each.label_intervals[3] is None
        probs = torch.sigmoid(logits / 1.5 if kind == "tde" else logits)
        assert each.decided == precision_recall(probs, scores.target, labels=LABELS)
        assert each.top == precision_recall(logits, scores.target, policy=TopK(3), labels=LABELS)


def test_differences_are_paired_and_signed() -> None:
    scores, other = make_scores(), make_scores()
    other = replace(other, logits={"image": make_scores(seed=5).logits["image"]})
    found = evaluate_scores(scores, baseline=other, resamples=200, generator=seeded())
    means = {kind: each.precision.mean for kind, each in found.kinds.items()}
    assert found.gain is not None
    assert (found.gain.of, found.gain.minus) == ("tde", "image")
    assert found.gain.value == means["tde"] - means["image"]
    assert found.difference is not None
    assert (found.difference.of, found.difference.minus) == ("tde", "baseline image")
    baseline = average_precision(other.logits["image"], scores.target)
    assert found.difference.value == means["tde"] - baseline.mean
    assert found.difference.interval is not None
    assert found.difference.interval.value == pytest.approx(found.difference.value)
    assert found.difference.per_label[3] is None
    assert found.difference.per_label[0] == pytest.approx(
        (found.kinds["tde"].precision.per_label[0] or 0) - (baseline.per_label[0] or 0)
    )
    same = evaluate_scores(scores, baseline=scores, resamples=20, generator=seeded()).difference
    assert same is not None
    assert same.interval == Interval(0.0, 0.0, 0.0)


def test_without_resamples_there_are_no_intervals() -> None:
    scores = make_scores()
    found = evaluate_scores(scores, baseline=scores, resamples=0, generator=seeded())
    assert found.resamples == 0
    assert {each.interval for each in found.kinds.values()} == {None}
    assert found.gain is not None
    assert found.gain.interval is None
    assert found.difference is not None
    assert found.difference.label_intervals is None


def test_rules_that_rank_see_logits_and_thresholds_probabilities() -> None:
    """Probabilities of such logits are all 1 in float32."""
    target = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    logits = torch.tensor([[43.0, 42.0, 41.0, 40.0], [40.0, 43.0, 42.0, 41.0]])
    scores = Scores(LABELS, ("a", "b"), target, {"image": logits})
    for policy in (TopK(1), PriorMatched((0.5, 0.5, 0.0, 0.0))):
        found = evaluate_scores(scores, policies={"image": policy}, resamples=0, generator=seeded()).kinds["image"]
        assert found.decided is not None
        assert (found.decided.OP, found.decided.OR) == (1.0, 1.0)
    given = evaluate_scores(scores, policies={"image": Fixed(0.5)}, resamples=0, generator=seeded())
    decided = given.kinds["image"].decided
    assert decided is not None
    assert decided.OP == 0.25


def test_fitted_thresholds_speak_of_their_kind_and_its_calibrated_probabilities() -> None:
    scores = make_scores()
    calibration = Calibration("tde", "platt", (2.0,) * 4, (-0.5, 0.0, 0.5, 1.0))
    policy = PerLabel((0.2, 0.3, 0.4, 0.5))
    found = evaluate_scores(
        scores, policies={"tde": policy}, calibration=calibration, resamples=0, generator=seeded()
    ).kinds
    assert found["image"].decided is None
    assert found["patch"].decided is None
    probs = torch.sigmoid(2 * scores.logits["tde"] / 1.5 + torch.tensor(calibration.offset))
    assert found["tde"].decided == precision_recall(probs, scores.target, policy=policy, labels=LABELS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pictures": make_scores().pictures[::-1]}, "images differ"),
        ({"labels": LABELS[::-1]}, "labels differ"),
        ({"target": 1 - make_scores().target}, "targets differ"),
    ],
)
def test_scores_that_cannot_be_paired_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate_scores(make_scores(), baseline=replace(make_scores(), **change), generator=seeded())


def test_no_image_is_refused() -> None:
    with pytest.raises(InputError, match="evaluate: there is no image; give at least one that can be read"):
        evaluate_scores(make_scores().select(torch.arange(0)), generator=seeded())
