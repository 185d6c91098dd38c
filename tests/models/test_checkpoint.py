"""What is saved comes back; what is cut short, edited by hand or made up is refused in one line that says why."""

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pivotpatch import PatchClassifier, load_checkpoint, save_checkpoint
from pivotpatch.errors import InputError
from pivotpatch.models.backbone import Preprocessing, get_config, read_preprocessing
from pivotpatch.models.checkpoint import fingerprint
from pivotpatch.runtime.values import Adaptive, Calibration, Patching

LABELS = ["cat", "dog", "cow"]
CALIBRATION = {"kind": "tde", "method": "platt", "slope": [1.0, 1.0, 1.0], "offset": [0.0]}
IMAGE = {**CALIBRATION, "kind": "image", "offset": [0.0, 1.0, 2.0]}
NAMES = [str(number) for number in range(500)]
LARGER = "describes a far larger model than its weights are of; it is damaged, copy the model again"


def make_classifier() -> PatchClassifier:
    torch.manual_seed(0)
    return PatchClassifier(
        "test_resnet", LABELS, patching=Patching(3, 0.25, 320, 96, 240, lam=0.5, temperature=2)
    ).eval()


def edit_json(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """What changes the description in a checkpoint's folder."""

    def apply(folder: Path) -> None:
        described = json.loads((folder / "model.json").read_text("utf-8"))
        change(described)
        (folder / "model.json").write_text(json.dumps(described), "utf-8")

    return apply


@pytest.fixture
def model() -> PatchClassifier:
    return make_classifier()


@pytest.fixture
def folder(model: PatchClassifier, tmp_path: Path) -> Path:
    save_checkpoint(model, tmp_path / "model")
    return tmp_path / "model"


def test_images_are_resized_as_in_training_whatever_older_checkpoints_say_of_the_backbone(
    model: PatchClassifier, folder: Path, tmp_path: Path
) -> None:
    assert read_preprocessing(get_config("test_vit")).interpolation == "bicubic"  # of timm's authors
    assert PatchClassifier("test_vit", LABELS).preprocessing.interpolation == "bilinear"
    edit_json(lambda told: told["preprocessing"].update(interpolation="bicubic"))(folder)
    assert load_checkpoint(folder).preprocessing == model.preprocessing
    model.preprocessing = replace(model.preprocessing, interpolation="bicubic")  # would not come back
    with pytest.raises(InputError, match="its images are resized 'bicubic', and those of checkpoints bilinearly; set"):
        save_checkpoint(model, tmp_path / "other")


def test_everything_comes_back(model: PatchClassifier, tmp_path: Path) -> None:
    model.thresholds = (0.1, 0.2, 0.3)
    model.preferences = {"precision": (0.5, 0.6, 0.7), "recall": (0.0, 1 / 3, 0.1)}
    model.calibration = Calibration("tde", "platt_per_label", (0.5, 1.0, -2.0), (0.1, 0.0, -3.0))
    image = Calibration("image", "platt_per_label", (0.25, 1.0, 2.0), (1.0, 2.0, 1 / 3))
    again = Calibration("tde", "platt_per_label", (0.75, 1.0, 1.5), (0.0, -1.0, 1 / 7))
    model.adaptive = Adaptive(image, (0.0, 1 / 3, 1 / 3, 0.75), again)
    model.preprocessing = replace(model.preprocessing, image_size=96)
    model.patch_only = True
    save_checkpoint(model, tmp_path / "deep" / "model")
    state = torch.random.get_rng_state()
    loaded = PatchClassifier.from_pretrained(tmp_path / "deep" / "model")
    assert torch.equal(torch.random.get_rng_state(), state)
    fitted = ("thresholds", "preferences", "calibration", "adaptive")
    for name in ("patching", "patch_only", *fitted, "preprocessing", "architecture"):
        assert getattr(loaded, name) == getattr(model, name), name
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())
    assert not loaded.training


def test_half_the_bytes_say_nearly_the_same(model: PatchClassifier, folder: Path, tmp_path: Path) -> None:
    model.thresholds = (0.1, 0.2, 0.3)
    save_checkpoint(model, tmp_path / "small", half=True)
    sizes = [(place / "model.safetensors").stat().st_size for place in (folder, tmp_path / "small")]
    assert sizes[1] < 0.55 * sizes[0]
    small = load_checkpoint(tmp_path / "small")
    assert small.thresholds == model.thresholds
    for key, value in model.state_dict().items():
        torch.testing.assert_close(small.state_dict()[key], value, rtol=1e-3, atol=1e-6)  # float32 again


def test_a_failed_save_leaves_the_last_good_one(model: PatchClassifier, folder: Path) -> None:
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
    with pytest.raises(InputError, match="model.json is missing; .*; an interrupted save leaves .* in model.old"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("labels", ("cat", "dog", 3), r"labels.2 is 3 \(Input should be a valid string\); correct it in the model"),
        ("preprocessing", Preprocessing(64, mean=(float("nan"),) * 3), "preprocessing.mean.0 is nan"),
        ("calibration", Calibration("tde", "platt", (1.0,), (0.0,)), "thresholds or a calibration are not of 3 labels"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    name: str, value: object, message: str, model: PatchClassifier, folder: Path
) -> None:
    setattr(model, name, value)
    with pytest.raises(InputError, match=f"^save_checkpoint: {message}"):
        save_checkpoint(model, folder, overwrite=True)
    assert load_checkpoint(folder).labels == tuple(LABELS)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_only_checkpoints_are_ever_replaced(model: PatchClassifier, folder: Path) -> None:
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


def test_a_fingerprint_is_that_of_the_weights_alone(model: PatchClassifier, folder: Path) -> None:
    own = fingerprint(model)
    assert len(own) == 16
    assert int(own, 16)
    assert fingerprint(load_checkpoint(folder).to(memory_format=torch.channels_last)) == own
    model.thresholds = (0.1, 0.2, 0.3)
    model.calibration = Calibration("tde", "platt_per_label", (0.5, 1.0, -2.0), (0.1, 0.0, -3.0))
    model.set_mixing(lam=2.0, temperature=0.5)
    assert fingerprint(torch.compile(model)) == own  # type: ignore[arg-type]
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-3
    changed = fingerprint(model)
    assert changed != own
    assert fingerprint(model.half()) not in (own, changed)


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return apply


def give(section: str, **values: object) -> Callable[[Path], None]:
    """Change numbers in a section of the description."""
    return edit_json(lambda described: described[section].update(values))


def fit(**values: object) -> Callable[[Path], None]:
    """Change the description itself."""
    return edit_json(lambda described: described.update(values))


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return apply


WEIGHTS = [
    (edit_weights(lambda s: s.pop("head.project.bias")), r"1 missing \(head.project.bias\); give the weights of this"),
    (edit_weights(lambda s: s.update(more=torch.zeros(1))), r"1 extra \(more\)"),
    (edit_weights(lambda s: s.update({"head.project.bias": torch.zeros(7)})), r"is \(7,\) instead of \(3,\)"),
    (edit_weights(lambda s: s.update({"head.project.bias": torch.zeros(3).long()})), "is torch.int64 instead"),
    (edit_weights(lambda s: s["head.project.bias"].fill_(torch.nan)), "bias holds values that are not fin"),
    (cut("model.safetensors", 0.5), "model.safetensors: cannot be read .*; it is damaged or cut short, copy it again"),
]
FILES = [
    (cut("model.json", 0.5), "model.json: cannot be read as JSON .*line .*; copy the checkpoint again"),
    (lambda f: (f / "model.json").write_text("[" * 100_000), "cannot be read as JSON"),
    (lambda f: (f / "model.json").write_text("[]"), "model.json: Input should be an object"),
]
VALUES = [
    (fit(schema=99), "schema is 99 .*; save the checkpoint again, or upgrade pivotpatch"),
    (edit_json(lambda d: d.pop("labels")), "model.json: labels .Field required."),
    (fit(kind="PatchClasifier"), "kind is 'PatchClasifier' .*'PatchClassifier'"),
    (fit(patching=None), "patching is None for a PatchClassifier"),
    (fit(labels=["cat", "dog", "cow", "owl"]), r"misshapen .*instead of \(4,"),
    (fit(thresholds=[0.5]), "thresholds or a calibration are not of 3 labels"),
    (fit(calibration=CALIBRATION), "Calibration: 3 slopes and 1 offsets"),
    (
        fit(calibration={**IMAGE, "slope": [1.0, 1e308, 1.0]}),
        "a number of a calibration is beyond 10000",
    ),  # all certain
    (fit(adaptive={"calibration": IMAGE, "cutoffs": [0.0, 1.0], "again": IMAGE}), "is of 'image' logits; fit"),
    (give("architecture", backbone="tset_resnet"), "timm has no model 'tset_resnet'; did you"),
    (give("architecture", backbone_options={"checkpoint_path": "evil.pth"}), "option 'checkpoint_path' is not yours"),
    (give("architecture", backbone_options={"global_pool": 1}), "backbone 'test_resnet': cannot be built with"),
    (give("preprocessing", std=[1, 1, 0]), "preprocessing.std.2 is 0 "),
    (give("patching", weights="/etc/passwd"), "patching.weights is '/etc/passwd'"),
    (give("patching", overlap=1), "patching.overlap is 1 .*less than 1"),
    (give("patching", source_size=8), "source_size is 8; give a side of 160 pixels"),
    (give("patching", lam=[1.0, 1.0, 1.0]), r"patching.lam is \[1.0, 1.0, 1.0\]"),  # a lam per label is no more
]
LIMITS = [
    (give("architecture", image_size=4097), "architecture.image_size is 4097"),
    (give("preprocessing", image_size=4096), "model.json: an image and its 3 x 3 patches have 17 million pixels"),
    (give("patching", grid=16, source_size=1000, overlap=0.9), "image and its 16 x 16 patches have 41 million pixels"),
    (give("architecture", backbone_options={"base_width": 10**7}), "'base_width': 10000000 is too large a number"),
    (give("architecture", head="query2label", head_options={"feedforward": 10**9}), "1000000000 is too large a number"),
    (give("architecture", backbone_options={"stem_width": 4096}), LARGER),
    (give("architecture", head="ml_decoder", head_options={"width": 1 << 20}), LARGER),  # a matrix of 4 TB
    (fit(kind="IndependentClassifier", patching=None, labels=NAMES), LARGER),
]


@pytest.mark.parametrize(("damage", "message"), [*WEIGHTS, *FILES, *VALUES, *LIMITS])
def test_damage_is_named_in_one_line(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_checkpoint(make_classifier(), folder)
    damage(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=message):
        load_checkpoint(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB: refused before it is made
