import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.average_precision import envelope
from sklearn import metrics as sklearn
from torch import Tensor

from pivotpatch.core.metrics import average_precision, find_best_fixed, precision_recall
from pivotpatch.core.policies import Fixed, PerLabel, PriorMatched, ThresholdPolicy, TopK
from pivotpatch.errors import InputError

NAN = float("nan")


def draw(rows: int = 300, labels: int = 7, *, levels: int | None = None) -> tuple[Tensor, Tensor]:
    """Scores in [0,1] and a target; with `levels`, few different scores and so many ties."""
    generator = torch.Generator().manual_seed(5)
    target = (torch.rand(rows, labels, generator=generator) < torch.linspace(0.05, 0.6, labels)).float()
    scores = (torch.rand(rows, labels, generator=generator) + target) / 2
    return (scores * levels).round() / levels if levels else scores, target


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(-4, 4), st.sampled_from([0.0, 1.0])), min_size=1, max_size=25).filter(
        lambda rows: any(t for _, t in rows)
    )
)
def test_both_definitions_agree_with_their_oracles(rows: list[tuple[int, float]]) -> None:
    scores = torch.tensor([[float(s)] for s, _ in rows])
    target = torch.tensor([[t] for _, t in rows])
    step = average_precision(scores, target).mean
    above = average_precision(scores, target, definition="envelope").mean
    assert step == pytest.approx(sklearn.average_precision_score(target.numpy(), scores.numpy()), abs=1e-12)
    assert above == pytest.approx(envelope(scores.flatten().tolist(), target.flatten().tolist()), abs=1e-12)
    assert above >= step - 1e-12


def test_the_mean_is_scikit_learns_and_neither_order_nor_scale_matters() -> None:
    scores, target = draw(levels=10)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(6))
    expected = sklearn.average_precision_score(target.numpy(), scores.numpy(), average="macro")
    assert average_precision(scores, target).mean == pytest.approx(expected, abs=1e-12)
    base = average_precision(scores, target).per_label
    assert average_precision(scores[order], target[order]).per_label == base
    assert average_precision(scores.double() * 7 - 3, target).per_label == base


def test_half_precision_and_infinite_scores_are_ranked() -> None:
    scores, target = draw()
    assert average_precision(scores.bfloat16(), target) == average_precision(scores.bfloat16().float(), target)
    extreme = torch.tensor([[float("inf")], [0.0], [-float("inf")]])
    assert average_precision(extreme, torch.tensor([[1.0], [0.0], [0.0]])).mean == 1


def test_unknown_labels_are_left_out() -> None:
    scores, target = draw()
    target[:100, 2] = NAN
    result = average_precision(scores, target)
    alone = average_precision(scores[100:, [2]], target[100:, [2]])
    assert result.per_label[2] == alone.per_label[0]
    assert result.positives[2] == alone.positives[0]


def test_labels_without_a_positive_are_skipped_and_named() -> None:
    scores, target = draw(labels=3)
    target[:, 1] = 0
    result = average_precision(scores, target, labels=["cat", "dog", "cow"])
    assert result.skipped == ("dog",)
    assert result.per_label[1] is None
    assert result.mean == average_precision(scores[:, [0, 2]], target[:, [0, 2]]).mean
    assert "without a positive and skipped: dog" in str(result)
    assert "step-wise sum over recall" in str(result)
    assert json.loads(json.dumps(result.to_dict()))["skipped"] == ["dog"]


POLICIES: list[ThresholdPolicy] = [
    Fixed(0.5),
    PerLabel((0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)),
    PriorMatched((0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.4)),
    TopK(3),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_precision_and_recall_are_scikit_learns(policy: ThresholdPolicy) -> None:
    scores, target = draw()
    result = precision_recall(scores, target, policy=policy)
    truth, given_labels = target.numpy(), policy.decide(scores).numpy()
    for ours, score, average in [
        (result.CP, sklearn.precision_score, "macro"),
        (result.CR, sklearn.recall_score, "macro"),
        (result.OP, sklearn.precision_score, "micro"),
        (result.OR, sklearn.recall_score, "micro"),
        (result.OF1, sklearn.f1_score, "micro"),
        (result.macro_f1, sklearn.f1_score, "macro"),
    ]:
        assert ours == pytest.approx(score(truth, given_labels, average=average, zero_division=0), abs=1e-12)
    assert result.CF1 == pytest.approx(2 * result.CP * result.CR / (result.CP + result.CR))
    assert result.definition == policy.definition
    assert policy.definition in str(result)


def test_labels_never_given_count_zero_or_are_skipped() -> None:
    scores = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    target = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    zero = precision_recall(scores, target, labels=["a", "b"])
    skip = precision_recall(scores, target, empty="skip", labels=["a", "b"])
    assert (zero.CP, skip.CP) == (0.25, 0.5)
    assert zero.never_given == skip.never_given == ("b",)
    assert (zero.CR, zero.OP, zero.OR) == (skip.CR, skip.OP, skip.OR) == (0.5, 0.5, 0.5)
    assert skip.precision == (0.5, None)
    found = precision_recall(torch.full((4, 2), 0.1), torch.tensor([[1.0, 0.0]] * 4), empty="skip")
    assert (found.CP, found.CR, found.CF1, found.OF1) == (0, 0, 0, 0)


def test_labels_without_a_positive_count_only_overall() -> None:
    scores = torch.tensor([[0.9, 0.9], [0.1, 0.9]])
    target = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    result = precision_recall(scores, target, labels=["a", "b"])
    assert (result.CP, result.CR, result.skipped) == (1.0, 1.0, ("b",))
    assert result.OP == pytest.approx(1 / 3)
    assert "without a positive and skipped: b" in str(result)
    assert precision_recall(scores, target, empty="skip").CP == 1.0


@pytest.mark.parametrize("policy", POLICIES)
def test_unknown_labels_are_neither_right_nor_wrong(policy: ThresholdPolicy) -> None:
    scores, target = draw()
    hidden = target.clone()
    hidden[:150] = NAN
    alone = precision_recall(scores[150:], target[150:], policy=policy)
    assert precision_recall(scores, hidden, policy=policy) == alone


def test_decisions_at_the_boundary() -> None:
    scores = torch.tensor([[0.5, 0.5], [0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])
    assert Fixed(0.5).decide(scores).tolist() == [[i > 0, False] for i in range(5)]
    assert PerLabel((0.8, 0.3)).decide(scores).tolist() == [[i > 3, i < 2] for i in range(5)]
    assert PriorMatched((0.5, 0.3)).decide(scores).sum(0).tolist() == [2, 2]  # 2.5 and 1.5, rounded to even
    assert PriorMatched((0.35, 0.25)).decide(scores).sum(0).tolist() == [2, 1]
    assert TopK(1).decide(scores[1:]).tolist() == [[True, False]] * 4
    assert TopK(2).decide(torch.zeros(5, 4)).sum(1).tolist() == [2] * 5  # even where all are alike
    assert Fixed(0.0).decide(torch.tensor([[0.0, 0.1, 1.0]])).tolist() == [[False, True, True]]
    for policy in (Fixed(0.55), PerLabel((0.55,))):  # which bfloat16 does not know: 0.5508 is next
        assert policy.decide(torch.tensor([[0.55078125], [0.546875]]).bfloat16()).tolist() == [[True], [False]]
        assert policy.decide(torch.zeros(0, 1)).shape == (0, 1)
    assert not Fixed(1.0).decide(torch.ones(1, 2)).any()
    assert TopK(2).decide(torch.rand(3, 2)).all()
    assert (Fixed().threshold, TopK().k) == (0.5, 3)
    known = torch.tensor([[1.0, NAN], [NAN, NAN], [0.0, NAN]])  # a prior is a share of the images that are known
    assert PriorMatched.from_target(known).priors == (0.5, 0.0)
    for value in (-0.1, 1.1):
        with pytest.raises(InputError, match="are no probabilities"):
            Fixed(0.5).decide(torch.tensor([[0.5, value]]))


def test_the_best_fixed_threshold_is_that_of_a_loop() -> None:
    scores, target = draw()
    scores = 0.4 + 0.6 * scores
    for empty in ("zero", "skip"):
        found = [precision_recall(scores, target, policy=Fixed(p / 100), empty=empty).CF1 for p in range(50, 100, 5)]
        best = find_best_fixed(scores, target, empty=empty)
        assert best.threshold == (50 + 5 * found.index(max(found))) / 100
        assert best.definition.startswith(f"best fixed threshold {best.threshold:g} (by CF1")


@pytest.mark.parametrize(
    ("scores", "target", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), r"got scores \(2, 3\), target \(2, 4\)"),
        (torch.zeros(0, 3), torch.zeros(0, 3), "there is no image"),
        (torch.tensor([[0.1, NAN], [0.2, 0.3]]), torch.ones(2, 2), "scores of label 1 hold NaN"),
        (torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), "target holds -1"),
        (torch.zeros(1, 2), torch.zeros(1, 2), "no label has a positive image"),
        (torch.zeros(1, 2).numpy(), torch.zeros(1, 2), r"got scores ndarray, target \(1, 2\)"),
    ],
)
def test_bad_input_is_named(scores: Tensor, target: Tensor, message: str) -> None:
    with pytest.raises(InputError, match="average_precision: " + message):
        average_precision(scores, target)
    with pytest.raises(InputError, match="precision_recall: " + message):
        precision_recall(scores, target)


def test_bad_choices_are_named() -> None:
    scores, target = draw()
    with pytest.raises(InputError, match="unknown definition 'envelop'; did you mean 'envelope'"):
        average_precision(scores, target, definition="envelop")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="2 label names for 7 columns"):
        average_precision(scores, target, labels=["a", "b"])
    with pytest.raises(InputError, match="unknown rule 'drop'; .*known: skip, zero"):
        precision_recall(scores, target, empty="drop")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="are no probabilities; apply torch.sigmoid"):
        precision_recall(scores * 20 - 10, target)
    policies: list[tuple[ThresholdPolicy, str]] = [
        (PerLabel((0.5, 0.5)), r"PerLabel: got scores \(300, 7\), thresholds \(2,\)"),
        (PriorMatched((0.5,)), r"PriorMatched: got scores \(300, 7\), priors \(1,\)"),
        (TopK(8), "TopK: k is 8 for 7 labels"),
    ]
    for policy, message in policies:
        with pytest.raises(InputError, match=message):
            precision_recall(scores, target, policy=policy)
    with pytest.raises(InputError, match="Fixed: threshold is nan"):
        Fixed(NAN)
    with pytest.raises(InputError, match="PerLabel: the threshold of label 1 is nan"):
        PerLabel((0.5, NAN))
    with pytest.raises(InputError, match="PriorMatched: priors are"):
        PriorMatched((2.0,))
