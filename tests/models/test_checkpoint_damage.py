"""A checkpoint that is cut short, edited by hand or made up is refused in one line that says what is wrong."""

from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest
import torch
from made_checkpoints import edit_json, make_classifier
from safetensors.torch import load_file, save_file

from pivotpatch import PatchClassifier, load_checkpoint, save_checkpoint
from pivotpatch.errors import InputError

CALIBRATION = {"kind": "tde", "method": "platt", "slope": [1.0, 1.0, 1.0], "offset": [0.0]}
IMAGE = {**CALIBRATION, "kind": "image", "offset": [0.0, 1.0, 2.0]}
NAMES = [str(number) for number in range(500)]
LARGER = "describes a far larger model than its weights are of; it is damaged, copy the model again"


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
    (
        edit_weights(lambda s: s["head.project.bias"].fill_(torch.nan)),
        "head.project.bias holds values that are not fin",
    ),
    (cut("model.safetensors", 0.5), "model.safetensors: cannot be read .*; it is damaged or cut short, copy it again"),
]
FILES = [
    (cut("model.json", 0.5), "model.json: is no JSON .*line .*; it is damaged, copy the checkpoint again"),
    (lambda f: (f / "model.json").write_bytes(b"\xff\xfe"), "model.json: is no JSON .*utf-8"),
    (lambda f: (f / "model.json").write_text("[" * 100_000), "model.json: is no JSON"),
    (lambda f: (f / "model.json").write_text("[]"), r"model.json: content is \[\]"),
]
VALUES = [
    (fit(schema=99), "schema 99 is newer than 1, .*; upgrade pivotpatch"),
    (edit_json(lambda d: d.pop("labels")), "model.json: lacks labels; save the checkpoint again"),
    (fit(kind="PatchClasifier"), "kind is 'PatchClasifier' .*; did you mean 'PatchClassifier'"),
    (fit(patching=None), "patching is None for a PatchClassifier"),
    (fit(labels=["cat", "dog", "cow", "owl"]), r"misshapen .*instead of \(4,"),
    (fit(pivotpatch=["a" * 9999]), r"pivotpatch is \['a{36} \.\.\. a{35}'\] \("),
    (fit(thresholds=[0.5]), "1 thresholds for 3 labels"),
    (fit(thresholds=[0.1, 0.2, 5]), "thresholds.2 is 5"),
    (fit(calibration=CALIBRATION), "1 values of calibration.offset for 3 labels"),
    (fit(calibration={**IMAGE, "slope": [1.0, 1e308, 1.0]}), r"calibration.slope.1 is 1e\+308"),  # all certain
    (fit(adaptive={"calibration": IMAGE, "cutoffs": [0.0, 1.0], "again": IMAGE}), "adaptive.again.kind is 'image'"),
    (fit(adaptive={"calibration": IMAGE, "cutoffs": [1.0, 0.0]}), r"adaptive.cutoffs is \[1.0, 0.0\] .*not rise"),
    (give("architecture", backbone="tset_resnet"), "timm has no model 'tset_resnet'; did you"),
    (give("architecture", backbone_options={"checkpoint_path": "evil.pth"}), "option 'checkpoint_path' is not yours"),
    (give("architecture", backbone_options={"global_pool": 1}), "backbone 'test_resnet': cannot be built with"),
    (give("preprocessing", std=[1, 1, 0]), r"and std \(1.0, 1.0, 0.0\); give three"),
    (give("preprocessing", mean=[0, 0, 1e38]), "preprocessing.mean is"),
    (give("patching", weights="/etc/passwd"), "patching.weights is '/etc/passwd'"),
    (give("patching", overlap=1), "patching.overlap is 1 .*less than 1"),
    (give("patching", source_size=8), "source_size is 8; give a side of 160 pixels"),
    (give("patching", closer_size=160), "a closer look at 160 pixels is no closer than"),
    (give("patching", lam=[1.0, 1.0, 1.0]), r"patching.lam is \[1.0, 1.0, 1.0\]"),  # a lam per label is no more
]
LIMITS = [
    (give("architecture", image_size=4097), "architecture.image_size is 4097"),
    (give("patching", patch_size=4097), "patching.patch_size is 4097"),
    (give("preprocessing", image_size=10**30), f"preprocessing.image_size is {10**30}"),
    (give("preprocessing", image_size=4096), "model.json: an image and its 3 x 3 patches have 17 million pixels"),
    (give("patching", grid=17), "patching.grid is 17 .*less than or equal to 16"),
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
    before = getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 300_000  # kB: what is too large is refused before it is made


def test_all_that_the_limits_allow_is_saved_and_loaded(tmp_path: Path) -> None:
    model = PatchClassifier("test_resnet", ["cat"], image_size=240, grid=16, source_size=4000)
    save_checkpoint(model, tmp_path / "model")
    loaded = load_checkpoint(tmp_path / "model")
    assert isinstance(loaded, PatchClassifier)
    assert (loaded.grid, loaded.source_size) == (16, 4000)
    with pytest.raises(InputError, match="an image and its 16 x 16 patches have 17 million pixels; .* 16.8 million"):
        PatchClassifier("test_resnet", ["cat"], image_size=256, grid=16)
    with pytest.raises(InputError, match="a closer look at 4097 pixels is too large; give 4096 at most"):
        loaded.closer_cost(4097)
