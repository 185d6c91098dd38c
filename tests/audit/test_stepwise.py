"""Step-wise evaluation against scikit-learn, and the study of image scale."""

from dataclasses import replace

import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor

from pivotpatch.audit.stepwise import evaluate_steps, study_scale
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores

LABELS = ("cat", "dog", "never", "hat")


@pytest.fixture
def scores() -> Scores:
    generator = torch.Generator().manual_seed(0)
    target = (torch.rand(250, 4, generator=generator) < torch.tensor([0.3, 0.1, 0.0, 0.5])).float()

    def draw(strength: float) -> Tensor:
        return strength * target + torch.randn(250, 4, generator=generator)

    image, patch = draw(1.0), draw(0.8)
    logits = {"image": image, "patch": patch, "tde": image + patch}
    return Scores(LABELS, tuple(map(str, range(250))), target, logits)


def test_each_step_is_scikit_learns_and_the_gain_is_over_the_better_part(scores: Scores) -> None:
    found = evaluate_steps(scores)
    assert [step.label for step in found.steps] == ["cat", "dog", "hat"]
    assert found.skipped == ("never",)
    for step in found.steps:
        place = LABELS.index(step.label)
        oracle = {
            kind: average_precision_score(scores.target[:, place], logits[:, place])
            for kind, logits in scores.logits.items()
        }
        assert {"image": step.image, "patch": step.patch, "tde": step.tde} == pytest.approx(oracle)
        assert step.gain == pytest.approx(oracle["tde"] - max(oracle["image"], oracle["patch"]))
        assert step.positives == scores.target[:, place].sum()
    assert found.mean["tde"] == pytest.approx(sum(step.tde for step in found.steps) / 3)
    assert found.share_gained == sum(step.gain > 0 for step in found.steps) / 3
    with pytest.raises(InputError, match="there are no 'patch' logits"):
        evaluate_steps(replace(scores, logits={"image": scores.get("image")}))


def test_the_scale_study_sets_tde_beside_the_patches_of_another_model(scores: Scores) -> None:
    alone = replace(scores, logits={"patch": scores.get("patch")})
    found = study_scale(scores, alone, resamples=200, generator=torch.Generator().manual_seed(0))
    known = [0, 1, 3]
    oracle = [
        average_precision_score(scores.target[:, known], logits[:, known])
        for logits in (scores.get("patch"), scores.get("tde"))
    ]
    assert [found.patch, found.tde] == pytest.approx(oracle)
    assert found.difference.value == pytest.approx(oracle[1] - oracle[0])
    assert found.difference.low < found.difference.value < found.difference.high
    assert found.labels == ("cat", "dog", "hat")
