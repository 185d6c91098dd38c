"""Scores: probabilities, selections and other mixtures, against the equations written out."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores
from pivotpatch.runtime.values import Calibration


def make_scores(*, lam: float = 1.0, temperature: float = 1.0, patches: bool = True) -> tuple[Scores, Tensor]:
    """Scores of 6 images, 4 patches and 3 labels, with the weight logits (6,4,3) behind them."""
    generator = torch.Generator().manual_seed(0)
    image, parts, weight = (torch.randn(*shape, generator=generator) for shape in ((6, 3), (6, 4, 3), (6, 4, 3)))
    out = combine_logits(image, parts, weight_logits=weight, lam=lam, temperature=temperature)
    scores = Scores(
        labels=("a", "b", "c"),
        pictures=tuple("uvwxyz"),
        target=torch.randint(2, (6, 3), generator=generator).float(),
        logits={"image": out.image_logits, "patch": out.pooled_logits, "tde": out.tde_logits},
        patch_logits=parts if patches else None,
        weights=out.weights if patches else None,
        lam=lam,
        temperature=temperature,
        indices=torch.arange(6),
    )
    return scores, weight


@pytest.mark.parametrize("temperature", [0.3, 3.0])
def test_remixed_scores_hold_all_that_the_model_would_have_said(temperature: float) -> None:
    scores, weight = make_scores(lam=0.2, temperature=2.0)
    assert scores.patch_logits is not None
    remixed = scores.remix(lam=0.5, temperature=temperature)
    expected = combine_logits(
        scores.get("image"), scores.patch_logits, weight_logits=weight, lam=0.5, temperature=temperature
    )
    assert remixed.weights is not None
    torch.testing.assert_close(remixed.weights, expected.weights)
    torch.testing.assert_close(remixed.get("patch"), expected.pooled_logits)
    torch.testing.assert_close(remixed.probs("tde"), expected.probs)
    torch.testing.assert_close(scores.remix(lam=0.5, temperature=temperature).get("tde"), expected.tde_logits)
    back = remixed.remix(lam=0.2, temperature=2.0)
    assert (back.lam, back.temperature, back.pictures) == (0.2, 2.0, scores.pictures)
    rule = Calibration("tde", "platt", (2.0,) * 3, (0.5,) * 3)
    fitted = replace(scores, thresholds=(0.5,) * 3, calibration=rule)
    torch.testing.assert_close(fitted.own_probs(), torch.sigmoid(2 * scores.get("tde") / 1.2 + 0.5))
    assert (fitted.remix(lam=0.5).thresholds, fitted.remix(lam=0.5).calibration) == (None, None)
    torch.testing.assert_close(back.get("tde"), scores.get("tde"))


def test_probabilities_of_tde_are_normalised_and_a_selection_keeps_rows_together() -> None:
    scores, _ = make_scores(lam=3.0, patches=False)
    torch.testing.assert_close(scores.probs("tde"), torch.sigmoid(scores.get("tde") / 4))
    torch.testing.assert_close(scores.remix().get("tde"), scores.get("tde"))
    chosen = scores.select(torch.tensor([4, 1]))
    assert chosen.pictures == ("y", "v")
    assert chosen.indices is not None
    assert chosen.indices.tolist() == [4, 1]
    torch.testing.assert_close(chosen.get("tde"), scores.get("tde")[[4, 1]])
    torch.testing.assert_close(chosen.target, scores.target[[4, 1]])
    with pytest.raises(InputError, match="scores: the patches were not kept; score the images again"):
        scores.remix(temperature=2.0).get("tde")
    with pytest.raises(InputError, match="scores: there are no 'pach' logits; did you mean 'patch'"):
        scores.get("pach")
    with pytest.raises(InputError, match=r"scores: image has shape \(6, 2\); give \(6, 3\)"):
        Scores(scores.labels, scores.pictures, scores.target, {"image": torch.zeros(6, 2)})


def test_a_weight_of_zero_stays_zero() -> None:
    scores, _ = make_scores()
    assert scores.weights is not None
    scores.weights[0, :, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert scores.patch_logits is not None
    mixed = scores.remix(temperature=2.0).get("tde")
    torch.testing.assert_close(mixed[0, 0], scores.get("image")[0, 0] + scores.patch_logits[0, 0, 0])
