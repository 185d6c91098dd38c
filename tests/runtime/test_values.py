"""What is applied to scores, to arrays and tensors alike."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from pivotpatch.errors import InputError
from pivotpatch.runtime.checks import check_effort
from pivotpatch.runtime.values import Adaptive, Calibration, measure_uncertainty

FITTED = Calibration("tde", "platt_per_label", (0.5, 2.0), (1.0, -0.25))
IMAGE = Calibration("image", "platt", (0.5, 2.0), (1.0, -0.25))
ADAPTIVE = Adaptive(IMAGE, (0.0, 0.125, 0.25, 0.5, 0.5))
kinds = pytest.mark.parametrize("make", [np.array, lambda values: torch.tensor(values, dtype=torch.float64)])


@kinds
def test_probabilities_are_the_equation(make: Any) -> None:
    logits = [[0.0, 1.0], [-2.0, 3.0], [-2000.0, 2000.0]]
    expected = [[1 / (1 + math.exp(min(-0.5 * a - 1, 700))), 1 / (1 + math.exp(-2 * b + 0.25))] for a, b in logits]
    assert np.asarray(FITTED.apply(make(logits))) == pytest.approx(np.array(expected), abs=1e-12)
    whole = make([[0.0, 1.0], [-2.0, 3.0]])
    whole = whole.astype(int) if isinstance(whole, np.ndarray) else whole.long()
    assert np.asarray(FITTED.apply(whole)) == pytest.approx(np.array(expected[:2]), abs=1e-6)
    few = FITTED.select([1])
    assert (few.kind, few.method) == ("tde", "platt_per_label")
    assert few.apply(make(logits)[:, 1:]).tolist() == FITTED.apply(make(logits))[:, 1:].tolist()
    with pytest.raises(InputError, match=r"fitted to 2 labels, logits have shape \(4, 3\); give logits of the same"):
        FITTED.apply(make([[0.0] * 3] * 4))


@kinds
def test_uncertainty_is_the_variance_of_the_number_of_labels_and_the_uncertain_are_chosen(make: Any) -> None:
    probs = [[0.1, 0.5, 0.9], [0.0, 1.0, 0.3]]
    counts = (np.random.default_rng(0).random((200_000, 2, 3)) < np.array(probs)).sum(axis=2)
    np.testing.assert_allclose(measure_uncertainty(make(probs)), counts.var(axis=0), rtol=0.02)
    some = make([[0.5, 0.5], [0.5, 1.0], [0.0, 1.0]])  # uncertainty 0.5, 0.25, 0
    assert ADAPTIVE.choose(some, 0.5).tolist() == [True, True, False]
    assert ADAPTIVE.choose(some, 0.4).tolist() == [True, False, False]
    assert ADAPTIVE.choose(some, 1.0).all()


def test_numbers_that_do_not_fit_are_refused() -> None:
    for effort in (-0.1, 1.01, float("nan"), "1"):
        with pytest.raises(InputError, match="here: effort is .*; give a number from 0, no second look, to 1, one at"):
            check_effort(effort, "here")  # type: ignore[arg-type]
    for slope, offset, message in (
        ((1.0,), (0.0, 0.0), "1 slopes and 2 offsets; give one of each per label"),
        ((float("nan"),), (0.0,), "a slope or an offset is not finite; fit it again"),
    ):
        with pytest.raises(InputError, match=f"Calibration: {message}"):
            Calibration("tde", "platt", slope, offset)
    for calibration, cutoffs, again, message in (
        (FITTED, (0.0, 1.0), None, "the calibration is of 'tde' logits"),
        (IMAGE, (0.5, 0.25), None, "cutoffs are no rising quantiles"),
        (IMAGE, (-0.5, 0.25), None, "cutoffs are no rising quantiles"),
        (IMAGE, (0.5, float("inf")), None, "cutoffs are no rising quantiles"),
        (IMAGE, (0.0, 1.0), IMAGE, "the calibration is of 'image' logits; fit one of tde"),
    ):
        with pytest.raises(InputError, match=f"Adaptive: .*{message}"):
            Adaptive(calibration, cutoffs, again)


def test_what_an_older_version_wrote_of_efforts_is_read() -> None:
    adaptive = Adaptive(Calibration("image", "platt", (1.0,), (0.0,)), (0.0, 1.0))
    told = asdict(adaptive)
    assert Adaptive.from_dict(told) == adaptive
    del told["effort"]
    assert Adaptive.from_dict(told) == adaptive
