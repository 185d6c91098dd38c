import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from made_networks import LABELS, ask, fit_made_up, make_network, make_pictures
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from pivotpatch.errors import InputError
from pivotpatch.export import export_onnx
from pivotpatch.inference.engine import TorchEngine
from pivotpatch.models.views import make_views
from pivotpatch.runtime.engine import PROVIDERS, choose_providers, open_onnx
from pivotpatch.runtime.predictor import Predictor
from pivotpatch.runtime.values import Adaptive, Calibration, measure_uncertainty


def describe(**changes: Any) -> dict[str, str]:
    told = {"labels": LABELS, "thresholds": (0.1, 0.5, 0.9), "grid": 0, "overlap": 0.0, "picture_size": 32}
    return {"pivotpatch": json.dumps({"pivotpatch": "0", "torch": "1", **told, **changes})}


def write(
    path: Path,
    properties: dict[str, str],
    *,
    outputs: tuple[str, ...] = ("probs", "image_probs"),
    takes: int = TensorProto.UINT8,
    weight: float = 1 / 64,
) -> Path:
    """A file whose answer is known: the sigmoids of the weighted means of the channels."""
    steps: list[tuple[str, list[str], dict[str, Any]]] = [
        ("Cast", ["images"], {"to": TensorProto.FLOAT}),
        ("ReduceMean", ["Cast"], {"axes": [1, 2], "keepdims": 0}),
        ("Mul", ["ReduceMean", "weight"], {}),
        ("Sigmoid", ["Mul"], {}),
    ]
    nodes = [helper.make_node(name, given, [name], **options) for name, given, options in steps]
    nodes += [helper.make_node("Identity", ["Sigmoid"], [name]) for name in outputs]
    return save(
        path, nodes, properties, gives={name: ["batch", 3] for name in outputs}, held={"weight": weight}, takes=takes
    )


def save(
    path: Path,
    nodes: list[Any],
    properties: dict[str, str],
    *,
    gives: dict[str, list[str | int]],
    held: dict[str, float],
    takes: int = TensorProto.UINT8,
) -> Path:
    images = helper.make_tensor_value_info("images", takes, ["batch", "rows", "columns", 3])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in gives.items()]
    numbers = [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in held.items()]
    graph = helper.make_graph(nodes, "graph", [images], values, numbers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(model, properties)
    onnx.save(model, path)
    return path


def test_a_file_answers_in_its_own_words(tmp_path: Path) -> None:
    path, pictures = write(tmp_path / "a.onnx", describe()), make_pictures(4, 32, 32)
    engine, expected = open_onnx(path), torch.sigmoid(pictures.float().mean((2, 3)) / 64)
    answer = ask(engine, pictures)
    torch.testing.assert_close(answer[:2], (expected, expected), rtol=0, atol=1e-4)
    assert answer[2:] == (None, None)
    assert (engine.labels, engine.thresholds) == (LABELS, (0.1, 0.5, 0.9))
    predictions = Predictor.load(path)(list(pictures))
    np.testing.assert_allclose([each.probs for each in predictions], expected, atol=1e-4)


def test_a_pickled_predictor_opens_its_file_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(here / "a.onnx", describe())
    predictor, image = Predictor.load("a.onnx", device="cpu"), np.full((8, 8, 3), 20, np.uint8)
    content = pickle.dumps(predictor)
    monkeypatch.chdir("/")  # another process may run elsewhere
    again = pickle.loads(content)
    np.testing.assert_array_equal(again(image).probs, predictor(image).probs)
    assert repr(again) == repr(predictor)
    assert again.engine.session.get_providers() == ["CPUExecutionProvider"]
    (here / "a.onnx").unlink()
    with pytest.raises(InputError, match="there is no such file"):
        pickle.loads(content)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"source_size": 64}, {"image_size": 64, "source_size": 128, "patch_size": 32, "overlap": 0.5, "grid": 3}],
    ids=str,
)
def test_one_graph_of_looks_answers_with_every_effort_as_in_torch(options: dict[str, Any], tmp_path: Path) -> None:
    model = make_network(**options)
    fit_made_up(model)
    plain = Calibration("image", "platt", (0.75, 1.5, 1.0), (0.5, 0.0, -1.0))
    images = make_pictures(6, model.picture_size, model.picture_size)
    for closer, again in ((None, None), (96, Calibration("tde", "platt", (1.0, 0.5, 2.0), (0.0, 0.3, -0.3)))):
        model.patching = replace(model.patching, closer_size=closer)
        with torch.no_grad():
            doubt = measure_uncertainty(
                plain.apply(model.head.project(model.embed_images(make_views(model, images).image)))
            )
        cutoff = float(doubt.sort().values[2:4].mean())
        model.adaptive = Adaptive(plain, (0.0, cutoff, 1.0), again, effort=0.5)
        assert export_onnx(model, tmp_path / "looks.onnx", looks=True).difference < 1e-3
        for effort in (0, None, 0.5, 1):
            found, expected = open_onnx(tmp_path / "looks.onnx", effort=effort), TorchEngine(model, effort=effort)
            assert (found.grid, found.labels) == (expected.grid, LABELS)
            assert found.effort == expected.effort == (0.5 if effort is None else effort)
            torch.testing.assert_close(ask(found, images), ask(expected, images), rtol=0, atol=1e-3, equal_nan=True)
    export_onnx(model, tmp_path / "whole.onnx")  # which looks at every patch, whatever effort the model has
    found, expected = open_onnx(tmp_path / "whole.onnx"), TorchEngine(model, effort=1)
    assert found.effort == 1
    torch.testing.assert_close(ask(found, images), ask(expected, images), rtol=0, atol=1e-3)


PRESENT = {name: [PROVIDERS[name], PROVIDERS["cpu"]] for name in PROVIDERS if name != "cpu"}


@pytest.mark.parametrize("name", PRESENT)
def test_a_device_is_a_provider_of_onnx_runtime(name: str) -> None:
    both = PRESENT[name]
    assert choose_providers(None, reversed(both)) == choose_providers(name.upper(), both) == both
    assert choose_providers(f"{name}:2", both) == [(both[0], {"device_id": 2}), both[1]]
    assert choose_providers("cpu", both) == choose_providers("cpu:0", both) == both[1:]
    with pytest.raises(
        InputError, match=rf"^device: ONNX Runtime has no {name} here; choose cpu, or pip install onnx\S+$"
    ):
        choose_providers(name, both[1:])


@pytest.mark.parametrize("device", ["openvino", "coreml", "directml", "cudda"])
def test_torch_is_not_asked_for_what_only_onnx_runtime_may_have(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [PROVIDERS["cpu"]])
    with pytest.raises(InputError, match=f"^device: (ONNX Runtime has no {device} here|unknown device '{device}')"):
        Predictor.load(device=device)


def test_what_cannot_be_opened_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "other.onnx", describe())
    content = path.read_bytes()
    for held in (content[: len(content) // 2], b""):
        path.write_bytes(held)
        with pytest.raises(InputError, match=r"^.*other.onnx: ONNX Runtime cannot open it \(.+\); export.*$"):
            open_onnx(path)
    path.write_bytes(content.replace(b"pivotpatch", b"pivot\x88atch"))
    with pytest.raises(InputError, match=r"other.onnx: its description cannot be read \(.*\); export"):
        open_onnx(path)
    with pytest.raises(InputError, match="there is no such file"):
        open_onnx(tmp_path / "none.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match="^onnxruntime: is not installed; pip install .*onnx"):
        open_onnx(path)


@pytest.mark.parametrize(
    ("properties", "graph", "said"),
    [
        ({}, {}, "says nothing of labels and thresholds; give --architecture and --labels, or a file"),
        ({"pivotpatch": "{"}, {}, r"its description is wrong: Expecting property name"),
        (describe(picture_size=4097), {}, r"sizes are \[4097\]"),
        (describe(interpolation="nearest"), {}, "interpolation is 'nearest'"),
        (describe(grid=17), {}, "grid is 17"),
        (describe(thresholds=[0.5]), {}, "1 thresholds or calibrations for 3 labels"),
        (describe(preferences={"recall": [0.5]}), {}, "1 thresholds or calibrations for 3 labels"),
        (describe(labels=["a", "b", "a"]), {}, "a label comes twice"),
        (
            describe(labels=["a", "b"], thresholds=None),
            {},
            r"it gives \(1, 3\) \(1, 3\) where \[\(1, 2\), \(1, 2\)\] is due",
        ),
        (describe(), {"outputs": ("y",)}, "its outputs are y, not probs, image_probs"),
        (describe(), {"takes": TensorProto.FLOAT}, r"it cannot be run \([^\n]+\); export the model again"),
        (describe(), {"weight": np.nan}, "it answers nan where a probability is due; its weights or"),
    ],
)
def test_what_the_description_or_the_graph_gets_wrong_is_told(
    properties: dict[str, str], graph: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "other.onnx", properties, **graph)
    with pytest.raises(InputError, match=f"other.onnx: .*{said}"):
        open_onnx(path).ask(np.zeros((1, 9, 9, 3), np.uint8))


# Looks through a graph whose three logits are the red, green and blue of an image, against NumPy.
COLOURS = np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8)  # of three images' quarters
IMAGES = COLOURS.reshape(3, 2, 2, 3).repeat(16, axis=1).repeat(16, axis=2)
LOGITS = (COLOURS - 128.0) / 64
FIRST, PATCH, WEIGHT = LOGITS[..., 0].mean(1), LOGITS[..., 1], LOGITS[..., 2]
SHARES = np.exp(WEIGHT / 0.25) / np.exp(WEIGHT / 0.25).sum(1, keepdims=True)
POOLED = (SHARES * PATCH).sum(1)
TDE = (FIRST + 0.5 * POOLED) / 1.5


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-logits))


def write_looks(path: Path, **changes: Any) -> Path:
    told = {"pivotpatch": "0", "torch": "1", "labels": ["a"], "thresholds": [0.5], "grid": 2, "overlap": 0.0}
    told |= {"picture_size": 32, "kind": "looks", "image_size": 32, "patching": {"lam": 0.5, "temperature": 0.25}}
    nodes = [
        helper.make_node("Cast", ["images"], ["cast"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["cast", "middle"], ["less"]),
        helper.make_node("Mul", ["less", "scale"], ["scaled"]),
        helper.make_node("Transpose", ["scaled"], ["logits"], perm=[0, 3, 1, 2]),
    ]
    gives: dict[str, list[str | int]] = {"logits": ["batch", 3, "rows", "columns"]}
    return save(
        path, nodes, {"pivotpatch": json.dumps(told | changes)}, gives=gives, held={"middle": 128, "scale": 1 / 64}
    )


@pytest.mark.parametrize("kind", [None, "image", "patch", "tde"])
def test_both_looks_at_every_image(kind: str | None, tmp_path: Path) -> None:
    slope, offset = (1.0, 0.0) if kind is None else (0.7, 0.2)
    fitted = kind and {"kind": kind, "method": "platt", "slope": [slope], "offset": [offset]}
    answer: Any = open_onnx(write_looks(tmp_path / "a.onnx", calibration=fitted), effort=1).ask(IMAGES)
    decisive = {"image": FIRST, "patch": POOLED, "tde": TDE}[kind or "tde"]
    for found, logits in zip(answer, (decisive, FIRST, POOLED), strict=False):
        np.testing.assert_allclose(found[:, 0], sigmoid(slope * logits + offset), atol=1e-4)
    np.testing.assert_allclose(answer.weights[..., 0], SHARES, atol=1e-4)


def test_doubtful_images_alone_are_looked_at_closer(tmp_path: Path) -> None:
    plain = {"kind": "image", "method": "platt", "slope": [2.0], "offset": [0.5]}
    again = {"kind": "tde", "method": "platt", "slope": [0.5], "offset": [-0.3]}
    alone = sigmoid(2 * FIRST + 0.5)
    cutoff = float(np.sort(alone * (1 - alone))[1:].mean())
    adaptive = {"calibration": plain, "cutoffs": [0.0, cutoff, 1.0], "again": again, "effort": 0.5}
    closer = {"lam": 0.5, "temperature": 0.25, "closer_size": 64}
    engine = open_onnx(write_looks(tmp_path / "a.onnx", adaptive=adaptive, patching=closer))
    assert engine.effort == 0.5
    answer: Any = engine.ask(IMAGES)
    looked = alone * (1 - alone) >= cutoff
    assert 0 < looked.sum() < 3
    np.testing.assert_allclose(answer.image_probs[~looked, 0], alone[~looked], atol=1e-4)
    assert np.isnan(answer.patch_probs[~looked]).all()
    assert np.isnan(answer.weights[~looked]).all()
    # Both looks see the same quarters, but for their borders.
    np.testing.assert_allclose(answer.weights[looked, :, 0], SHARES[looked], atol=0.02)
    np.testing.assert_allclose(answer.probs[looked, 0], sigmoid(0.5 * TDE[looked] - 0.3), atol=0.02)


def test_a_graph_of_other_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is due"):
        open_onnx(write_looks(tmp_path / "a.onnx", labels=["a", "b"], thresholds=None), effort=1).ask(IMAGES)
