from dataclasses import replace
from typing import Any

import made_scores
import pytest
import torch
from sklearn.metrics import average_precision_score

from pivotpatch.audit.evaluation import Policy, evaluate_scores, evaluate_steps, study_scale
from pivotpatch.core.bootstrap import Interval
from pivotpatch.core.metrics import Definition, average_precision, precision_recall
from pivotpatch.core.policies import Fixed, PerLabel, PriorMatched, TopK
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores
from pivotpatch.runtime.values import Calibration

LABELS = ("cat", "dog", "fish", "never")


TARGET = made_scores.make_scores(LABELS, count=80).target.nan_to_num(0.0) * torch.tensor([1.0, 1.0, 1.0, 0.0])


def make_scores(seed: int = 0) -> Scores:
    scores = made_scores.make_scores(LABELS, count=80, seed=seed, skill=0.5)
    return replace(scores.remix(lam=0.5), target=TARGET)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("definition", ["step", "envelope"])
def test_each_kind_is_measured_as_the_metrics_do(definition: Definition) -> None:
    scores = make_scores()
    found: Any = evaluate_scores(scores, definition=definition, resamples=50, generator=seeded())
    assert (found.pictures, found.ranking, found.definition) == (80, "tde", definition)
    assert list(found.kinds) == ["image", "patch", "tde"]
    for kind, each in found.kinds.items():
        logits = scores.logits[kind]
        expected = average_precision(logits, scores.target, definition=definition, labels=LABELS)
        assert each.precision == expected
        assert each.precision.skipped == ("never",)
        assert each.interval.value == pytest.approx(expected.mean)
        assert each.interval.low < expected.mean < each.interval.high
        assert each.label_intervals[3] is None
        probs = torch.sigmoid(logits / 1.5 if kind == "tde" else logits)
        assert each.decided == precision_recall(probs, scores.target, labels=LABELS)
        assert each.top == precision_recall(logits, scores.target, policy=TopK(3), labels=LABELS)


def test_each_side_decides_by_its_own_thresholds_unless_a_policy_is_named() -> None:
    rule = Calibration("tde", "platt", (2.0,) * 4, (0.3,) * 4)
    scores = replace(make_scores(), thresholds=(0.2, 0.4, 0.6, 0.8), calibration=rule)
    other, target = make_scores(seed=5).only("image"), TARGET
    matched = replace(PriorMatched.from_target(target), definition="target-matched thresholds")
    cases: list[tuple[Policy | None, Any, Any]] = [
        (None, ("tde", PerLabel((0.2, 0.4, 0.6, 0.8)), rule.apply(scores.scaled("tde"))), Fixed(0.5)),
        (Fixed(0.7), ("tde", Fixed(0.7), scores.probs("tde")), Fixed(0.7)),
        ("target", ("tde", matched, scores.get("tde")), matched),
    ]
    for by, ours, theirs in cases:
        found: Any = evaluate_scores(scores, policy=by, baseline=other, empty="skip", resamples=30, generator=seeded())
        kind, decides, values = ours
        one = precision_recall(values, target, policy=decides, empty="skip", labels=LABELS)
        ranks = theirs is matched
        beside = other.get("image") if ranks else other.probs("image")
        two = precision_recall(beside, target, policy=theirs, empty="skip", labels=LABELS)
        assert found.kinds[kind].decided == one
        assert (found.kinds["image"].decided is None) == (by is None)  # thresholds of TDE say nothing of it
        assert found.baseline.decided == two
        for name, change in found.difference.decided.items():
            assert change.value == pytest.approx(getattr(one, name) - getattr(two, name))
            assert change.interval.value == pytest.approx(change.value)
    with pytest.raises(InputError, match="no thresholds were fitted"):
        evaluate_scores(other, policy="fitted", generator=seeded())


def test_each_step_is_scikit_learns() -> None:
    scores = make_scores()
    found = evaluate_steps(scores)
    assert ([step.label for step in found.steps], found.skipped) == (["cat", "dog", "fish"], ("never",))
    for place, step in enumerate(found.steps):
        truth = scores.target[:, place]
        oracle = {kind: average_precision_score(truth, logits[:, place]) for kind, logits in scores.logits.items()}
        assert {"image": step.image, "patch": step.patch, "tde": step.tde} == pytest.approx(oracle)
        assert step.gain == pytest.approx(oracle["tde"] - max(oracle["image"], oracle["patch"]))
        assert step.positives == truth.sum()
    assert found.mean["tde"] == pytest.approx(sum(step.tde for step in found.steps) / 3)
    assert found.share_gained == sum(step.gain > 0 for step in found.steps) / 3
    with pytest.raises(InputError, match="there are no 'patch' logits"):
        evaluate_steps(scores.only("image"))


def test_the_scale_study_sets_tde_beside_the_patches_of_another_model() -> None:
    scores = make_scores()
    found = evaluate_steps(scores)
    study = study_scale(scores, scores.only("patch"), generator=seeded())
    assert [study.patch, study.tde] == pytest.approx([found.mean["patch"], found.mean["tde"]])
    assert study.difference.value == pytest.approx(study.tde - study.patch)
    assert study.difference.low < study.difference.value < study.difference.high


def test_differences_are_paired_and_signed_and_of_the_same_images() -> None:
    scores, other = make_scores(), make_scores(seed=5).only("image")
    found: Any = evaluate_scores(scores, baseline=other, resamples=200, generator=seeded())
    logits = scores.get("tde"), scores.get("image"), other.get("image")
    ours, *others = (average_precision(each, TARGET) for each in logits)
    for each, minus, beside in zip((found.gain, found.difference), ("image", "baseline image"), others, strict=True):
        assert (each.of, each.minus, each.value) == ("tde", minus, ours.mean - beside.mean)
        expected = [a and b and a - b for a, b in zip(ours.per_label, beside.per_label, strict=True)]
        assert list(each.per_label) == expected
        middles = [interval and interval.value for interval in (each.interval, *each.label_intervals)]
        assert middles == pytest.approx([each.value, *expected])
    same: Any = evaluate_scores(scores, baseline=scores, resamples=20, generator=seeded())
    assert same.difference.interval == Interval(0.0, 0.0, 0.0)
    strangers = replace(other, pictures=other.pictures[::-1])
    with pytest.raises(InputError, match="scores: images differ"):
        evaluate_scores(scores, baseline=strangers, generator=seeded())
    with pytest.raises(InputError, match="scores: images differ"):
        study_scale(scores, strangers, generator=seeded())


def test_a_policy_of_another_name_is_refused() -> None:
    with pytest.raises(InputError, match=r"policy: it is 'fixed:0.5'; give 'target', .* such as Fixed\(0.5\) or TopK"):
        evaluate_scores(make_scores(), policy="fixed:0.5", generator=seeded())  # type: ignore[arg-type]
