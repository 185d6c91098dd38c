import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from made_networks import LABELS, fit_made_up, make_network, make_pictures
from onnx import TensorProto, helper, numpy_helper

from pivotpatch.errors import InputError
from pivotpatch.export.onnx import export_onnx
from pivotpatch.inference.engine import TorchEngine
from pivotpatch.inference.exported import Description, OnnxEngine
from pivotpatch.inference.predictor import Predictor
from pivotpatch.models.classifier import Classifier

DESCRIBED = Description(
    pivotpatch="0", torch="1", labels=("a", "b"), thresholds=None, grid=0, overlap=0.0, picture_size=8
)


@pytest.fixture(scope="module")
def plain() -> Classifier:
    """A network without patches."""
    model = make_network(patches=False)
    fit_made_up(model)
    return model


@pytest.fixture(scope="module")
def written(plain: Classifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a file."""
    path = tmp_path_factory.mktemp("written") / "plain.onnx"
    export_onnx(plain, path)
    return path


def write_onnx(path: Path, properties: dict[str, str], outputs: tuple[str, ...]) -> Path:
    """A healthy ONNX file of another maker, which takes floats."""
    given, *values = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", *outputs))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], [name]) for name in outputs], "g", [given], values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    helper.set_model_props(model, properties)
    onnx.save(model, path)
    return path


def test_a_network_without_patches_answers_as_in_torch(plain: Classifier, written: Path) -> None:
    engine, pictures = OnnxEngine(written), make_pictures(4, 32, 32)
    said, expected = engine(pictures), TorchEngine(plain)(pictures)
    torch.testing.assert_close(said[:2], expected[:2], rtol=0, atol=1e-4)
    assert expected.probs.std(dim=0).max() > 0.05
    assert said[2:] == (None, None)
    assert (engine.labels, engine.thresholds) == (LABELS, plain.thresholds)
    picture = make_pictures(1, 70, 45)[0].permute(1, 2, 0).numpy()
    found, known = Predictor.load(written)(picture), Predictor(TorchEngine(plain))(picture)
    assert [tag.label for tag in found.tags] == [tag.label for tag in known.tags] != []
    np.testing.assert_allclose(found.probs, known.probs, atol=1e-4)


def test_files_of_others_and_damaged_ones_are_told_in_one_line(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.onnx"
    for held in (written.read_bytes()[:999], b""):
        path.write_bytes(held)
        with pytest.raises(InputError, match=r"^.*other.onnx: ONNX Runtime cannot open it \(.+\); export.*$"):
            OnnxEngine(path)
    with pytest.raises(InputError, match="there is no such file"):
        OnnxEngine(tmp_path / "none.onnx")
    described = DESCRIBED.model_dump_json()
    for properties, said in (
        ({}, "says nothing of labels and thresholds; give --architecture and --labels, or a file"),
        ({"pivotpatch": "{"}, "its description is wrong, as a whole: Invalid JSON"),
        ({"pivotpatch": described}, "its outputs are y, not probs, image_probs"),
    ):
        with pytest.raises(InputError, match=said):
            OnnxEngine(write_onnx(path, properties, ("y",)))
    write_onnx(path, {"pivotpatch": described}, DESCRIBED.outputs)
    with pytest.raises(InputError, match=r"other.onnx: it cannot be run \([^\n]+\); export the model again"):
        OnnxEngine(path)(torch.zeros(1, 3, 9, 9, dtype=torch.uint8))


def test_without_onnxruntime_the_extra_is_named(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match="^onnxruntime: is not installed; pip install .*onnx"):
        OnnxEngine(written)


def rewrite(written: Path, path: Path, *, weight: float | None = None, **changes: Any) -> Path:
    """An exported file with another description, and with other weights where `weight` is given."""
    model = onnx.load(written)
    described = {**json.loads(model.metadata_props[0].value), **changes}
    helper.set_model_props(model, {"pivotpatch": json.dumps(described)})
    if weight is not None:
        held = next(part for part in model.graph.initializer if part.name.endswith("head.project.weight"))
        held.CopyFrom(numpy_helper.from_array(np.full(list(held.dims), weight, np.float32), held.name))
    onnx.save(model, path)
    return path


def test_a_file_that_gives_no_numbers_is_named(written: Path, tmp_path: Path) -> None:
    for weight in (np.nan, 3e38):
        path = rewrite(written, tmp_path / "broken.onnx", weight=weight)
        with pytest.raises(InputError, match="broken.onnx: it answers nan where a probability is due; its weights or"):
            Predictor.load(path)(np.zeros((9, 9, 3), np.uint8))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"picture_size": 4097}, "picture_size: Input should be less than or equal to 4096"),
        ({"grid": 17}, "grid: Input should be less than or equal to 16"),
        ({"thresholds": [0.5]}, "1 thresholds for 3 labels"),
        ({"labels": ["a", "b", "a"]}, "a label comes twice"),
        ({"labels": ["a", "b"], "thresholds": None}, "of 1 images, and there are 2 labels"),
    ],
)
def test_a_description_of_another_graph_is_told(
    changes: dict[str, Any], said: str, written: Path, tmp_path: Path
) -> None:
    path = rewrite(written, tmp_path / "other.onnx", **changes)
    with pytest.raises(InputError, match=f"other.onnx: .*{said}.*; export the model again$"):
        OnnxEngine(path)(torch.zeros(1, 3, 9, 9, dtype=torch.uint8))
