"""Fitted thresholds against a search through every threshold there is."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pivotpatch.errors import InputError
from pivotpatch.tuning.thresholds import BEST_F1, fit_thresholds, parse_goal

NAN = float("nan")
GOALS = ["f1", "precision:0.6", "precision:1", "recall:0.7", "recall:1", "cost:1:1", "cost:1:5"]


def draw(rows: int = 400, labels: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    target = (torch.rand(rows, labels, generator=generator) < torch.linspace(0.1, 0.5, labels)).float()
    return (torch.rand(rows, labels, generator=generator) + 0.6 * target) / 1.6, target


def worth(goal: str, decided: list[bool], truth: list[float]) -> float:
    """What a goal makes of decisions, from its name and the four counts."""
    hits = sum(d and t == 1 for d, t in zip(decided, truth, strict=True))
    false, missed = sum(decided) - hits, truth.count(1) - hits
    name, *numbers = goal.split(":")
    if name == "f1":
        return 2 * hits / (2 * hits + false + missed) if hits else 0.0
    if name == "precision":
        return sum(decided) if hits and hits / (hits + false) >= float(numbers[0]) else -np.inf
    if name == "recall":
        return -sum(decided) if hits >= float(numbers[0]) * truth.count(1) else -np.inf
    return -(float(numbers[0]) * false + float(numbers[1]) * missed)


ROWS = st.lists(st.tuples(st.integers(0, 8), st.sampled_from([0.0, 1.0, NAN])), min_size=1, max_size=14)


@settings(max_examples=150)
@given(ROWS.filter(lambda rows: any(t == 1 for _, t in rows)), st.sampled_from(GOALS))
def test_no_threshold_does_better(rows: list[tuple[int, float]], goal: str) -> None:
    probs = torch.tensor([[place / 8] for place, _ in rows])
    target = torch.tensor([[truth] for _, truth in rows])
    fitted = fit_thresholds(probs, target, goal=parse_goal(goal))
    known = [(place / 8, truth) for place, truth in rows if truth == truth]
    truth = [t for _, t in known]
    levels = sorted({0.0, 1.0, *(score for score, _ in known)})
    tried = [*levels, *((a + b) / 2 for a, b in pairwise(levels))]
    best = max(worth(goal, [score > cut for score, _ in known], truth) for cut in tried)
    ours = [score > fitted.values[0] for score, _ in known]
    assert (not fitted.unreached) == (best > -np.inf)
    if best > -np.inf:
        assert worth(goal, ours, truth) == pytest.approx(best)
        equal = [cut for cut in tried if worth(goal, [score > cut for score, _ in known], truth) == pytest.approx(best)]
        assert sum(ours) == min(sum(score > cut for score, _ in known) for cut in equal)
    else:
        assert not any(ours)


def test_a_recall_that_is_no_binary_number_is_reached_by_its_share() -> None:
    """0.56 of 25 is 14, and a little more as a product of floats."""
    probs, target = torch.linspace(1, 0.01, 50)[:, None], torch.ones(50, 1)
    target[25:] = 0
    given = fit_thresholds(probs, target, goal=parse_goal("recall:0.56")).policy.decide(probs)
    assert int(given.sum()) == 14


def test_neighbouring_floats_are_parted() -> None:
    low = np.float32(0.7)
    high = np.nextafter(low, np.float32(1))
    probs = torch.tensor([[low], [high], [0.1]])
    fitted = fit_thresholds(probs, torch.tensor([[0.0], [1.0], [0.0]]), goal=BEST_F1)
    assert fitted.policy.decide(probs).flatten().tolist() == [False, True, False]
    apart = torch.tensor([[0.9], [0.5], [0.25]], dtype=torch.float64)
    halfway = fit_thresholds(apart, torch.tensor([[1.0], [0.0], [0.0]]), goal=BEST_F1)
    assert halfway.values[0] == pytest.approx(0.7)
    ends, target = torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0], [0.0]])
    assert fit_thresholds(ends, target, goal=BEST_F1).values == (0.5,)
    assert not fit_thresholds(ends, 1 - target, goal=parse_goal("cost:1:1")).policy.decide(ends).any()


def test_labels_with_few_positives_share_the_threshold_of_all() -> None:
    probs, target = draw()
    target[9:, 2] = 0
    target[:9, 2] = 1
    target[:, 4] = 0
    fitted = fit_thresholds(probs, target, goal=BEST_F1, labels=list("abcdef"))
    alone = fit_thresholds(probs.reshape(-1, 1), target.reshape(-1, 1), goal=BEST_F1)
    assert (fitted.labels, fitted.few) == (tuple("abcdef"), ("c", "e"))
    assert fitted.values[2] == fitted.values[4] == fitted.pooled == alone.values[0]
    kept = fit_thresholds(probs[:, [0, 1, 3, 5]], target[:, [0, 1, 3, 5]], goal=BEST_F1)
    assert [fitted.values[k] for k in (0, 1, 3, 5)] == list(kept.values)


def test_one_threshold_for_all_labels_gives_the_most_right_tags_at_a_precision() -> None:
    """Of probabilities that are true: no threshold per label of a coarse grid does better on the whole."""
    generator = torch.Generator().manual_seed(4)
    probs = torch.rand(4000, 2, generator=generator) ** torch.tensor([1.0, 3.0])
    target = (torch.rand(probs.shape, generator=generator) < probs).float()
    fitted = fit_thresholds(probs, target, goal=parse_goal("precision:0.8"), shared=True)
    assert fitted.values == (fitted.pooled,) * 2
    assert fitted.few == ()
    given_labels = fitted.policy.decide(probs)
    hits = int((given_labels & (target == 1)).sum())
    assert hits / int(given_labels.sum()) == pytest.approx(0.8, abs=1e-3)
    assert hits / int(given_labels.sum()) >= 0.8
    for first in torch.linspace(0, 1, 41):
        for second in torch.linspace(0, 1, 41):
            other = probs > torch.stack([first, second])
            right = int((other & (target == 1)).sum())
            if right >= 0.8 * int(other.sum()):
                assert right < 1.02 * hits


def test_a_goal_out_of_reach_is_said_and_the_label_never_given() -> None:
    probs, target = draw()
    probs[:, 3] = 0.5
    fitted = fit_thresholds(probs, target, goal=parse_goal("precision:0.9"), labels=list("abcdef"))
    assert (fitted.unreached, fitted.values[3]) == (("d",), 1.0)
    assert not fitted.policy.decide(torch.ones(1, 6))[0, 3]
    assert "goal out of reach, so never given: d" in str(fitted)


def test_goals_can_be_written() -> None:
    with pytest.raises(InputError, match="goal: unknown goal 'presision'; did you mean 'precision'"):
        parse_goal("presision:0.9")
    for text in ("precision", "f1:2", "cost:1:x", "precision:1.5", "cost:0:1", "cost:1:nan", "cost:1:inf"):
        with pytest.raises(InputError, match=f"goal: '{text}' cannot be read; write f1"):
            parse_goal(text)


def test_bad_input_is_named() -> None:
    probs, target = draw()
    with pytest.raises(InputError, match="are no probabilities; apply torch.sigmoid"):
        fit_thresholds(probs * 9, target, goal=BEST_F1)
    with pytest.raises(InputError, match="fit_thresholds: no label has a positive image; check the target"):
        fit_thresholds(probs, torch.zeros_like(target), goal=BEST_F1)
