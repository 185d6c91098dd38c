import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_checkpoints import LABELS, edit_json, make_classifier

from pivotpatch import PatchClassifier, load_checkpoint, save_checkpoint
from pivotpatch.core.adaptive import Adaptive
from pivotpatch.core.calibration import Calibration
from pivotpatch.errors import InputError
from pivotpatch.models.checkpoint import fingerprint
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.preprocessing import Preprocessing


@pytest.fixture
def model() -> Classifier:
    return make_classifier()


@pytest.fixture
def folder(model: Classifier, tmp_path: Path) -> Path:
    save_checkpoint(model, tmp_path / "model")
    return tmp_path / "model"


def test_everything_comes_back(model: Classifier, tmp_path: Path) -> None:
    model.thresholds = (0.1, 0.2, 0.3)
    model.calibration = Calibration("tde", "platt_per_label", (0.5, 1.0, -2.0), (0.1, 0.0, -3.0))
    image = Calibration("image", "platt_per_label", (0.25, 1.0, 2.0), (1.0, 2.0, 1 / 3))
    again = Calibration("tde", "platt_per_label", (0.75, 1.0, 1.5), (0.0, -1.0, 1 / 7))
    model.adaptive = Adaptive(image, (0.0, 1 / 3, 1 / 3, 0.75), again)
    model.preprocessing = replace(model.preprocessing, image_size=96)
    assert isinstance(model, PatchClassifier)
    model.patch_only = True
    save_checkpoint(model, tmp_path / "deep" / "model")
    state = torch.random.get_rng_state()
    loaded = load_checkpoint(tmp_path / "deep" / "model")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert isinstance(loaded, PatchClassifier)
    assert (loaded.grid, loaded.overlap, loaded.source_size, loaded.patch_size) == (3, 0.25, 320, 96)
    assert (loaded.closer_size, loaded.lam, loaded.temperature, loaded.patch_only) == (240, 0.5, 2.0, True)
    assert loaded.thresholds == (0.1, 0.2, 0.3)
    assert loaded.calibration == model.calibration
    assert loaded.adaptive == model.adaptive
    assert loaded.preprocessing == model.preprocessing
    assert loaded.architecture == model.architecture
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())
    assert not loaded.training


def test_a_file_from_before_some_options_is_read(folder: Path) -> None:
    newer = ("overlap", "source_size", "patch_size", "closer_size", "patch_only")
    edit_json(lambda d: [d["patching"].pop(name) for name in newer])(folder)
    edit_json(lambda d: [d.pop(name) for name in ("calibration", "adaptive")])(folder)
    loaded = load_checkpoint(folder)
    assert isinstance(loaded, PatchClassifier)
    assert [getattr(loaded, name) for name in ("grid", *newer)] == [3, 0.0, None, None, None, False]
    assert (loaded.calibration, loaded.adaptive) == (None, None)


def test_a_failed_save_leaves_the_last_good_one(model: Classifier, folder: Path) -> None:
    """A limit on the size of a file is the full disk that a test can have."""
    before = (folder / "model.json").read_bytes(), (folder / "model.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before[1]) // 2, hard))
    try:
        with pytest.raises(InputError, match="File too large; free some space"):
            save_checkpoint(model, folder, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    next(model.parameters()).data.fill_(1e6)
    with pytest.raises(InputError, match="too large for half precision"):
        save_checkpoint(model, folder, overwrite=True, half=True)
    assert before == ((folder / "model.json").read_bytes(), (folder / "model.safetensors").read_bytes())
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    folder.rename(folder.with_name("model.old"))
    with pytest.raises(InputError, match="an interrupted save left the last one in .*model.old, rename it"):
        load_checkpoint(folder)
    folder.with_name("model.old").rename(folder.with_name("best"))
    with pytest.raises(InputError, match="is no checkpoint, model.json is missing; give .*/best, which is one"):
        load_checkpoint(folder.parent)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("labels", ("cat", "dog", 3), r"labels.2 is 3 \(Input should be a valid string\); correct it in the model"),
        ("preprocessing", Preprocessing(64, mean=(float("nan"),) * 3), "the model cannot be described"),
        ("calibration", Calibration("tde", "platt", (1.0,), (0.0,)), "1 values of calibration.slope for 3 labels"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    name: str, value: object, message: str, model: Classifier, folder: Path
) -> None:
    setattr(model, name, value)
    with pytest.raises(InputError, match=f"^save_checkpoint: {message}"):
        save_checkpoint(model, folder, overwrite=True)
    assert load_checkpoint(folder).labels == tuple(LABELS)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_only_checkpoints_are_ever_replaced(model: Classifier, folder: Path) -> None:
    place = folder.parent
    (place / "photos").mkdir()
    (place / "photos" / "a.jpg").touch()
    (place / "file").touch()
    (place / "new.old").mkdir()
    (place / "new.old" / "notes.txt").touch()
    for name, named in (("photos", "photos"), ("file", "file"), ("new", "new.old")):
        with pytest.raises(InputError, match=f"{named}: exists and is no checkpoint; choose another folder"):
            save_checkpoint(model, place / name, overwrite=True)
    assert (place / "photos" / "a.jpg").exists()
    assert (place / "new.old" / "notes.txt").exists()
    (place / "empty").mkdir()
    save_checkpoint(model, place / "empty", overwrite=True)
    assert load_checkpoint(place / "empty").labels == ("cat", "dog", "cow")
    with pytest.raises(InputError, match="exists already; choose another folder or allow overwriting"):
        save_checkpoint(model, folder)


def test_a_fingerprint_is_that_of_the_weights_alone(model: Classifier, folder: Path) -> None:
    own = fingerprint(model)
    assert len(own) == 16
    assert int(own, 16)
    assert fingerprint(load_checkpoint(folder).to(memory_format=torch.channels_last)) == own
    model.thresholds = (0.1, 0.2, 0.3)
    model.calibration = Calibration("tde", "platt_per_label", (0.5, 1.0, -2.0), (0.1, 0.0, -3.0))
    assert isinstance(model, PatchClassifier)
    model.set_mixing(lam=2.0, temperature=0.5)
    assert fingerprint(torch.compile(model)) == own  # type: ignore[arg-type]
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-3
    changed = fingerprint(model)
    assert changed != own
    assert fingerprint(model.half()) not in (own, changed)
