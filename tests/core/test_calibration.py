import math

import pytest
import torch

from pivotpatch.errors import InputError
from pivotpatch.runtime.values import Calibration

FITTED = Calibration("tde", "platt_per_label", (0.5, 2.0), (1.0, -0.25))


def test_probabilities_are_the_equation() -> None:
    logits = torch.tensor([[0.0, 1.0], [-2.0, 3.0]], dtype=torch.float64)
    expected = [[1 / (1 + math.exp(-(0.5 * a + 1))), 1 / (1 + math.exp(-(2 * b - 0.25)))] for a, b in logits.tolist()]
    torch.testing.assert_close(FITTED.apply(logits), torch.tensor(expected, dtype=torch.float64))
    nothing = Calibration("image", "platt", (1.0, 1.0), (0.0, 0.0))
    assert torch.equal(nothing.apply(logits), torch.sigmoid(logits))
    assert FITTED.apply(logits.bfloat16()).dtype == torch.float32


def test_a_few_labels_keep_their_probabilities() -> None:
    whole = Calibration("tde", "platt", (0.5, 2.0, 1.0), (1.0, -1.0, 0.25))
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    few = whole.select([2, 0])
    assert (few.kind, few.method) == ("tde", "platt")
    assert torch.equal(few.apply(logits[:, [2, 0]]), whole.apply(logits)[:, [2, 0]])


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="Calibration: 1 slopes and 2 offsets; give one of each a label"):
        Calibration("tde", "platt", (1.0,), (0.0, 0.0))
    with pytest.raises(InputError, match="Calibration: a slope or an offset is not finite; fit it again"):
        Calibration("tde", "platt", (float("nan"),), (0.0,))
    with pytest.raises(InputError, match=r"fitted to 2 labels, logits have shape \(4, 3\); give logits of the same"):
        FITTED.apply(torch.zeros(4, 3))
