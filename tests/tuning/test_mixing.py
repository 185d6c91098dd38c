"""Lam and temperature against every pair tried one by one, and the honesty of what is reported."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.core.metrics import average_precision
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores
from pivotpatch.tuning.folds import draw_folds
from pivotpatch.tuning.mixing import LAMS, TEMPERATURES, choose_mixture, fit_mixing

NAN = float("nan")


def draw(
    rows: int = 600, labels: int = 12, *, blur: float | Tensor = 1.0, shares: Tensor | None = None, seed: int = 0
) -> Scores:
    """Scores of 4 patches.

    Args:
        rows: N.
        labels: L.
        blur: noise of the image logits, a number or (L,), beside that of the patches, 1.
        shares: (L,) of pictures with each label.
        seed: of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    shares = torch.linspace(0.02, 0.3, labels) if shares is None else shares
    target = (torch.rand(rows, labels, generator=generator) < shares).float()
    image = 2 * target - 2 + blur * torch.randn(rows, labels, generator=generator)
    place = F.one_hot(torch.randint(4, (rows, labels), generator=generator), 4).transpose(1, 2)
    patches = 2 * target[:, None] * place - 2 + torch.randn(rows, 4, labels, generator=generator)
    out = combine_logits(image, patches)
    return Scores(
        labels=tuple(f"label {k}" for k in range(labels)),
        pictures=tuple(f"{row}.jpg" for row in range(rows)),
        target=target,
        logits={"image": image, "patch": out.pooled_logits, "tde": out.tde_logits},
        patch_logits=patches,
        weights=out.weights,
    )


def test_every_pair_has_its_own_map_and_the_best_is_shared() -> None:
    scores = draw(150, 5)
    scores.target[:40, 1] = NAN
    study = fit_mixing(
        scores, lams=(2.0, 0.0, 0.7), temperatures=(3.0, 0.5), generator=torch.Generator().manual_seed(4)
    )
    assert study.lams == (0.0, 0.7, 1.0, 2.0)
    assert study.temperatures == (0.5, 1.0, 3.0)
    expected = torch.tensor(
        [
            [average_precision(scores.mix(lam=lam, temperature=t), scores.target).mean for lam in study.lams]
            for t in study.temperatures
        ]
    )
    torch.testing.assert_close(study.means, expected, atol=1e-5, rtol=0)
    row, column = divmod(int(expected.argmax()), 4)
    assert (study.shared.lam, study.shared.temperature) == (study.lams[column], study.temperatures[row])
    assert study.before.mean == pytest.approx(average_precision(scores.get("tde"), scores.target).mean, abs=1e-6)


@pytest.mark.parametrize("mixture", ["shared", "per_label"])
def test_a_pictures_own_fold_has_no_say(mixture: str) -> None:
    """Turning the targets of a fold around changes what is fitted, but not how pictures of the fold are ranked."""
    blur = torch.linspace(0.3, 3, 12)
    scores = draw(blur=blur)
    fold = draw_folds(600)
    changed = scores.target.clone()
    changed[fold == 1] = 1 - changed[fold == 1]
    one, other = (getattr(fit_mixing(s), mixture) for s in (scores, replace(scores, target=changed)))
    assert torch.equal(one.logits[fold == 1].argsort(0), other.logits[fold == 1].argsort(0))
    assert not torch.equal(one.logits[fold == 2].argsort(0), other.logits[fold == 2].argsort(0))


def test_labels_that_want_their_own_lam_get_it_and_the_gain_is_honest() -> None:
    blur = torch.linspace(0.3, 4, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(0))]
    scores, fresh = draw(1500, blur=blur), draw(20_000, blur=blur, seed=1)
    study = fit_mixing(scores)
    assert study.before.mean < study.shared.mean + 0.005
    assert study.per_label.mean > study.shared.mean + 0.01
    assert study.weight.min() > 0.3
    lam = study.per_label.lam
    assert isinstance(lam, Tensor)
    assert lam[blur.argsort()][:4].max() < lam[blur.argsort()][-4:].min()
    for mixture in (study.before, study.shared, study.per_label):
        mixed = fresh.mix(lam=mixture.lam, temperature=mixture.temperature)
        assert average_precision(mixed, fresh.target).mean == pytest.approx(mixture.mean, abs=0.03)


def test_labels_that_differ_by_chance_only_share_a_lam() -> None:
    study = fit_mixing(draw(500, 40, shares=torch.full((40,), 0.1)))
    assert study.weight.max() < 0.3
    assert abs(study.per_label.mean - study.shared.mean) < 0.005


def test_rare_labels_keep_less_of_their_own_curve() -> None:
    scores = draw(blur=torch.linspace(0.3, 3, 12))
    study = fit_mixing(scores)
    assert torch.equal(study.weight.argsort(), scores.target.sum(0).argsort())
    assert study.weight[0] < 0.9 * study.weight[-1]


def test_what_was_scored_with_wins_ties() -> None:
    """Where the patches say nothing, no lam but 1 / 3 has a reason to be chosen."""
    image = draw(100, 3).get("image")
    logits = {"image": image, "patch": torch.zeros_like(image), "tde": image}
    scores = Scores(
        ("a", "b", "c"), tuple(map(str, range(100))), draw(100, 3).target, logits, lam=1 / 3, temperature=2.0
    )
    study = fit_mixing(scores, lams=(0.0, 1.0, 3.0))
    assert (study.shared.lam, study.shared.temperature) == (1 / 3, 2.0)
    assert study.per_label.mean == study.before.mean


def test_without_patches_the_temperature_stays() -> None:
    scores = replace(draw(blur=3.0), patch_logits=None, weights=None, temperature=1.5)
    study = fit_mixing(scores)
    assert study.temperatures == (1.5,)
    assert study.shared.temperature == 1.5
    assert isinstance(study.shared.lam, float)
    assert study.shared.lam > 1
    assert study.means.shape == (1, len(LAMS))
    torch.testing.assert_close(study.per_label.temperature, torch.full((12,), 1.5))


def test_scores_mixed_label_by_label_can_be_fitted_again() -> None:
    scores = draw(blur=torch.linspace(0.3, 3, 12))
    found = fit_mixing(scores).per_label
    mixed = scores.mix(lam=found.lam, temperature=found.temperature)
    assert scores.weights is not None
    assert scores.patch_logits is not None
    weights = torch.softmax(scores.weights.log() / found.temperature, dim=1)
    again = replace(
        scores,
        logits={"image": scores.get("image"), "patch": (weights * scores.patch_logits).sum(1), "tde": mixed},
        weights=weights,
        lam=found.lam,
        temperature=found.temperature,
    )
    study = fit_mixing(again)
    assert study.before.lam is found.lam
    assert study.before.mean == pytest.approx(average_precision(mixed, scores.target).mean, abs=1e-4)
    assert study.temperatures == TEMPERATURES
    torch.testing.assert_close(study.means, fit_mixing(scores).means, atol=1e-4, rtol=0)


def test_the_plainest_mixture_wins_unless_beaten() -> None:
    study = fit_mixing(draw(100, 3))
    gains = {(1, 0): -0.1, (2, 0): -0.1, (2, 1): -0.1}
    mixtures = [study.before, study.shared, study.per_label]

    def low_end(new: Tensor, old: Tensor) -> float:
        places = [next(i for i, m in enumerate(mixtures) if m.logits is logits) for logits in (new, old)]
        return gains[places[0], places[1]]

    assert choose_mixture(study, low_end) is study.before
    gains[1, 0] = 0.0
    assert choose_mixture(study, low_end) is study.before
    gains[1, 0] = 0.1
    assert choose_mixture(study, low_end) is study.shared
    gains[2, 1] = 0.1
    assert choose_mixture(study, low_end) is study.per_label
    gains.update({(1, 0): -0.1, (2, 0): 0.1})
    assert choose_mixture(study, low_end) is study.per_label


def test_labels_without_a_positive_take_the_shared_pair() -> None:
    scores = draw(blur=torch.linspace(0.3, 3, 12))
    scores.target[:, 3] = 0
    scores.target[1:, 5] = 0
    scores.target[0, 5] = 1
    study = fit_mixing(scores)
    assert study.weight[3] == 0
    assert isinstance(study.per_label.lam, Tensor)
    assert study.per_label.lam[3].item() == pytest.approx(study.shared.lam)
    assert torch.isfinite(study.weight).all()


def test_one_label_is_all_labels() -> None:
    study = fit_mixing(draw(300, 1))
    assert isinstance(study.per_label.lam, Tensor)
    assert study.per_label.lam.item() == pytest.approx(study.shared.lam)


def test_bad_input_is_named() -> None:
    scores = draw(50, 2)
    with pytest.raises(InputError, match="scores: there are no 'patch' logits"):
        fit_mixing(replace(scores, logits={"image": scores.get("image")}))
    with pytest.raises(InputError, match="fit_mixing: folds is 2; give 3 or more"):
        fit_mixing(scores, folds=2)
    with pytest.raises(InputError, match="fit_mixing: lam is -1.0; give a finite number"):
        fit_mixing(scores, lams=(-1.0,))
    with pytest.raises(InputError, match="fit_mixing: temperature is 0.0; give a number above 0"):
        fit_mixing(scores, temperatures=(0.0,))
    with pytest.raises(InputError, match="fit_mixing: a logit is not finite; find where the model made it"):
        fit_mixing(replace(scores, logits={**scores.logits, "patch": scores.get("patch") / 0}))
    with pytest.raises(InputError, match="temperatures are one a label and the patches were not kept; score the"):
        fit_mixing(replace(scores, patch_logits=None, temperature=torch.ones(2)))
