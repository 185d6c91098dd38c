"""The closer look as a user meets it: judged by evaluate, measured and stored by tune."""

from pathlib import Path
from typing import Any

import pytest
import torch
from verb import KEEP, QUICK, SCENES, SIZE, Errors, read_json, read_refusal, score, write_run

from pivotpatch.core.metrics import average_precision
from pivotpatch.data.address import open_records
from pivotpatch.data.scenes import SCENE_LABELS
from pivotpatch.inference.score_file import read_scores
from pivotpatch.models import save_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.tuning.tune import tune_scores

VAL = "scenes:@val?count=40&size=32"
CLOSER = 48


@pytest.fixture(autouse=True)
def models(here: Path) -> None:
    """The folder of a run, and the same model as one that learnt to look closer."""
    torch.manual_seed(0)
    model = PatchClassifier("test_resnet", SCENE_LABELS.names, image_size=SIZE).eval()
    write_run("plain", model, f"data.train={SCENES[0]}")
    model.closer_size = CLOSER
    save_checkpoint(model, "closer")


open_network = PatchClassifier.from_pretrained


def test_evaluate_judges_a_closer_look_where_one_is_asked_for(capsys: Errors) -> None:
    words = ("evaluate", "closer", VAL, *QUICK, "--keep-patches", "--save")
    found = read_json(capsys, *words, "c.parquet", "--closer", str(CLOSER))
    read_json(capsys, *words, "p.parquet")
    model, records = open_network("closer"), open_records(VAL)
    for name, size in (("p.parquet", None), ("c.parquet", CLOSER)):
        scores, expected = read_scores(name), score(model, records, closer_size=size)
        torch.testing.assert_close(scores.logits, expected.logits, rtol=0, atol=1e-4)
    for kind, logits in scores.logits.items():
        assert found["mAP"][kind] == pytest.approx(average_precision(logits, scores.target).mean)
    for name, options, message in (
        ("c.parquet", ("--closer", "0"), f"c.parquet: it is of a closer look at {CLOSER} pixels, not of the patches"),
        ("p.parquet", (), "--closer: a file of scores shows no images to look at again"),
    ):
        assert read_refusal(capsys, "tune", "closer", "--scores", name, *options, *KEEP).startswith(message)


def assert_curve(found: dict[str, Any], *, cost: float) -> None:
    """Efforts below 1 cost so much for each second look, and effort 1 the four patches."""
    *points, last = found["effort"]["points"]
    assert [point["passes"] for point in points] == pytest.approx([1 + cost * point["share"] for point in points])
    assert last["passes"] == 5


def test_tune_measures_and_stores_it(capsys: Errors) -> None:
    model, records = open_network("plain/best"), open_records(VAL)
    near, scores = score(model, records, closer_size=CLOSER), score(model, records)
    words = ("tune", "plain", VAL, "--mixing", "global", "--calibration", "platt")
    found = read_json(capsys, *words, "--closer", str(CLOSER), "--out", "tuned")
    look: Any = {"closer": near, "closer_cost": 2.25}
    expected = tune_scores(scores, mixing="global", calibration="platt", **look, generator=torch.Generator())
    assert expected.effort is not None
    means = [point.mean for point in expected.effort.points]
    assert [point["mean"] for point in found["effort"]["points"]] == pytest.approx(means, abs=0.01)
    assert_curve(found, cost=2.25)
    for options, size, cost in (((), CLOSER, 2.25), (("--closer", "0"), None, 4)):  # as trained, or as told
        learnt = read_json(capsys, "tune", "closer", VAL, *KEEP, *options, "--out", f"learnt-{size}")
        assert (learnt["closer_size"], open_network(f"learnt-{size}").closer_size) == (size, size)
        assert_curve(learnt, cost=cost)
    tuned = open_network("tuned")
    assert (found["closer_size"], tuned.closer_size, model.closer_size) == (CLOSER, CLOSER, None)
