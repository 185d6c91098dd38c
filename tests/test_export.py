import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from made_networks import LABELS, ask, fit_made_up, make_network, make_pictures, make_plain
from torch import Tensor

from pivotpatch import export as exporter
from pivotpatch.core.patches import resize_images
from pivotpatch.errors import InputError
from pivotpatch.export import Agreement, PictureGraph, check_difference, export_onnx, trace_pictures
from pivotpatch.inference.engine import TorchEngine
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.backbone import Preprocessing
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.foreign import ForeignClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.decoding import resize_pixels
from pivotpatch.runtime.engine import Answer, Array, Description, Pixels, open_onnx
from pivotpatch.runtime.predictor import Predictor

slow = pytest.mark.slow


class Written(NamedTuple):
    """A network as an engine of torch and as a file."""

    engine: TorchEngine
    path: Path
    agreement: Agreement


def write(model: Classifier | PatchInference, folder: Path) -> Written:
    path = folder / "network.onnx"
    return Written(TorchEngine(model), path, export_onnx(model, path))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A network with all that can be said of patches, whose bytes are resized by no whole factor."""
    model = make_network(head="ml_decoder", grid=3, overlap=0.25, source_size=50, patch_size=20)
    fit_made_up(model)
    return write(model, tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """PAT-I."""
    model = make_plain(head="query2label")
    return write(PatchInference(model, chunk_size=3), tmp_path_factory.mktemp("wrapped"))


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Regions of the feature map, which overlap, with a decoder that reads the map once."""
    model = make_network(head="ml_decoder", overlap=0.25, image_size=64)
    assert isinstance(model, PatchClassifier)
    model.regions = True
    return write(model, tmp_path_factory.mktemp("regions"))


@slow
@pytest.mark.parametrize(("name", "tolerance"), [("native", 2e-2), ("wrapped", 1e-4), ("regions", 1e-3)])
def test_a_file_says_what_torch_says(name: str, tolerance: float, request: pytest.FixtureRequest) -> None:
    engine, path, agreement = request.getfixturevalue(name)
    assert list(path.parent.iterdir()) == [path]
    assert agreement.size == path.stat().st_size
    assert agreement.difference < tolerance
    written, side = open_onnx(path), engine.picture_size
    for field in ("labels", "thresholds", "preferences", "grid", "overlap", "picture_size", "interpolation"):
        assert getattr(written, field) == getattr(engine, field)
    for count, height, width in ((1, side, side), (5, side, side), (2, 2 * side, side // 2)):
        pictures = make_pictures(count, height, width)
        expected = ask(engine, resize_images(pictures, (side, side)))
        torch.testing.assert_close(ask(written, pictures), expected, rtol=0, atol=tolerance)
    assert (expected.probs[0] - expected.probs[1]).abs().max() > 3 * tolerance  # else the comparison says little


@slow
@torch.no_grad()
@pytest.mark.parametrize("patched", [False, True])
def test_a_file_resizes_as_the_model_states(patched: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=3).eval()
    torch.nn.init.normal_(network.fc.weight)
    prepare = Preprocessing(32, interpolation="bicubic")
    model = ForeignClassifier(network, ("cat", "cup", "person"), name="theirs", preprocessing=prepare)
    path = write(PatchInference(model) if patched else model, tmp_path).path
    predictor, pictures = Predictor.load(path, device="cpu"), make_pictures(3, 90, 70)
    stated, other = (model(each(pictures)).sigmoid() for each in (prepare, replace(prepare, interpolation="bilinear")))
    apart = (stated - other).abs().max()
    inside = ask(open_onnx(path), pictures).image_probs  # by the graph
    before = torch.tensor(np.stack([found.image_probs for found in predictor(list(pictures))]))
    assert max((inside - stated).abs().max(), (before - stated).abs().max()) < 0.1 * apart


@slow
def test_the_file_explains_itself_to_other_programs(native: Written) -> None:
    onnx.checker.check_model(str(native.path), full_check=True)
    session = onnxruntime.InferenceSession(native.path)
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape) == ("pictures", "tensor(uint8)", ["batch", "height", "width", 3])
    assert [out.name for out in session.get_outputs()] == ["probs", "image_probs", "patch_probs", "weights"]
    assert [out.shape for out in session.get_outputs()] == [["batch", 3]] * 3 + [["batch", 9, 3]]
    described = Description.from_json(session.get_modelmeta().custom_metadata_map["pivotpatch"])
    assert described.thresholds == (0.1, 0.25, 1 / 3)
    assert str(Path(torch.__file__).parent).encode() not in native.path.read_bytes()  # no folder of this machine


@slow
def test_a_network_that_gives_no_numbers_leaves_the_old_file(tmp_path: Path) -> None:
    model = make_plain()
    with torch.no_grad():
        next(model.backbone.parameters()).fill_(torch.nan)
    path = tmp_path / "network.onnx"
    path.write_text("the old one")
    with pytest.raises(InputError, match="^the MultiLabelClassifier: it answers nan where a probability is due; its"):
        export_onnx(model, path)
    assert path.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [path]


@slow
def test_what_one_file_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "LARGEST", 1_000_000)
    model = make_plain()
    with pytest.raises(InputError, match="weights of 0.0 GB do not fit into one ONNX file; store the weights in half"):
        export_onnx(model, tmp_path / "network.onnx")
    monkeypatch.setattr(exporter, "LARGEST", 100_000)
    with pytest.raises(InputError, match="do not fit into one ONNX file; use the checkpoint"):
        export_onnx(model, tmp_path / "network.onnx", half=True)


@slow
def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(InputError, match=r"^onnxscript: is not installed; pip install .*\[onnx\]"):
        export_onnx(make_network(), tmp_path / "network.onnx")


class Off(TorchEngine):
    """What a file would say whose answers are wrong in a field."""

    def __init__(self, graph: PictureGraph, **wrong: float | None) -> None:
        super().__init__(graph.model)
        self.wrong = wrong

    def ask(self, images: Pixels) -> Answer[Array]:
        side = self.picture_size
        said = super().ask(np.stack([resize_pixels(image, (side, side)) for image in images]))
        changed = {name: None if by is None else getattr(said, name) + by for name, by in self.wrong.items()}
        return Answer(**said._asdict() | changed)


def test_the_graph_says_what_the_engine_says_and_leaves_the_model_alone() -> None:
    """Images are resized first."""
    model = make_network(source_size=64).train()
    fit_made_up(model)
    before, pictures = copy.deepcopy(model.state_dict()), make_pictures(3, 50, 90)
    graph = PictureGraph(model)
    said = Answer(*graph(pictures.permute(0, 2, 3, 1)))
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    torch.testing.assert_close(said, ask(TorchEngine(model.eval()), resize_images(pictures, (64, 64))))
    assert (graph.description.labels, graph.description.thresholds) == (LABELS, model.thresholds)
    assert (graph.description.grid, graph.description.picture_size) == (2, 64)


def test_a_file_passes_with_its_difference_or_is_refused() -> None:
    graph = PictureGraph(make_network())
    assert check_difference(Off(graph), graph.engine, tolerance=1e-3) == 0
    assert check_difference(Off(graph, patch_probs=5e-4), graph.engine, tolerance=1e-3) == pytest.approx(5e-4, rel=1e-3)
    for name, by, said in (("weights", 0.002, "0.002, which is more than 0.001"), ("probs", float("nan"), "nan")):
        with pytest.raises(InputError, match=f"differ by {said}"):
            check_difference(Off(graph, **{name: by}), graph.engine, tolerance=1e-3)
    with pytest.raises(InputError, match="differ by inf"):
        check_difference(Off(graph, patch_probs=None), graph.engine, tolerance=1e-3)


def test_what_cannot_be_traced_is_told_in_one_line() -> None:
    model = make_plain()

    def look(_module: object, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].mean() > 0:  # a decision that depends on the picture has no place in a graph
            raise AssertionError

    model.register_forward_pre_hook(look)
    with pytest.raises(InputError, match="^export: torch cannot trace this model \\([^\n]+\\); try another"):
        trace_pictures(PictureGraph(model))
