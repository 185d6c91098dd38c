import numpy as np
import pytest
import torch

from pivotpatch.errors import InputError
from pivotpatch.runtime.values import Adaptive, Calibration, check_effort, measure_uncertainty

IMAGE = Calibration("image", "platt", (0.5, 2.0), (1.0, -0.25))
ADAPTIVE = Adaptive(IMAGE, (0.0, 0.125, 0.25, 0.5, 0.5))


def test_uncertainty_is_the_variance_of_the_number_of_labels() -> None:
    probs = torch.tensor([[0.1, 0.5, 0.9], [0.0, 1.0, 0.3]], dtype=torch.float64)
    generator = np.random.default_rng(0)
    counts = (generator.random((200_000, 2, 3)) < probs.numpy()).sum(axis=2)
    np.testing.assert_allclose(measure_uncertainty(probs), counts.var(axis=0), rtol=0.02)
    assert measure_uncertainty(torch.tensor([[0.0, 1.0]])).item() == 0


@pytest.mark.parametrize("effort", [0, 0.1, 0.25, 1 / 3, 0.5, 0.75, 0.999, 1])
def test_a_cutoff_is_read_between_the_quantiles(effort: float) -> None:
    expected = np.interp(1 - effort, np.linspace(0, 1, 5), ADAPTIVE.cutoffs)
    assert ADAPTIVE.find_cutoff(effort) == pytest.approx(float(expected))


def test_the_uncertain_are_chosen() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.5, 1.0], [0.0, 1.0]])  # uncertainty 0.5, 0.25, 0
    assert ADAPTIVE.choose(probs, 0.5).tolist() == [True, True, False]
    assert ADAPTIVE.choose(probs, 0.4).tolist() == [True, False, False]
    assert ADAPTIVE.choose(probs, 1.0).all()


def test_numbers_that_do_not_fit_are_refused() -> None:
    for effort in (-0.1, 1.01, float("nan"), "1", None):
        with pytest.raises(InputError, match="here: effort is .*; give a number from 0, no second look, to 1, one at"):
            check_effort(effort, "here")  # type: ignore[arg-type]
    other = Calibration("tde", "platt", (1.0,), (0.0,))
    for calibration, cutoffs, again, message in (
        (other, (0.0, 1.0), None, "the calibration is of 'tde' logits"),
        (IMAGE, (0.5, 0.25), None, "cutoffs are no rising quantiles"),
        (IMAGE, (0.5, float("inf")), None, "a cutoff is not finite"),
        (IMAGE, (0.0, 1.0), IMAGE, "the calibration is of 'image' logits; fit one of tde"),
    ):
        with pytest.raises(InputError, match=f"Adaptive: .*{message}"):
            Adaptive(calibration, cutoffs, again)
