from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pivotpatch.core import bootstrap
from pivotpatch.core.bootstrap import Interval, Resampled, resample_average_precision, resample_f1
from pivotpatch.core.metrics import Definition, EmptyRule, average_precision, precision_recall
from pivotpatch.errors import InputError


def draw(
    count: int, labels: int, *, seed: int, levels: int | None = None, unknown: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Scores and target (N,L); few levels make many ties."""
    generator = torch.Generator().manual_seed(seed)
    target = (torch.rand(count, labels, generator=generator) < 0.3).float()
    scores = torch.randn(count, labels, generator=generator) + target
    if levels is not None:
        scores = (scores * levels / 4).round()
    target[torch.rand(count, labels, generator=generator) < unknown] = torch.nan
    target[0] = 1.0
    return scores, target


def draw_rows(count: int, resamples: int, *, seed: int) -> list[Tensor]:
    """The rows of each resample that a generator of this seed draws."""
    counts = torch.cat(list(bootstrap._draw_counts(count, resamples, torch.Generator().manual_seed(seed))), dim=1)
    return [torch.arange(count).repeat_interleave(column.long()) for column in counts.T]


def judge(scores: Tensor, target: Tensor, definition: Definition) -> list[float]:
    """Average precision of each label by the metric itself, NaN where there is none."""
    if not (target == 1).any():
        return [torch.nan] * target.shape[1]
    values = average_precision(scores, target, definition=definition).per_label
    return [torch.nan if value is None else value for value in values]


@settings(max_examples=20)
@given(
    st.integers(2, 40),
    st.integers(1, 4),
    st.sampled_from([None, 2, 8]),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from(["step", "envelope"]),
    st.integers(0, 1000),
)
def test_each_resample_is_what_the_metric_says_of_the_drawn_rows(
    count: int, labels: int, levels: int | None, unknown: float, definition: Definition, seed: int
) -> None:
    scores, target = draw(count, labels, seed=seed, levels=levels, unknown=unknown)
    found = resample_average_precision(
        {"a": scores, "b": -scores},
        target,
        resamples=20,
        definition=definition,
        generator=torch.Generator().manual_seed(seed),
    )
    rows = [torch.arange(count), *draw_rows(count, 20, seed=seed)]
    assert all(len(each) == count for each in rows)
    for name, sign in (("a", 1), ("b", -1)):
        expected = [judge(sign * scores[each], target[each], definition) for each in rows]
        np.testing.assert_allclose(found.values[name].numpy(), expected, rtol=0, atol=1e-12)


@settings(max_examples=20)
@given(st.integers(2, 40), st.integers(1, 4), st.sampled_from(["zero", "skip"]), st.integers(0, 1000))
def test_each_resampled_f1_is_that_of_the_drawn_rows(count: int, labels: int, empty: EmptyRule, seed: int) -> None:
    scores, target = draw(count, labels, seed=seed, unknown=0.2)
    given = {"a": scores > 0.5, "b": scores < 0}
    found = resample_f1(given, target, resamples=20, empty=empty, generator=torch.Generator().manual_seed(seed))
    drawn = [torch.arange(count), *draw_rows(count, 20, seed=seed)]
    for name, decided in given.items():
        for measured, rows in zip(found.values[name], drawn, strict=True):
            if not (target[rows] == 1).any():
                assert measured.isnan().all()
                continue
            oracle = precision_recall(decided[rows].float(), target[rows], empty=empty)
            assert measured.tolist() == pytest.approx([oracle.CF1, oracle.OF1], abs=1e-12)
    assert found.bound_each("a", minus="a") == [Interval(0.0, 0.0, 0.0)] * 2
    values = (found.values["a"] - found.values["b"])[:, 1]
    bound = found.bound_each("a", minus="b", confidence=0.9)[1]
    assert bound is not None
    ends = values[1:].nanquantile(torch.tensor([0.05, 0.95], dtype=torch.float64)) - values[1:].nanmean() + values[0]
    assert [bound.value, bound.low, bound.high] == pytest.approx([values[0].item(), *ends.clamp(-1, 1).tolist()])


def make_study(sets: int, labels: int) -> list[Resampled]:
    """Many test sets of two models, in one go: labels are drawn on their own, so that each group of them is a set."""
    generator, shape = torch.Generator().manual_seed(0), (300, sets * labels)
    target = (torch.rand(shape, generator=generator) < 0.04).float()
    common = torch.randn(shape, generator=generator) + 1.8 * target
    scores = {
        "model": common + 0.5 * torch.randn(shape, generator=generator) + 0.2 * target,
        "other": common + 0.5 * torch.randn(shape, generator=generator),
    }
    drawn = resample_average_precision(scores, target, resamples=150, generator=generator)
    return [
        Resampled({name: values[:, part] for name, values in drawn.values.items()})
        for part in torch.arange(sets * labels).split(labels)
    ]


def share_covered(intervals: list[Interval], truth: float) -> float:
    return sum(each.low <= truth <= each.high for each in intervals) / len(intervals)


@pytest.mark.slow
def test_intervals_cover_as_often_as_they_say() -> None:
    study = make_study(sets=100, labels=50)
    means = [drawn.bound_mean("model", confidence=0.9) for drawn in study]
    gains = [drawn.bound_mean("model", minus="other", confidence=0.9) for drawn in study]
    truth, gain = (sum(each.value for each in found) / len(found) for found in (means, gains))
    assert 0.83 <= share_covered(means, truth) <= 0.97
    assert 0.83 <= share_covered(gains, gain) <= 0.97
    # The plain percentiles, which duplicates lift, do not: this is what the correction is for.
    ends = torch.tensor([0.05, 0.95], dtype=torch.float64)
    plain = [Interval(0.0, *drawn.values["model"][1:].nanmean(1).quantile(ends).tolist()) for drawn in study]
    assert share_covered(plain, truth) < 0.75
    # Paired: pictures that both find hard are no noise of the difference.
    widths = [np.mean([each.high - each.low for each in found]) for found in (means, gains)]
    assert widths[1] < 0.8 * widths[0]


def test_intervals_of_single_labels_cover_too() -> None:
    generator = torch.Generator().manual_seed(1)
    target = (torch.rand(200, 400, generator=generator) < 0.25).float()  # 400 test sets of one label
    scores = torch.randn(200, 400, generator=generator) + 1.5 * target
    drawn = resample_average_precision({"model": scores}, target, resamples=200, generator=generator)
    intervals = [each for each in drawn.bound_each("model", confidence=0.9) if each is not None]
    assert len(intervals) == 400
    truth = sum(each.value for each in intervals) / 400
    assert 0.84 <= share_covered(intervals, truth) <= 0.95


def test_a_label_without_positives_is_left_out() -> None:
    scores, target = draw(30, 3, seed=2)
    target[:, 1] = 0.0
    target[:, 2] = 0.0
    target[4, 2] = 1.0  # absent from about a third of the resamples
    drawn = resample_average_precision({"a": scores}, target, resamples=300, generator=torch.Generator().manual_seed(0))
    assert drawn.values["a"][:, 1].isnan().all()
    assert 0.25 < drawn.values["a"][1:, 2].isnan().double().mean().item() < 0.5
    bounds: Any = drawn.bound_each("a")
    first, second, third = bounds
    assert second is None
    assert 0.0 <= third.low <= third.high <= 1.0
    assert drawn.bound_mean("a").value == pytest.approx((first.value + third.value) / 2)


def test_wrong_input_is_told() -> None:
    scores, target = draw(40, 3, seed=0)
    for count, matrix, message in (
        (0, scores, "bootstrap: 0 resamples"),
        (5, torch.zeros(3, 2), r"bootstrap: got scores \(3, 2\), target \(40, 3\)"),
    ):
        with pytest.raises(InputError, match=message):
            resample_average_precision({"a": matrix}, target, resamples=count, generator=torch.Generator())


def test_many_resamples_are_bounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = bootstrap.Resampled(
        {"a": torch.rand(21, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}
    )
    expected = drawn.bound_each("a")
    monkeypatch.setattr(bootstrap, "_COLUMNS", 3)
    assert drawn.bound_each("a") == expected
    assert len(expected) == 7
