"""A run, a checkpoint or scores are told apart in one place for all verbs; so are images and policies."""

from pathlib import Path

import pytest
import torch

from pivotpatch.cli.sources import find_fitted, list_not_read, open_pictures, open_source, read_policy
from pivotpatch.core.adaptive import Adaptive
from pivotpatch.core.calibration import Calibration
from pivotpatch.core.policies import Fixed, PerLabel, TopK
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import Classifier, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import RunFolder

CHANGES = ["data.train=scenes:@train?count=9", "train.epochs=7"]
MODEL = MultiLabelClassifier("test_vit", ["cat", "dog"], image_size=32)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has a best model."""
    folder = RunFolder(tmp_path / "run", load_config(None, CHANGES))
    folder.create()
    folder.save_best(MODEL)
    folder.close()
    return tmp_path / "run"


def is_model(found: Classifier | None) -> bool:
    return found is not None and all(
        torch.equal(value, found.state_dict()[name]) for name, value in MODEL.state_dict().items()
    )


def test_a_run_is_its_best_model_and_its_configuration(run: Path) -> None:
    source = open_source(run)
    assert is_model(source.model)
    assert source.config == load_config(None, CHANGES)
    assert (source.path, source.checkpoint) == (run, run / "best")
    checkpoint = open_source(str(run / "best"))
    assert is_model(checkpoint.model)
    assert (checkpoint.config, checkpoint.checkpoint) == (None, run / "best")
    (run / "config.toml").unlink()
    assert open_source(run).config is None


def test_scores_are_told_by_their_names_and_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "no scores at all.PARQUET"
    with pytest.raises(InputError, match="no scores at all.PARQUET: there is no such file; check the path"):
        open_source(path)
    path.touch()
    assert open_source(path) == (path, None, None, None)


def test_what_is_none_of_them_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere: "):
        open_source(tmp_path / "nowhere")
    (run / "best").rename(tmp_path / "away")
    with pytest.raises(InputError, match=r"run: the run has no best model yet; train on, or give .*run/last"):
        open_source(run)


def test_images_are_an_address_a_table_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_pictures([]) is None
    records = open_pictures(["scenes:@val?count=3"])
    assert records is not None
    assert len(records) == 3
    with pytest.raises(InputError, match="'nothing': is neither an address nor a table or folder that is there; ch"):
        open_pictures(["nothing"])
    with pytest.raises(InputError, match="'b.csv': a third word; give a model or scores, then the images"):
        open_pictures(["a.csv", "b.csv"])


def test_policies_are_words() -> None:
    assert (read_policy("fixed:0.3", ["cat"]), read_policy("top:2", ["cat"])) == (Fixed(0.3), TopK(2))
    assert read_policy("prior", ["cat"]) is None
    with pytest.raises(InputError, match="--policy: unknown policy 'fixd'; did you mean 'fixed'?"):
        read_policy("fixd:1", ["cat"])
    with pytest.raises(InputError, match="--policy: 'fixed' has no number; write for example fixed:0.5"):
        read_policy("fixed", ["cat"])


def test_only_the_first_of_many_broken_images_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
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
