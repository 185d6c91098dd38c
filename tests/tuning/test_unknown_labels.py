"""What nobody looked at is unknown, not absent: one `?dog` of a table, followed from its file to the audit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pivotpatch.audit import evaluate_scores, find_false_positives, find_label_errors, rate_pairs
from pivotpatch.core.losses import asymmetric_loss, binary_cross_entropy
from pivotpatch.core.metrics import average_precision, precision_recall
from pivotpatch.core.policies import Fixed
from pivotpatch.data.address import open_records
from pivotpatch.data.check import check_data
from pivotpatch.inference.scores import Scores
from pivotpatch.tuning import fit_calibration, fit_thresholds, judge_calibration, parse_goal
from pivotpatch.tuning.tune import tune_scores

LABELS = ("cat", "dog", "sofa")
COUNT = 60
ROW, DOG = 7, 1  # the image of which nobody knows whether it shows a dog


def write_target(folder: Path, dog: str) -> torch.Tensor:
    """A table of 60 images is written and read; `dog` is what stands for that one label."""
    generator = np.random.default_rng(3)
    shown = generator.random((COUNT, 3)) < 0.4
    shown[ROW] = True, False, True
    lists = [[name for name, there in zip(LABELS, row, strict=True) if there] for row in shown]
    lists[ROW] += [dog] if dog else []
    rows = [f"{place}.jpg;{'|'.join(names)}" for place, names in enumerate(lists)]
    (folder / "t.csv").write_text("\n".join(["image;labels", *rows]))
    records = open_records(f"table:{folder / 't.csv'}")
    assert records.labels.names == LABELS
    return records.target()


def make_scores(target: torch.Tensor, *, score: float) -> Scores:
    """Scores that know something, and say `score` of the one label."""
    noise = torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
    logits = 2 * target.nan_to_num(0) - 1 + 1.5 * noise
    logits[ROW, DOG] = score
    return Scores(LABELS, tuple(map(str, range(COUNT))), target, {"image": logits})


def tune(scores: Scores) -> Any:
    return tune_scores(scores, generator=torch.Generator().manual_seed(0))


JUDGES: dict[str, Callable[[Scores], Any]] = {
    "loss": lambda s: [f(s.get("image"), s.target).item() for f in (asymmetric_loss, binary_cross_entropy)],
    "average precision": lambda s: average_precision(s.get("image"), s.target).per_label,
    "precision and recall": lambda s: precision_recall(s.probs("image"), s.target),
    "calibration": lambda s: fit_calibration(s.get("image"), s.target, kind="image"),
    "its quality": lambda s: judge_calibration(s.probs("image").float(), s.target),
    "thresholds": lambda s: fit_thresholds(s.probs("image"), s.target, goal=parse_goal("cost:9:1")),
    "a wanted precision": lambda s: fit_thresholds(s.probs("image"), s.target, goal=parse_goal("precision:0.6")),
    "evaluate": lambda s: evaluate_scores(s, resamples=0, generator=torch.Generator()).to_dict(),
    "tune": lambda s: tune(s).to_dict(),
    "conditional rates": lambda s: rate_pairs(s, policy=Fixed(0.5), min_probability=0).to_dict(),
    "rates at equal counts": lambda s: rate_pairs(s, min_probability=0).to_dict(),
    "false positives": lambda s: [find_false_positives(s, "dog", context=other) for other in ("cat", "sofa")],
}


@pytest.mark.parametrize("name", JUDGES)
def test_what_a_model_says_of_an_unknown_label_changes_nothing(name: str, tmp_path: Path) -> None:
    """And it would, were the label absent: else this test would say nothing."""
    judge = JUDGES[name]
    unknown, absent = (write_target(tmp_path, dog) for dog in ("?dog", ""))
    assert torch.equal(unknown.isnan().nonzero(), torch.tensor([[ROW, DOG]]))
    low, high = (repr(judge(make_scores(unknown, score=score))) for score in (-9.0, 9.0))
    assert low == high
    low, high = (repr(judge(make_scores(absent, score=score))) for score in (-9.0, 9.0))
    assert low != high


def test_an_unknown_label_is_no_annotation_error(tmp_path: Path) -> None:
    for dog, found in (("?dog", 0), ("", 1)):
        scores = make_scores(write_target(tmp_path, dog), score=9.0)
        errors = find_label_errors(scores)
        assert sum((error.row, error.label) == (ROW, "dog") for error in errors) == found
    write_target(tmp_path, "?dog")
    summary = check_data([open_records(f"table:{tmp_path / 't.csv'}")], depth="labels").summaries[0]
    assert summary.unknown_share == 1 / (3 * COUNT)
