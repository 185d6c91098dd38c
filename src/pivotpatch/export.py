"""A model as one ONNX file from images to probabilities, compared with torch before it gets its name."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from pivotpatch import __version__
from pivotpatch.core.patches import resize_images
from pivotpatch.errors import InputError, explaining, import_extra
from pivotpatch.inference.engine import TorchEngine
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.foreign import quiet
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.engine import PROPERTY, Description, Engine, open_onnx
from pivotpatch.runtime.values import patch_boxes
from pivotpatch.writing import explain_disk_faults, replacing

BATCHES = (1, 3)
"""Batch sizes at which a written file is compared with torch."""
FREE = {0: "batch", 1: "height", 2: "width"}
"""Dimensions of the graph's input (B,H,W,3) that are not fixed."""
TOLERANCE = 1e-3
"""Largest difference in a probability or weight that float32 arithmetic in another order may make."""
LOOSE_TOLERANCE = 5e-2
"""The same for weights of half precision (an ImageNet model differs by up to 0.028 on photographs), and where bytes are
resized by no whole factor or bicubic: ONNX Runtime rounds a few in a hundred of them to the neighbour of torch's."""
LARGEST = 2**31
"""Bytes that a file of ONNX stays below."""


class Agreement(NamedTuple):
    """How a written file compares with torch."""

    difference: float  # the largest of any probability or weight
    size: int  # of the file, in bytes


def export_onnx(
    model: Classifier | PatchInference, path: str | Path, *, half: bool = False, looks: bool = False
) -> Agreement:
    """Write a model as one ONNX file, whole and checked or not at all.

    The graph takes `pictures` (B,H,W,3) uint8 of any size and gives `probs` and `image_probs` (B,L), with patches also
    `patch_probs` (B,L) and `weights` (B,P,L), as in `Answer`; the metadata property "pivotpatch" holds a `Description`.

    Args:
        model: a model, or PAT-I around one; it is not changed.
        path: the file; one that is there is replaced.
        half: keep the weights in half precision, in half the bytes; the graph computes in float32 all the same.
        looks: write a `LookGraph` instead, which pivotpatch alone can ask, with every effort.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        import_extra(name)
    path = Path(path)
    graph: PictureGraph | LookGraph
    if looks:
        if not isinstance(model, PatchClassifier):
            raise InputError("export", "the model was not trained for patches (PAT-T)", "leave --format looks out")
        graph, expected = LookGraph(model), TorchEngine(model, effort=1)
    else:
        graph = PictureGraph(model)
        expected = graph.engine
    size = sum(weight.nbytes for weight in graph.state_dict().values()) // (2 if half else 1)
    if size >= LARGEST:
        todo = "use the checkpoint" if half else "store the weights in half precision"
        raise InputError(str(path), f"weights of {size / 1e9:.1f} GB do not fit into one ONNX file", todo)
    content = _convert(graph)
    if half:
        _halve_weights(content)
    with explain_disk_faults(path.absolute().parent), replacing(path) as written:
        written.write_bytes(content.SerializeToString())
        exact = expected.interpolation == "bilinear" and _resizes_evenly(model)
        tolerance = LOOSE_TOLERANCE if half or not exact else TOLERANCE
        found = open_onnx(written, device="cpu", effort=1)
        difference = check_difference(found, expected, tolerance=tolerance, sizes=(1,) if looks else (1, 2))
        if looks and expected.adaptive is not None:
            found, expected = (open_onnx(written, device="cpu", effort=0.5), TorchEngine(model, effort=0.5))
            difference = max(difference, check_difference(found, expected, tolerance=tolerance))
        return Agreement(difference, written.stat().st_size)


class PictureGraph(nn.Module):
    """Everything between the pixels of an image and what is said of it, as a module that can be traced.

    Attributes:
        engine: the model, a copy on the CPU in float32 and evaluation mode.
        description: what a file has to say besides the graph.
    """

    step = 1
    """Of the rows and columns that it takes."""

    def __init__(self, model: Classifier | PatchInference) -> None:
        """Take a copy of a model, or of PAT-I around one."""
        super().__init__()
        self.model = deepcopy(model).cpu().float().to(memory_format=torch.contiguous_format)
        if isinstance(self.model, PatchInference):  # a graph takes any number of views at once, in float32
            self.model.chunk_size = self.model.autocast = None
        self.engine = TorchEngine(self.model, effort=1)
        self.description = _describe(self.engine)
        self.eval()

    @property
    def example(self) -> Tensor:
        """Images that the graph is traced with: their sides differ from each other and from the model's own."""
        side = self.engine.picture_size
        return torch.zeros(2, side + 3, side + 5, 3, dtype=torch.uint8)

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        """The fields of `Answer` that there are, of images (B,H,W,3) uint8 of any size."""
        size = (self.engine.picture_size, self.engine.picture_size)
        # Not `resize_images`, which leaves images of the right size alone: one graph has to do for every size.
        images = F.interpolate(
            pictures.permute(0, 3, 1, 2),
            size=size,
            mode=self.engine.interpolation,
            align_corners=False,
            antialias=True,
        )
        # Copies, because without patches two fields are one tensor, which some exporters do not name twice.
        return tuple(part.clone() for part in self.engine.answer(images) if part is not None)


class LookGraph(nn.Module):
    """What lies between a view and the logits of each place of its feature map, as a module that can be traced.

    The mean over all places is what the model says of the view, that over some places what it says of a region:
    cutting, pooling and calibration need no graph, and one serves every effort. Other heads than "linear" will not do.
    """

    step = 32
    """Of rows and columns: then all paddings are the same whatever the size, and a graph of one size does for all."""

    def __init__(self, model: PatchClassifier) -> None:
        """Take a copy of a model."""
        super().__init__()
        sizes = (model.preprocessing.image_size, model.patching.patch_size, model.patching.closer_size)
        odd = any(side is not None and side % self.step for side in sizes)
        head = f"the head is {model.architecture.head}, whose answer is no mean over places"
        for holds, wrong in (
            (model.architecture.head != "linear", head),
            (model.regions, "the patches are regions of the feature map"),
            (odd, f"a view has a side that is no multiple of {self.step} pixels"),
        ):
            if holds:
                raise InputError("export", wrong, "leave --format looks out")
        self.model = deepcopy(model).cpu().float().to(memory_format=torch.contiguous_format)
        engine, prepare = TorchEngine(self.model, effort=1), self.model.preprocessing
        self.description = replace(
            _describe(engine),
            kind="looks",
            image_size=prepare.image_size,
            patching=self.model.patching,
            calibration=engine.calibration,
            adaptive=engine.adaptive,
        )
        self.register_buffer("mean", 255 * torch.tensor(prepare.mean).reshape(3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(prepare.std).reshape(3, 1, 1), persistent=False)
        projections = (self.model.head.project, self.model.patch_projection, self.model.weight_projection)
        weight, bias = (torch.cat([each.get_parameter(name) for each in projections]) for name in ("weight", "bias"))
        self.project = nn.Conv2d(weight.shape[1], weight.shape[0], 1)
        self.project.load_state_dict({"weight": weight[..., None, None], "bias": bias})
        self.eval()

    @property
    def example(self) -> Tensor:
        """Views that the graph is traced with."""
        side = self.model.preprocessing.image_size
        return torch.zeros(2, side, side + 32, 3, dtype=torch.uint8)

    def forward(self, pictures: Tensor) -> tuple[Tensor]:
        """Image, patch and weight logits (N,3L,h,w) of views (N,H,W,3) uint8."""
        views = (pictures.permute(0, 3, 1, 2).float() - self.mean) / self.std  # type: ignore[operator]
        return (self.project(self.model.backbone(views)),)


def _describe(engine: TorchEngine) -> Description:
    """What a file has to say of a model besides the graph."""
    same = ("labels", "thresholds", "grid", "overlap", "picture_size", "interpolation")
    fitted = engine.preferences or None
    told = {name: getattr(engine, name) for name in same}
    return Description(__version__, torch.__version__, **told, preferences=fitted)


def trace_pictures(graph: PictureGraph | LookGraph) -> ExportedProgram:
    """The graph for any number of images of any one size."""
    shapes = {"pictures": {place: Dim(name) for place, name in FREE.items() if graph.step == 1 or place == 0}}
    todo = "try another backbone or head"
    with explaining("export", "torch cannot trace this model", todo, of=RuntimeError), torch.no_grad(), quiet():
        return torch.export.export(graph, (graph.example,), dynamic_shapes=shapes)


def check_difference(written: Engine, expected: Engine, *, tolerance: float, sizes: tuple[int, ...] = (1,)) -> float:
    """The largest difference between what a written file and torch say of made images; refused above the tolerance.

    Their rows are as many times the model's own as `sizes` say: the file has to resize them itself.
    """
    side, found = expected.picture_size, list[float]()
    for pictures in _make_pictures(side, sizes):
        resized = resize_images(pictures, (side, side), interpolation=expected.interpolation)
        known = expected.ask(_to_array(resized))  # first: a broken model names itself
        for one, other in zip(written.ask(_to_array(pictures)), known, strict=True):
            if one is None or other is None or one.shape != other.shape:
                found.append(0.0 if one is other else np.inf)
            else:  # NaN in both, where patches were not looked at, is no difference
                found.append(np.where(np.isnan(one) & np.isnan(other), 0, np.abs(one - other)).max())
    difference = float(np.max(found))  # NaN where any is
    if not difference <= tolerance:
        wrong = f"the file and torch differ by {difference:.2g}, which is more than {tolerance:g}"
        raise InputError("export", wrong, "nothing was kept; try another version of torch")
    return difference


def _make_pictures(side: int, sizes: tuple[int, ...]) -> Iterator[Tensor]:
    """Noise and smooth colours (B,3,H,W) at each of `BATCHES` and sizes."""
    generator = torch.Generator().manual_seed(0)
    for count, height in ((count, side * times) for count in BATCHES for times in sizes):
        yield torch.randint(0, 256, (count, 3, height, side), dtype=torch.uint8, generator=generator)
        colours = torch.randint(0, 256, (count, 3, 5, 7), dtype=torch.uint8, generator=generator)
        yield resize_images(colours, (height, side))


def _to_array(pictures: Tensor) -> NDArray[np.uint8]:
    return pictures.permute(0, 2, 3, 1).contiguous().numpy()


def _resizes_evenly(model: Classifier | PatchInference) -> bool:
    """Whether the graph resizes bytes by whole factors, or not at all."""
    if not isinstance(model, PatchClassifier):
        return True
    source, seen = model.picture_size, model.preprocessing.image_size
    patch = patch_boxes(source, source, grid=model.patching.grid, overlap=model.patching.overlap)[0]
    resized = ((source, seen), (patch.bottom - patch.top, model.patching.patch_size or seen))
    return all(max(sides) % min(sides) == 0 for sides in resized)


def _convert(graph: PictureGraph | LookGraph) -> Any:
    """The ONNX model, with its description and nothing of the machine that it was made on."""
    from onnx import helper
    from onnxscript import optimizer

    program, todo = trace_pictures(graph), "try another backbone or head"
    with explaining("export", "torch cannot say this model in ONNX", todo, of=RuntimeError), quiet():
        made = torch.onnx.export(
            program,
            output_names=list(graph.description.outputs),
            dynamic_shapes={"pictures": FREE if graph.step == 1 else {0: FREE[0]}},
            dynamo=True,
            verbose=False,
            optimize=False,
        )
    assert made is not None
    # Batch norms stay apart from convolutions, so that weights that were trained in half precision stay what they are.
    optimizer.fold_constants(made.model)
    optimizer.remove_unused_nodes(made.model)
    content = made.model_proto
    helper.set_model_props(content, {PROPERTY: graph.description.to_json()})
    parts = content.graph
    if graph.step > 1:
        _free_sides(parts)
    for part in (parts, *parts.node, *parts.initializer, *parts.value_info, *parts.input, *parts.output):
        del part.metadata_props[:]  # the lines of code that each node comes from, with the names of folders
    return content


def _free_sides(graph: Any) -> None:
    """Let a graph that was traced at one size take others: nothing in it depends on rows and columns but its notes."""
    del graph.value_info[:]
    for place, name in ((1, FREE[1]), (2, FREE[2])):
        graph.input[0].type.tensor_type.shape.dim[place].dim_param = name
    for place, name in ((2, "rows"), (3, "columns")):
        graph.output[0].type.tensor_type.shape.dim[place].dim_param = name


def _halve_weights(content: Any) -> None:
    """Keep matrices and filters of an ONNX model as float16, with a cast in front of their use.

    Runtimes fold such casts when they load the file. Vectors stay: they are few, and biases and scales matter more.
    """
    from onnx import TensorProto, helper, numpy_helper

    casts = []
    for weight in content.graph.initializer:
        if weight.data_type == TensorProto.FLOAT and len(weight.dims) > 1:
            name = weight.name
            weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype("float16"), f"{name}.half"))
            casts.append(helper.make_node("Cast", [weight.name], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *content.graph.node]
    del content.graph.node[:]
    content.graph.node.extend(nodes)
