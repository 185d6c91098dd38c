"""A run, a checkpoint or scores are told apart in one place for all verbs."""

from pathlib import Path

import pytest
import torch

from pivotpatch.cli.sources import find_fitted, find_pictures, list_not_read, open_pictures, open_source
from pivotpatch.core.adaptive import Adaptive
from pivotpatch.core.calibration import Calibration
from pivotpatch.core.policies import PerLabel
from pivotpatch.errors import InputError
from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.models.classifier import Classifier, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import RunFolder

CHANGES = ["data.train=scenes:@train?count=9", "train.epochs=7"]


@pytest.fixture(scope="module")
def model() -> Classifier:
    return MultiLabelClassifier("test_vit", ["cat", "dog"], image_size=32)


@pytest.fixture
def run(model: Classifier, tmp_path: Path) -> Path:
    """The folder of a run that has a best network."""
    folder = RunFolder(tmp_path / "run", load_config(None, CHANGES))
    folder.create()
    folder.save_best(model)
    folder.close()
    return tmp_path / "run"


def has_weights_of(found: Classifier | None, model: Classifier) -> bool:
    return found is not None and all(
        torch.equal(value, found.state_dict()[name]) for name, value in model.state_dict().items()
    )


def test_a_run_is_its_best_network_and_its_configuration(run: Path, model: Classifier) -> None:
    source = open_source(run)
    assert has_weights_of(source.model, model)
    assert source.config == load_config(None, CHANGES)
    assert (source.path, source.checkpoint) == (run, run / "best")


def test_a_checkpoint_has_no_configuration(run: Path, model: Classifier) -> None:
    source = open_source(str(run / "best"))
    assert has_weights_of(source.model, model)
    assert (source.config, source.checkpoint) == (None, run / "best")


def test_a_run_whose_configuration_was_left_behind_is_its_best_network(run: Path, model: Classifier) -> None:
    (run / "config.toml").unlink()
    source = open_source(run)
    assert has_weights_of(source.model, model)
    assert (source.config, source.checkpoint) == (None, run / "best")


def test_scores_are_told_by_their_names_and_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "no scores at all.PARQUET"
    with pytest.raises(InputError, match="no scores at all.PARQUET: there is no such file; check the path"):
        open_source(path)
    path.touch()
    assert open_source(path) == (path, None, None, None)


def test_a_folder_may_end_like_scores(run: Path, model: Classifier) -> None:
    save_checkpoint(model, run.parent / "model.npz")
    assert has_weights_of(open_source(run.parent / "model.npz").model, model)


def test_what_is_none_of_them_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere: is neither a bundled model nor a folder"):
        open_source(tmp_path / "nowhere")
    for path in (run / "best").iterdir():
        path.unlink()
    (run / "best").rmdir()
    with pytest.raises(InputError, match=r"run: the run has no best model yet; train on, or give .*run/last"):
        open_source(run)


def test_pictures_are_an_address_a_table_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    assert find_pictures([]) is None
    assert open_pictures([]) is None
    assert [find_pictures([word]) for word in ("a.csv", "photos", "coco:x@y")] == [
        *("table:a.csv", "folder:photos", "coco:x@y")
    ]
    records = open_pictures(["scenes:@val?count=3"])
    assert records is not None
    assert len(records) == 3
    with pytest.raises(InputError, match="'nothing': is neither an address nor a table or folder that is there; ch"):
        find_pictures(["nothing"])


def test_only_the_first_of_many_broken_pictures_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    list_not_read({f"{place}.jpg": f"{place}.jpg: broken" for place in range(23)})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "not read: 0.jpg: broken"
    assert lines[-1] == "not read: 3 more, --json lists all"
    assert len(lines) == 21


def test_a_closer_look_is_decided_on_in_its_own_calibration() -> None:
    model = PatchClassifier("test_resnet", ["cat", "cup"], image_size=32, closer_size=48)
    image, patches, again = (
        Calibration(kind, "platt_per_label", (slope, 1.0), (0.0, 0.0))
        for kind, slope in (("image", 1.0), ("tde", 2.0), ("tde", 3.0))
    )
    model.calibration, model.adaptive = patches, Adaptive(image, (0.0, 1.0), again)
    assert find_fitted(model, ["cat"], closer_size=48) is None
    model.thresholds = (0.25, 0.75)
    for closer_size, calibration in ((None, patches), (48, again)):
        assert find_fitted(model, ["cup"], closer_size=closer_size) == (PerLabel((0.75,)), calibration.select([1]))
