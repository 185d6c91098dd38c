"""The loop trains and reports what its task says, and nothing else."""

from pathlib import Path

import pytest
from run_process import read_run

from pivotpatch.models.checkpoint import load_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import read_log
from pivotpatch.training.loop import fit, resume

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
    ("changes", "parts", "judged"),
    [
        (["task.kind=image"], {"image"}, {"image"}),
        (["task.kind=patch"], {"image", "patch"}, {"image", "patch", "tde"}),
        (["task.closer_size=48"], {"image", "patch", "closer"}, {"image", "patch", "tde"}),
        (["task.kind=patch_only"], {"patch"}, {"patch"}),
        (["task.kind=independent", 'data.labels=["one", "two"]'], {"image"}, {"image"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_log_tells_of_each_part_of_the_task(
    changes: list[str], parts: set[str], judged: set[str], tmp_path: Path
) -> None:
    result = fit(load_config(None, [*SETTINGS, *changes]), tmp_path / "run")
    *steps, last = read_log(tmp_path / "run")
    assert {key.removeprefix("loss_") for key in steps[-1] if key.startswith("loss_")} == parts
    assert {key.removeprefix("val_mAP_") for key in last if key.startswith("val_mAP_")} == judged
    assert result.metrics["best_val_mAP"] == last[f"val_mAP_{result.metrics['ranking']}"]
    total = sum(value for key, value in steps[-1].items() if key.startswith("loss_"))
    assert steps[-1]["loss"] == pytest.approx(total)


def test_a_run_that_learns_to_look_closer_keeps_that_and_goes_on_to_the_same_end(tmp_path: Path) -> None:
    config = load_config(None, [*SETTINGS, "train.epochs=2", "output.save_every=1", "task.closer_size=48"])

    def crash(stage: str, done: int, _total: int | None) -> None:
        if (stage, done) == ("train", 3):
            raise ZeroDivisionError

    fit(config, tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        fit(config, tmp_path / "crashed", progress=crash)
    resume(tmp_path / "crashed")
    assert read_run(tmp_path / "crashed") == read_run(tmp_path / "whole")
    for name in ("best", "last"):
        model = load_checkpoint(tmp_path / "whole" / name)
        assert isinstance(model, PatchClassifier)
        assert model.closer_size == 48
