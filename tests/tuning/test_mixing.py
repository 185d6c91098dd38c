"""Lam and temperature against every pair tried one by one, and the honesty of what is reported."""

from dataclasses import replace

import pytest
import torch
from made_scores import make_scores

from pivotpatch.core.metrics import average_precision
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores
from pivotpatch.tuning.calibration import draw_folds
from pivotpatch.tuning.mixing import LAMS, MixingStudy, fit_mixing

NAN = float("nan")
LABELS = tuple("abcdef")


def draw(count: int = 300, *, blur: float = 0.0, seed: int = 0) -> Scores:
    """Scores of 4 patches; `blur` is the noise that is added to the image logits."""
    scores = make_scores(LABELS, count=count, seed=seed)
    noise = torch.randn(scores.target.shape, generator=torch.Generator().manual_seed(seed))
    return replace(scores, logits={**scores.logits, "image": scores.get("image") + blur * noise}).remix()


def fit(scores: Scores, lams: tuple[float, ...] = LAMS, temperatures: tuple[float, ...] = (0.5, 2.0)) -> MixingStudy:
    generator = torch.Generator().manual_seed(0)
    return fit_mixing(scores, lams=lams, temperatures=temperatures, resamples=50, generator=generator)


def test_folds_are_even_shuffled_and_drawn_again_alike() -> None:
    folds = draw_folds(103)
    assert sorted(folds.sum(1).tolist()) == [20, 20, 21, 21, 21]
    assert torch.equal(folds.sum(0), torch.ones(103, dtype=torch.int64))
    assert torch.equal(folds, draw_folds(103))
    assert not folds[0, ::5].all()
    with pytest.raises(InputError, match="folds: there are 4 images; give 5 or more"):
        draw_folds(4)


def test_every_pair_has_its_own_map_and_the_best_is_shared() -> None:
    scores = draw(150)
    scores = replace(scores, logits={**scores.logits, "image": scores.get("image").round()}).remix()  # many are equal
    scores.target[:40, 1] = NAN
    scores.target[:, 2] = 0.0  # a label that no image shows has no part in it
    study = fit(scores, lams=(2.0, 0.0, 0.7), temperatures=(3.0, 0.5))
    assert study.lams == (0.0, 0.7, 1.0, 2.0)
    assert study.temperatures == (0.5, 1.0, 3.0)
    expected = torch.tensor(
        [
            [
                average_precision(scores.remix(lam=lam, temperature=t).get("tde"), scores.target).mean
                for lam in study.lams
            ]
            for t in study.temperatures
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(study.means, expected, atol=1e-5, rtol=0)
    row, column = divmod(int(expected.argmax()), 4)
    assert study.fitted == (study.lams[column], study.temperatures[row])
    assert study.mean_before == pytest.approx(average_precision(scores.get("tde"), scores.target).mean, abs=1e-6)


def test_an_images_own_fold_has_no_say() -> None:
    """Flipping the targets of a fold changes what is fitted, but not how images of the fold are ranked."""
    scores = draw()
    folds = draw_folds(len(scores))
    changed = scores.target.clone()
    changed[folds[1]] = 1 - changed[folds[1]]
    one, other = (fit(each).scores.get("tde") for each in (scores, replace(scores, target=changed)))
    assert torch.equal(one[folds[1]].argsort(0), other[folds[1]].argsort(0))
    assert not torch.equal(one[folds[2]].argsort(0), other[folds[2]].argsort(0))


def test_the_gain_is_honest_and_decides() -> None:
    scores, fresh = draw(1000, blur=4.0), draw(10_000, blur=4.0, seed=1)
    study = fit(scores)
    assert study.gain.value == pytest.approx(study.mean_fitted - study.mean_before)
    assert 0 < study.gain.low < study.gain.value < study.gain.high
    assert study.pays
    before, shared = (
        average_precision(fresh.remix(**each._asdict()).get("tde"), fresh.target).mean
        for each in (study.before, study.fitted)
    )
    assert shared - before == pytest.approx(study.gain.value, abs=0.02)
    assert not fit(scores.remix(**study.fitted._asdict())).pays


def test_what_was_scored_with_wins_ties() -> None:
    """Where the patches say nothing, no lam but 1 / 3 has a reason to be chosen."""
    scores, image = make_scores(LABELS, count=100, patches=False), make_scores(LABELS, count=100).get("image")
    logits = {"image": image, "patch": torch.zeros_like(image), "tde": image}
    scores = replace(scores, logits=logits, lam=1 / 3, temperature=2.0)
    study = fit(scores, lams=(0.0, 1.0, 3.0))
    assert study.fitted == (1 / 3, 2.0)


def test_without_patches_the_temperature_stays() -> None:
    study = fit(replace(draw(blur=3.0), patch_logits=None, weights=None, temperature=1.5))
    assert (study.temperatures, study.fitted.temperature) == ((1.5,), 1.5)
    assert study.fitted.lam > 1
    assert study.means.shape == (1, len(LAMS))


def test_images_without_any_label_are_refused() -> None:
    with pytest.raises(InputError, match="fit_mixing: no label has a positive image"):
        fit(replace(draw(20), target=torch.zeros(20, len(LABELS))))
