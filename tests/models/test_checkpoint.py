import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_checkpoints import LABELS, edit_json, make_classifier

from pivotpatch import MultiLabelClassifier, PatchClassifier, load_checkpoint, save_checkpoint
from pivotpatch.core.adaptive import Adaptive
from pivotpatch.core.calibration import Calibration
from pivotpatch.errors import InputError
from pivotpatch.models.checkpoint import fingerprint
from pivotpatch.models.classifier import Architecture, Classifier


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
    loaded = load_checkpoint(folder)
    assert isinstance(loaded, PatchClassifier)
    assert (loaded.grid, loaded.overlap, loaded.source_size, loaded.patch_size) == (3, 0.0, None, None)
    assert (loaded.closer_size, loaded.patch_only) == (None, False)


@pytest.mark.parametrize("name", ["calibration", "adaptive"])
def test_a_file_from_before_something_was_fitted_is_read(name: str, folder: Path) -> None:
    edit_json(lambda d: d.pop(name))(folder)
    assert getattr(load_checkpoint(folder), name) is None


def test_options_of_the_backbone_come_back(tmp_path: Path) -> None:
    chosen = Architecture("test_resnet", backbone_options={"stride_in_conv1": True, "zero_init_last": False})
    model = MultiLabelClassifier(chosen, LABELS).eval()
    save_checkpoint(model, tmp_path / "m")
    loaded = load_checkpoint(tmp_path / "m")
    images = torch.rand(2, 3, 64, 64)
    assert loaded.architecture == chosen
    assert torch.equal(loaded(images), model(images))
    plain = MultiLabelClassifier("test_resnet", LABELS).eval()
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(images), model(images))


def test_nothing_is_overwritten_unless_asked(model: Classifier, folder: Path) -> None:
    with pytest.raises(InputError, match="exists already; choose another folder or allow overwriting"):
        save_checkpoint(model, folder)
    model.thresholds = (0.5, 0.5, 0.5)
    save_checkpoint(model, folder, overwrite=True)
    assert load_checkpoint(folder).thresholds == (0.5, 0.5, 0.5)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_failed_save_leaves_the_last_good_one(model: Classifier, folder: Path) -> None:
    before = (folder / "model.json").read_bytes(), (folder / "model.safetensors").read_bytes()
    model.register_buffer("shared", model.state_dict()["head.project.bias"])  # safetensors refuses shared memory
    with pytest.raises(RuntimeError, match="share memory"):
        save_checkpoint(model, folder, overwrite=True)
    assert before == ((folder / "model.json").read_bytes(), (folder / "model.safetensors").read_bytes())
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def spoil_names(model: Classifier) -> None:
    model.labels = ("cat", "dog", 3)  # type: ignore[assignment]


def spoil_size(model: Classifier) -> None:
    model.preprocessing = replace(model.preprocessing, image_size=64.5)  # type: ignore[arg-type]


def spoil_mean(model: Classifier) -> None:
    model.preprocessing = replace(model.preprocessing, mean=(float("nan"),) * 3)


def spoil_calibration(model: Classifier) -> None:
    model.calibration = Calibration("tde", "platt", (1.0, 1.0), (0.0, 0.0))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_names, r"labels.2 is 3 \(Input should be a valid string\); correct it in the model, then save it"),
        (spoil_size, r"preprocessing.image_size is 64.5 \(.*\); correct it in the model"),
        (spoil_mean, r"the model cannot be described \(Out of range float values .*\); correct it in the model"),
        (spoil_calibration, "2 values of calibration.slope for 3 labels; fit them again"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    spoil: Callable[[Classifier], None], message: str, model: Classifier, folder: Path
) -> None:
    spoil(model)
    with pytest.raises(InputError, match=f"^save_checkpoint: ({message})"):
        save_checkpoint(model, folder, overwrite=True)
    assert load_checkpoint(folder).labels == tuple(LABELS)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_checkpoint_within_a_folder_is_named(folder: Path) -> None:
    folder.rename(folder.parent / "best")
    with pytest.raises(InputError, match="is no checkpoint, model.json is missing; give .*/best, which is one"):
        load_checkpoint(folder.parent)


def test_only_checkpoints_are_ever_replaced(model: Classifier, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    (tmp_path / "file").touch()
    (tmp_path / "new.old").mkdir()
    (tmp_path / "new.old" / "notes.txt").touch()
    for name, place in (("photos", "photos"), ("file", "file"), ("new", "new.old")):
        with pytest.raises(InputError, match=f"{place}: exists and is no checkpoint; choose another folder"):
            save_checkpoint(model, tmp_path / name, overwrite=True)
    assert (tmp_path / "photos" / "a.jpg").exists()
    assert (tmp_path / "new.old" / "notes.txt").exists()
    (tmp_path / "empty").mkdir()
    save_checkpoint(model, tmp_path / "empty", overwrite=True)
    assert load_checkpoint(tmp_path / "empty").labels == ("cat", "dog", "cow")


def test_a_full_disk_is_named_and_leaves_the_last_good_one(model: Classifier, folder: Path) -> None:
    """A limit on the size of a file is the full disk that a test can have."""
    before = (folder / "model.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(InputError, match="File too large; free some space or choose another folder"):
            save_checkpoint(model, folder, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_files_have_the_rights_of_any_new_file(folder: Path) -> None:
    (folder.parent / "plain").touch()
    expected = (folder.parent / "plain").stat().st_mode
    assert {path.stat().st_mode for path in folder.iterdir()} == {expected}


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


def test_a_crash_between_the_two_renames_is_explained(folder: Path) -> None:
    folder.rename(folder.with_name("model.old"))
    with pytest.raises(InputError, match="an interrupted save left the last one in .*model.old, rename it"):
        load_checkpoint(folder)


def test_values_too_large_for_half_precision_are_named(model: Classifier, tmp_path: Path) -> None:
    next(model.parameters()).data.fill_(1e6)
    with pytest.raises(InputError, match="too large for half precision; keep full precision"):
        save_checkpoint(model, tmp_path / "m", half=True)
    assert not (tmp_path / "m").exists()
