"""The loop reports what its task trains, and nothing else."""

from pathlib import Path

import pytest

from pivotpatch.training.config import load_config
from pivotpatch.training.folder import read_log
from pivotpatch.training.loop import fit

SETTINGS = [
    "data.train=scenes:@train?count=24&size=32",
    "data.val_fraction=0.5",
    "data.hold=memory",
    "model.backbone=test_resnet",
    "model.pretrained=false",
    "model.image_size=32",
    "train.epochs=1",
    "train.batch_size=6",
    "output.trackers=[]",
]


@pytest.mark.parametrize(
    ("kind", "parts", "judged"),
    [
        ("image", {"image"}, {"image"}),
        ("patch", {"image", "patch"}, {"image", "patch", "tde"}),
        ("patch_only", {"patch"}, {"patch"}),
        ("independent", {"image"}, {"image"}),
    ],
)
def test_the_log_tells_of_each_part_of_the_task(kind: str, parts: set[str], judged: set[str], tmp_path: Path) -> None:
    changes = [f"task.kind={kind}", *(['data.labels=["one", "two"]'] if kind == "independent" else [])]
    result = fit(load_config(None, [*SETTINGS, *changes]), tmp_path / "run")
    *steps, last = read_log(tmp_path / "run")
    assert {key.removeprefix("loss_") for key in steps[-1] if key.startswith("loss_")} == parts
    assert {key.removeprefix("val_mAP_") for key in last if key.startswith("val_mAP_")} == judged
    assert result.metrics["best_val_mAP"] == last[f"val_mAP_{result.metrics['ranking']}"]
    total = sum(value for key, value in steps[-1].items() if key.startswith("loss_"))
    assert steps[-1]["loss"] == pytest.approx(total)
