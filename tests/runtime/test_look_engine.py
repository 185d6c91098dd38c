"""Looks through an ONNX graph against NumPy: a graph whose three logits are the red, green and blue of an image."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from pivotpatch.errors import InputError
from pivotpatch.runtime.engine import open_onnx

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
    numbers = {"middle": 128, "scale": 1 / 64}
    held = [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in numbers.items()]
    images = helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", "rows", "columns", 3])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3, "rows", "columns"])
    graph = helper.make_graph(nodes, "graph", [images], [logits], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(model, {"pivotpatch": json.dumps(told | changes)})
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("kind", [None, "image", "patch", "tde"])
def test_both_looks_at_every_image(kind: str | None, tmp_path: Path) -> None:
    slope, offset = (1.0, 0.0) if kind is None else (0.7, 0.2)
    fitted = kind and {"kind": kind, "method": "platt", "slope": [slope], "offset": [offset]}
    answer = open_onnx(write_looks(tmp_path / "a.onnx", calibration=fitted), effort=1).ask(IMAGES)
    decisive = {"image": FIRST, "patch": POOLED, "tde": TDE}[kind or "tde"]
    for found, logits in zip(answer, (decisive, FIRST, POOLED), strict=False):
        assert found is not None
        np.testing.assert_allclose(found[:, 0], sigmoid(slope * logits + offset), atol=1e-4)
    assert answer.weights is not None
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
    answer, looked = engine.ask(IMAGES), alone * (1 - alone) >= cutoff
    assert 0 < looked.sum() < 3
    assert answer.patch_probs is not None
    assert answer.weights is not None
    np.testing.assert_allclose(answer.image_probs[~looked, 0], alone[~looked], atol=1e-4)
    assert np.isnan(answer.patch_probs[~looked]).all()
    assert np.isnan(answer.weights[~looked]).all()
    # Both looks see the same quarters, but for their borders.
    np.testing.assert_allclose(answer.weights[looked, :, 0], SHARES[looked], atol=0.02)
    np.testing.assert_allclose(answer.probs[looked, 0], sigmoid(0.5 * TDE[looked] - 0.3), atol=0.02)


def test_a_graph_of_other_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is due"):
        open_onnx(write_looks(tmp_path / "a.onnx", labels=["a", "b"], thresholds=None), effort=1).ask(IMAGES)
