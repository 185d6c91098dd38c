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
SIZES = (
    ("architecture", "image_size"),
    ("preprocessing", "image_size"),
    ("patching", "source_size"),
    ("patching", "patch_size"),
    ("patching", "closer_size"),
)
NAMES = [str(number) for number in range(500)]
IMAGE = {**CALIBRATION, "kind": "image", "offset": [0.0, 1.0, 2.0]}


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return apply


def give(section: str, name: str, value: object) -> Callable[[Path], None]:
    return edit_json(lambda described: described[section].update({name: value}))


def give_head(name: str, **options: float) -> Callable[[Path], None]:
    return edit_json(lambda described: described["architecture"].update(head=name, head_options=options))


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            edit_weights(lambda s: s.pop("head.project.bias")),
            r"1 missing \(head.project.bias\); give the weights of this",
        ),
        (edit_weights(lambda s: s.update(more=torch.zeros(1))), r"1 extra \(more\)"),
        (
            edit_weights(lambda s: s.update({"head.project.bias": torch.zeros(7)})),
            r"1 misshapen \(head.project.bias is \(7,\) instead of \(3,\)\)",
        ),
        (edit_json(lambda d: d["labels"].append("owl")), r"misshapen .*instead of \(4,"),
        (
            cut("model.safetensors", 0.5),
            "model.safetensors: cannot be read .*; it is damaged or cut short, copy it again",
        ),
        (cut("model.safetensors", 0), "model.safetensors: cannot be read"),
        (cut("model.json", 0.5), "model.json: is no JSON .*line .*; it is damaged, copy the checkpoint again"),
        (lambda f: (f / "model.json").write_bytes(b"\xff\xfe"), "model.json: is no JSON .*utf-8"),
        (lambda f: (f / "model.json").write_text("[]"), "states no schema; it is not a checkpoint of pivotpatch"),
        (lambda f: (f / "model.json").unlink(), "is no checkpoint, model.json is missing; check the path"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: there is no such file"),
        (edit_json(lambda d: d.update(schema=99)), "schema 99 is newer than 1, .*; upgrade pivotpatch"),
        (edit_json(lambda d: d.pop("labels")), "model.json: lacks labels; save the checkpoint again"),
        (
            edit_json(lambda d: d.update(kind="PatchClasifier")),
            "unknown kind 'PatchClasifier'; did you mean 'PatchClassifier'",
        ),
        (
            edit_json(lambda d: d["architecture"].update(neck="x")),
            "architecture.neck is 'x' .*; save the checkpoint again",
        ),
        (edit_json(lambda d: d["preprocessing"].pop("mean")), "lacks preprocessing.mean; save"),
        (
            edit_json(lambda d: d["architecture"].update(backbone="tset_resnet")),
            "timm has no model 'tset_resnet'; did you",
        ),
        (edit_json(lambda d: d.update(thresholds=[0.5])), "1 thresholds for 3 labels; fit them again"),
        (edit_json(lambda d: d["patching"].update(grid="2")), "patching.grid is '2'"),
        (edit_json(lambda d: d["patching"].update(weights="/etc/passwd")), "patching.weights is '/etc/passwd'"),
        (edit_json(lambda d: d["patching"].update(overlap=1)), "patching.overlap is 1 .*less than 1"),
        (edit_json(lambda d: d["patching"].update(source_size=8)), "source_size is 8; give a side of 160 pixels"),
        (edit_json(lambda d: d["patching"].update(closer_size=160)), "a closer look at 160 pixels is no closer than"),
        (edit_json(lambda d: d["patching"].update(closer_size=0)), "patching.closer_size is 0 .*greater than or equal"),
        (edit_json(lambda d: d["patching"].update(temperature=0)), "patching.temperature is 0 .*greater than 0"),
        (
            edit_json(lambda d: d["patching"].update(temperature=[1, 0, 1])),
            r"patching.temperature.1 is 0 \(Input should",
        ),
        (edit_json(lambda d: d["patching"].update(lam="1")), r"patching.lam is '1' \(Input should be a valid number\)"),
        (
            edit_json(lambda d: d["patching"].update(lam=[1.0, -1.0, 1.0])),
            "patching.lam.1 is -1.0 .*greater than or eq",
        ),
        (
            edit_json(lambda d: d["patching"].update(lam=[1.0])),
            r"lam has shape \(1,\); give a number or a tensor \(3,\)",
        ),
        (
            edit_json(lambda d: d.update(calibration=CALIBRATION)),
            "1 values of calibration.offset for 3 labels; fit them",
        ),
        (edit_json(lambda d: d.update(calibration={**CALIBRATION, "kind": "im"})), "calibration.kind is 'im'"),
        (
            edit_json(lambda d: d.update(calibration={**CALIBRATION, "slope": [1, "2", 3]})),
            "calibration.slope.1 is '2'",
        ),
        (  # it would make every label certain
            edit_json(lambda d: d.update(calibration={**CALIBRATION, "slope": [1.0, 1e308, 1.0]})),
            r"calibration.slope.1 is 1e\+308",
        ),
        (edit_json(lambda d: d.update(calibration={"kind": "tde"})), "lacks calibration.method; save the checkpoint"),
        (
            edit_json(lambda d: d.update(adaptive={"calibration": {**IMAGE, "slope": [1.0]}, "cutoffs": [0.0, 1.0]})),
            "1 values of adaptive.calibration.slope for 3 labels; fit them",
        ),
        (
            edit_json(lambda d: d.update(adaptive={"calibration": CALIBRATION, "cutoffs": [0.0, 1.0]})),
            "adaptive.calibration.kind is 'tde'",
        ),
        (
            edit_json(lambda d: d.update(adaptive={"calibration": IMAGE, "cutoffs": [0.0, 1.0], "again": IMAGE})),
            "adaptive.again.kind is 'image'",
        ),
        (
            edit_json(
                lambda d: d.update(
                    adaptive={"calibration": IMAGE, "cutoffs": [0.0, 1.0], "again": {**CALIBRATION, "slope": [1.0]}}
                )
            ),
            "1 values of adaptive.again.slope for 3 labels; fit them",
        ),
        (edit_json(lambda d: d.update(adaptive={"calibration": IMAGE})), "lacks adaptive.cutoffs; save the checkpoint"),
        (
            edit_json(lambda d: d.update(adaptive={"calibration": IMAGE, "cutoffs": [1.0, 0.0]})),
            r"adaptive.cutoffs is \[1.0, 0.0\] .*they do not rise",
        ),
        (edit_json(lambda d: d.update(adaptive={"calibration": IMAGE, "cutoffs": [1.0]})), "adaptive.cutoffs is"),
        (
            edit_json(lambda d: d.update(adaptive={"calibration": IMAGE, "cutoffs": [-1.0, 0.0]})),
            "adaptive.cutoffs.0 is -1.0",
        ),
        (edit_json(lambda d: d.update(patching=None)), "patching is None for a PatchClassifier; save"),
        (edit_json(lambda d: d.update(thresholds=["a", "b", "c"])), "thresholds.0 is 'a'"),
        (edit_json(lambda d: d.update(thresholds=[0.1, 0.2, 5])), "thresholds.2 is 5"),
        (edit_json(lambda d: d.update(labels="abc")), "labels is 'abc'"),
        (edit_json(lambda d: d.update(labels=[1, 2, 3])), "labels.0 is 1"),
        (edit_json(lambda d: d.update(schema=True)), "states no schema"),
        (edit_json(lambda d: d.update(schema=0)), "schema is 0"),
        (edit_json(lambda d: d["architecture"].update(image_size="64")), "architecture.image_size.* is '64'"),
        (
            edit_json(lambda d: d["architecture"].update(backbone_options={"checkpoint_path": "evil.pth"})),
            "option 'checkpoint_path' is not yours to set; leave it out",
        ),
        (lambda f: (f / "model.json").write_text("[" * 100_000), "model.json: is no JSON"),
        *(
            (give(section, name, size), f"{section}.{name} is {size}")
            for section, name in SIZES
            for size in (4097, 10**30)
        ),
        (edit_json(lambda d: d["patching"].update(grid=17)), "patching.grid is 17 .*less than or equal to 16"),
        (
            edit_json(lambda d: d["patching"].update(grid=16, source_size=1000, overlap=0.9)),
            "model.json: an image and its 16 x 16 patches have 41 million pixels; give a smaller grid, overlap or size",
        ),
        (
            give("preprocessing", "image_size", 4096),
            "model.json: an image and its 3 x 3 patches have 17 million pixels",
        ),
        (
            edit_json(lambda d: d["preprocessing"].update(mean=[0.5, 0.5])),
            r"preprocessing.mean is \(0.5, 0.5\) and std",
        ),
        (
            edit_json(lambda d: d["preprocessing"].update(std=[])),
            r"and std \(\); give three numbers below 1e\+30 each, those of std",
        ),
        (edit_json(lambda d: d["preprocessing"].update(std=[1, 1, 0])), r"and std \(1.0, 1.0, 0.0\); give three"),
        (edit_json(lambda d: d["preprocessing"].update(mean=[0, 0, 1e38])), "preprocessing.mean is"),
        (edit_json(lambda d: d["preprocessing"].update(mean=[0, 0, 10**400])), "preprocessing.mean"),
        (
            edit_json(lambda d: d["architecture"].update(backbone_options={"global_pool": 1})),
            "model.json: backbone 'test_resnet': cannot be built with {'global_pool': 1}: .*; change what",
        ),
        (edit_json(lambda d: d["architecture"].update(backbone_options={"layers": [1]})), "architecture.backbone_opt"),
        (
            edit_json(lambda d: d["architecture"].update(backbone_options={"base_width": 10**7})),
            "model.json: backbone 'test_resnet': 'base_width': 10000000 is too large a number; give 1,048,576 at most",
        ),
        (
            edit_json(lambda d: d["architecture"].update(backbone_options={"stem_width": 4096})),
            "model.json: describes a far larger model than its weights are of; it is damaged, copy the model again",
        ),
        (give_head("query2label", dropout=7), "head 'query2label': cannot be built with {'dropout': 7}: dropout prob"),
        (give_head("query2label", width=8.0), "cannot be built with {'width': 8.0}"),
        (give_head("query2label", feedforward=10**9), "'feedforward': 1000000000 is too large a number"),
        (give_head("ml_decoder", width=8000), "describes a far larger model"),
        (
            give_head("query2label", width=4, attention_heads=1, feedforward=1, decoder_layers=10**6),
            "describes a far larger model",
        ),
        (edit_json(lambda d: d.update(kind="IndependentClassifier", patching=None, labels=NAMES)), "far larger model"),
        (edit_json(lambda d: d.update(pivotpatch=["a" * 9999])), r"pivotpatch is \['a{36} \.\.\. a{35}'\] \("),
        (
            edit_weights(lambda s: s.update({"head.project.bias": torch.zeros(3, dtype=torch.int64)})),
            "is torch.int64 inst",
        ),
    ],
)
def test_damage_is_named_in_one_line(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_checkpoint(make_classifier(), folder)
    damage(folder)
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


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


def test_a_model_that_is_far_too_large_is_refused_before_it_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_checkpoint(make_classifier(), folder)
    give_head("ml_decoder", width=1 << 20)(folder)  # one matrix of its decoder would take 4 TB
    before = getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="describes a far larger model than its weights are of"):
        load_checkpoint(folder)
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 300_000  # kB; what is spare
