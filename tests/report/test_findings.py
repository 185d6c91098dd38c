from dataclasses import replace
from typing import Any

import pytest
import torch
from made_scores import make_scores

from pivotpatch.audit.cooccurrence import decide, rate_pairs
from pivotpatch.report.findings import PAIRS_PER_LABEL, Findings, Subject, gather_findings

LABELS = tuple("abcdefghij")
SUBJECT = Subject("model", make_scores(LABELS, count=300))
BASELINE = Subject("old", make_scores(LABELS, count=300, patches=False, seed=1, skill=1.0))


def gather(subject: Subject, baseline: Subject | None = None) -> Findings:
    generator = torch.Generator().manual_seed(0)
    return gather_findings(subject, baseline=baseline, resamples=20, generator=generator)


@pytest.fixture(scope="module")
def found() -> Findings:
    return gather(SUBJECT, BASELINE)


def test_without_a_baseline_the_image_logits_of_the_model_are_it() -> None:
    alone: Any = gather(SUBJECT)
    image = Subject("image", replace(SUBJECT.scores, logits={"image": SUBJECT.scores.get("image")}, weights=None))
    beside: Any = gather(SUBJECT, image)
    assert alone.difference.interval == beside.difference.interval
    assert [(case.row, case.label) for case in alone.cases] == [(case.row, case.label) for case in beside.cases]


def test_worst_pairs_are_rates_of_the_audit_with_misjudged_images(found: Findings) -> None:
    rates, other = rate_pairs(SUBJECT.scores), rate_pairs(BASELINE.scores)
    decided, target = decide(SUBJECT.scores), SUBJECT.scores.target
    assert len(found.worst) == 10
    for pair in found.worst:
        names = pair.rates["label"], pair.rates["company"]
        place = rates.names.index(names)
        assert pair.rates["cfpr"] == rates.fpr[place].item() > 0
        assert pair.reference == other.fpr[place].item()
        label, context = map(LABELS.index, names)
        for example in pair.examples:
            assert decided[example.row, label]
            assert target[example.row, [label, context]].tolist() == [0, 1]
    labels = [pair.rates["label"] for pair in found.worst]
    assert max(map(labels.count, labels)) <= PAIRS_PER_LABEL
