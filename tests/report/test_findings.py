from dataclasses import replace

import pytest
import torch
from made_scores import make_scores

from pivotpatch.audit.cooccurrence import decide, rate_pairs
from pivotpatch.audit.label_errors import find_label_errors
from pivotpatch.core.calibration import Calibration
from pivotpatch.core.policies import Fixed, PerLabel
from pivotpatch.report.findings import PAIRS_PER_LABEL, PANELS, Findings, Subject, gather_findings
from pivotpatch.tuning.calibration import reliability

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
    alone = gather(SUBJECT)
    image = Subject("image", replace(SUBJECT.scores, logits={"image": SUBJECT.scores.get("image")}, weights=None))
    beside = gather(SUBJECT, image)
    assert alone.reference == "the image logits of the same model"
    assert alone.difference is not None
    assert beside.difference is not None
    assert alone.difference.interval == beside.difference.interval
    assert alone.comparison is not None
    assert beside.comparison is not None
    assert alone.comparison.cfpr.to_dict() == beside.comparison.cfpr.to_dict()
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
    rows = [example.row for pair in found.worst for example in pair.examples]
    assert len(set(rows)) > 0.8 * len(rows)  # new images where there are


def test_cases_are_the_largest_gains_and_losses(found: Findings) -> None:
    scores = SUBJECT.scores
    rise = scores.probs("tde") - BASELINE.scores.probs("image")
    gain = torch.where(scores.target == 1, rise, -rise)
    gain[scores.target.isnan()] = 0
    gains = [gain[case.row, LABELS.index(case.label)].item() for case in found.cases]
    assert gains[:6] == pytest.approx(gain.max(dim=0).values.sort(descending=True).values[:6].tolist())
    assert gains[6:] == pytest.approx(gain.min(dim=0).values.sort().values[:6].tolist())


def test_curves_go_from_the_best_label_to_the_worst(found: Findings) -> None:
    assert found.difference is not None
    gains = {label: gain or 0.0 for label, gain in zip(LABELS, found.difference.per_label, strict=True)}
    chosen = [gains[label] for label in found.panels]
    assert len(chosen) == PANELS
    assert chosen == sorted(chosen, reverse=True)
    assert {chosen[0], chosen[-1]} == {max(gains.values()), min(gains.values())}
    assert {tuple(curves) for curves in found.panels.values()} == {("image", "patch", "tde", "baseline")}


def test_calibration_and_label_errors_are_those_of_the_functions(found: Findings) -> None:
    scores = SUBJECT.scores
    assert found.calibration["before"].curve.ece == reliability(scores.probs("tde"), scores.target).ece
    assert found.calibration["after"].quality.overall.log_loss < found.calibration["before"].quality.overall.log_loss
    assert list(found.errors) == find_label_errors(scores, count=18)


def test_thresholds_of_calibrated_probabilities_decide_alike_everywhere() -> None:
    generator = torch.Generator().manual_seed(3)
    thresholds = tuple((0.3 + 0.4 * torch.rand(10, generator=generator)).tolist())
    calibration = Calibration("tde", "platt", (0.5,) * 10, (-1.0,) * 10)
    subject = replace(SUBJECT, policy=PerLabel(thresholds), calibration=calibration)
    expected = calibration.apply(SUBJECT.scores.scaled("tde")) > torch.tensor(thresholds)
    found = gather(subject)
    known = ~SUBJECT.scores.target.isnan()
    hits = (expected & (SUBJECT.scores.target == 1)).sum(0)
    decided = found.evaluation.kinds["tde"].decided
    assert decided is not None
    assert decided.precision == pytest.approx((hits / (expected & known).sum(0)).tolist())
    assert found.evaluation.kinds["image"].decided is None  # these thresholds say nothing of it
    assert replace(SUBJECT, policy=Fixed(0.3)).thresholds == (0.3,) * 10


def test_curves_tell_logits_apart_whose_probabilities_are_all_one(found: Findings) -> None:
    sure = {kind: 60 + values.double() for kind, values in SUBJECT.scores.logits.items()}
    curves = gather(Subject("sure", replace(SUBJECT.scores, logits=sure)), BASELINE).panels
    assert curves.keys() == found.panels.keys()
    for label, kinds in found.panels.items():
        for kind, curve in kinds.items():
            assert torch.equal(curves[label][kind].recall, curve.recall)
            assert torch.equal(curves[label][kind].precision, curve.precision)
        step = kinds["tde"].recall.diff(prepend=torch.zeros(1, dtype=torch.float64))
        oracle = found.evaluation.kinds["tde"].precision.per_label[LABELS.index(label)]
        assert (step * kinds["tde"].precision).sum().item() == pytest.approx(oracle)
