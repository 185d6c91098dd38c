"""Scores: probabilities, selections and other mixtures, against the equations written out."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from made_scores import make_scores

from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores
from pivotpatch.runtime.values import Calibration

LABELS = ("a", "b", "c")
SCORES: Any = make_scores(LABELS, count=6)  # weights are made of the patch logits, at temperature 1


@pytest.mark.parametrize("temperature", [0.3, 3.0])
def test_remixed_scores_hold_all_that_the_model_would_have_said(temperature: float) -> None:
    before = SCORES.remix(lam=0.2, temperature=2.0)
    remixed = before.remix(lam=0.5, temperature=temperature)
    expected = combine_logits(SCORES.get("image"), SCORES.patch_logits, lam=0.5, temperature=temperature)
    torch.testing.assert_close(remixed.weights, expected.weights)
    torch.testing.assert_close(remixed.get("patch"), expected.pooled_logits)
    torch.testing.assert_close(remixed.probs("tde"), expected.probs)
    torch.testing.assert_close(remixed.get("tde"), expected.tde_logits)
    back = remixed.remix(lam=0.2, temperature=2.0)
    assert (back.lam, back.temperature, back.pictures) == (0.2, 2.0, SCORES.pictures)
    torch.testing.assert_close(back.get("tde"), before.get("tde"))
    rule = Calibration("tde", "platt", (2.0,) * 3, (0.5,) * 3)
    fitted = replace(before, thresholds=(0.5,) * 3, calibration=rule)
    torch.testing.assert_close(fitted.own_probs(), torch.sigmoid(2 * before.get("tde") / 1.2 + 0.5))
    assert (fitted.remix(lam=0.5).thresholds, fitted.remix(lam=0.5).calibration) == (None, None)


def test_probabilities_of_tde_are_normalised_and_a_selection_keeps_rows_together() -> None:
    scores = replace(SCORES.remix(lam=3.0), patch_logits=None, weights=None)
    torch.testing.assert_close(scores.probs("tde"), torch.sigmoid(scores.get("tde") / 4))
    torch.testing.assert_close(scores.remix(temperature=1.0).get("tde"), scores.get("tde"))
    chosen = scores.select(torch.tensor([4, 1]))
    assert chosen.pictures == (scores.pictures[4], scores.pictures[1])
    assert chosen.indices.tolist() == [4, 1]
    torch.testing.assert_close(chosen.get("tde"), scores.get("tde")[[4, 1]])
    torch.testing.assert_close(chosen.target, scores.target[[4, 1]], equal_nan=True)
    with pytest.raises(InputError, match="scores: the patches were not kept; score the images again"):
        scores.remix(temperature=2.0)
    with pytest.raises(InputError, match="scores: there are no 'pach' logits; did you mean 'patch'"):
        scores.get("pach")
    with pytest.raises(InputError, match=r"scores: image has shape \(6, 2\); give \(6, 3\)"):
        Scores(LABELS, scores.pictures, scores.target, {"image": torch.zeros(6, 2)})
    refused: list[tuple[dict[str, Any], str]] = [
        ({"target": scores.target - 1}, "the target holds -1; write 1, 0, or NaN for unknown"),
        ({"logits": {"mine": scores.get("image")}}, "unknown kind of logits 'mine'"),
        ({"weights": torch.zeros(6, 3)}, r"weights has shape \(6, 3\); give \(6, patches, 3\)"),
    ]
    for wrong, told in refused:
        with pytest.raises(InputError, match=f"scores: {told}"):
            replace(scores, **wrong)
    listed = replace(scores, labels=[*LABELS], target=scores.target.nan_to_num(0).bool())
    assert (listed.labels, listed.target.dtype) == (LABELS, torch.float32)


def test_a_weight_of_zero_stays_zero() -> None:
    scores: Any = make_scores(LABELS, count=6)
    scores.weights[0, :, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    mixed = scores.remix(temperature=2.0).get("tde")
    torch.testing.assert_close(mixed[0, 0], scores.get("image")[0, 0] + scores.patch_logits[0, 0, 0])


def test_one_kind_alone_has_none_of_what_was_fitted_to_another() -> None:
    scores = make_scores(("a", "b", "c"), count=6)
    calibration = Calibration("tde", "platt", (2.0,) * 3, (0.5,) * 3)
    alone = replace(scores, thresholds=(0.2,) * 3, calibration=calibration).only("image")
    assert list(alone.logits) == ["image"]
    assert (alone.patch_logits, alone.weights, alone.thresholds, alone.calibration) == (None,) * 4
