"""Case studies say what the scores say, and the clearest are found."""

from dataclasses import replace

import pytest
import torch

from pivotpatch.audit.cases import find_cases, gather_logits, study_case
from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores

NAN = float("nan")


@pytest.fixture
def scores() -> Scores:
    generator = torch.Generator().manual_seed(0)
    target = (torch.rand(40, 3, generator=generator) < 0.5).float()
    target[0] = torch.tensor([NAN, 1.0, 0.0])
    out = combine_logits(torch.randn(40, 3, generator=generator), torch.randn(40, 4, 3, generator=generator), lam=0.5)
    logits = {"image": out.image_logits, "patch": out.pooled_logits, "tde": out.tde_logits}
    names = tuple(map(str, range(40)))
    return Scores(("a", "b", "c"), names, target, logits, out.patch_logits, out.weights, lam=0.5)


@pytest.fixture
def baseline(scores: Scores) -> Scores:
    logits = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    return Scores(scores.labels, scores.pictures, scores.target, {"image": logits})


def test_a_case_holds_the_probabilities_and_weights_of_its_label(scores: Scores, baseline: Scores) -> None:
    case = study_case(scores, 0, label=2, baseline=baseline)
    logits = gather_logits(scores, 0)
    assert case.image == pytest.approx(logits.image_logits.sigmoid()[0, 2].item())
    assert case.patch == pytest.approx(logits.pooled_logits.sigmoid()[0, 2].item())
    assert case.tde == pytest.approx(logits.probs[0, 2].item())
    assert case.tde == pytest.approx(torch.sigmoid(scores.get("tde")[0, 2] / 1.5).item())
    assert case.weights == pytest.approx(logits.weights[0, :, 2].tolist())
    assert sum(case.weights) == pytest.approx(1.0)
    assert case.baseline == pytest.approx(baseline.probs("image")[0, 2].item())
    assert (case.label, case.shown, case.others) == ("c", False, ("b",))
    unknown = study_case(scores, 0, label=0)
    assert (unknown.shown, unknown.baseline) == (None, None)


def test_the_clearest_cases_are_those_of_a_loop(scores: Scores, baseline: Scores) -> None:
    found = find_cases(scores, baseline, count=3)
    rise = (scores.probs("tde") - baseline.probs("image")).tolist()
    for wanted, sign, cases in ((1.0, 1, found[:3]), (0.0, -1, found[3:])):
        gains = [
            (sign * rise[row][column], row, scores.labels[column])
            for row in range(40)
            for column in range(3)
            if scores.target[row, column] == wanted
            and any(scores.target[row, other] == 1 for other in range(3) if other != column)
        ]
        assert [(case.row, case.label) for case in cases] == [(row, label) for _, row, label in sorted(gains)[:-4:-1]]
    same = Scores(scores.labels, scores.pictures, scores.target, {"image": scores.get("tde") / 1.5})
    assert find_cases(scores, same) == []  # a model that is its baseline has no case


def test_what_cannot_be_shown_is_refused(scores: Scores, baseline: Scores) -> None:
    with pytest.raises(InputError, match="the patches were not kept; score the images again"):
        study_case(replace(scores, patch_logits=None, weights=None), 0, label=0)
    with pytest.raises(InputError, match="images differ"):
        find_cases(scores, replace(baseline, pictures=baseline.pictures[::-1]))
