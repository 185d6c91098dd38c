"""Case studies say what the scores say, and the clearest are found."""

from dataclasses import replace

import pytest
import torch
from made_scores import make_scores

from pivotpatch.audit.cases import find_cases
from pivotpatch.errors import InputError

LABELS = ("a", "b", "c")
SCORES = replace(make_scores(LABELS, count=40), lam=0.5).remix(lam=0.5)
BASELINE = make_scores(LABELS, count=40, patches=False, seed=1)


def test_the_clearest_cases_are_those_of_a_loop_with_the_probabilities_and_weights_of_their_labels() -> None:
    found = find_cases(SCORES, BASELINE, count=5)
    target = SCORES.target
    gains = []
    for column, label in enumerate(LABELS):
        signs = [(1 if target[row, column] == 1 else -1, row) for row in range(40) if not target[row, column].isnan()]
        rise = (SCORES.probs("tde") - BASELINE.probs("image"))[:, column].tolist()
        gains.append(sorted((sign * rise[row], row, label) for sign, row in signs))
    expected = sorted((each[-1] for each in gains), reverse=True)[:3] + sorted(each[0] for each in gains)[:2]
    assert [(case.row, case.label) for case in found] == [(row, label) for _, row, label in expected]
    for case in found:
        column, weights = LABELS.index(case.label), SCORES.weights
        assert weights is not None
        assert case.image == pytest.approx(SCORES.get("image")[case.row, column].sigmoid().item())
        assert case.patch == pytest.approx(SCORES.get("patch")[case.row, column].sigmoid().item())
        assert case.tde == pytest.approx(torch.sigmoid(SCORES.get("tde")[case.row, column] / 1.5).item())
        assert case.weights == pytest.approx(weights[case.row, :, column].tolist())
        assert case.baseline == pytest.approx(BASELINE.probs("image")[case.row, column].item())
        assert case.shown == (target[case.row, column] == 1)
        truth = dict(zip(LABELS, target[case.row].tolist(), strict=True))
        assert case.others == tuple(label for label in LABELS if truth[label] == 1 and label != case.label)
    same = replace(BASELINE, logits={"image": SCORES.get("tde") / 1.5})
    assert find_cases(SCORES, same) == []  # a model that is its baseline has no case


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(InputError, match="the patches were not kept; score the images again"):
        find_cases(replace(SCORES, patch_logits=None, weights=None), BASELINE)
    with pytest.raises(InputError, match="images differ"):
        find_cases(SCORES, replace(BASELINE, pictures=BASELINE.pictures[::-1]))
