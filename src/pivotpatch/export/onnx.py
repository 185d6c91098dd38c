"""A model as one ONNX file, compared with torch before it gets its name."""

from pathlib import Path
from typing import Any

import torch

from pivotpatch.errors import InputError, import_extra, quote_fault
from pivotpatch.export.graph import (
    FREE,
    LOOSE_TOLERANCE,
    TOLERANCE,
    Agreement,
    LookGraph,
    PictureGraph,
    check_difference,
    trace_pictures,
)
from pivotpatch.inference.engine import TorchEngine
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.foreign import quiet
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.engine import PROPERTY, open_onnx
from pivotpatch.runtime.values import patch_boxes
from pivotpatch.writing import explain_disk_faults, replacing

LARGEST = 2**31
"""Bytes that a file of ONNX stays below."""


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
        graph, expected = LookGraph(model), TorchEngine(model)
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
        tolerance = LOOSE_TOLERANCE if half or not _resizes_evenly(model) else TOLERANCE
        found = open_onnx(written, device="cpu")
        difference = check_difference(found, expected, tolerance=tolerance, sizes=(1,) if looks else (1, 2))
        if looks and expected.adaptive is not None:
            found, expected = (open_onnx(written, device="cpu", effort=0.5), TorchEngine(model, effort=0.5))
            difference = max(difference, check_difference(found, expected, tolerance=tolerance))
        return Agreement(difference, written.stat().st_size)


def _resizes_evenly(model: Classifier | PatchInference) -> bool:
    """Whether the graph resizes bytes by whole factors, or not at all."""
    if not isinstance(model, PatchClassifier):
        return True
    source, seen = model.picture_size, model.preprocessing.image_size
    patch = patch_boxes(source, source, grid=model.grid, overlap=model.overlap)[0]
    resized = ((source, seen), (patch.bottom - patch.top, model.patch_size or seen))
    return all(max(sides) % min(sides) == 0 for sides in resized)


def _convert(graph: PictureGraph | LookGraph) -> Any:
    """The ONNX model, with its description and nothing of the machine that it was made on."""
    from onnx import helper
    from onnxscript import optimizer

    program = trace_pictures(graph)
    try:
        with quiet():
            made = torch.onnx.export(
                program,
                output_names=list(graph.description.outputs),
                dynamic_shapes={"pictures": FREE if graph.step == 1 else {0: FREE[0]}},
                dynamo=True,
                verbose=False,
                optimize=False,
            )
    except RuntimeError as error:
        wrong = f"torch cannot say this model in ONNX ({quote_fault(error)})"
        raise InputError("export", wrong, "try another backbone or head") from error
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
