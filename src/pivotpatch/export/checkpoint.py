"""A model as a checkpoint of its own, to be given away."""

from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from pivotpatch.core.patches import resize_images
from pivotpatch.errors import InputError
from pivotpatch.export.graph import HALF_TOLERANCE, TOLERANCE, Agreement, PictureGraph, check_difference
from pivotpatch.inference.engine import Answer, TorchEngine
from pivotpatch.models.checkpoint import WEIGHTS, load_checkpoint, save_checkpoint
from pivotpatch.models.classifier import Classifier


def export_checkpoint(model: Classifier, folder: str | Path, *, half: bool = False) -> Agreement:
    """Write a checkpoint folder that says what the model says, checked or not at all.

    Args:
        model: the model.
        folder: where to; it must not exist.
        half: keep the weights in half precision.
    """
    if Path(folder).exists():  # it is told before the work, and there is no way to have it replaced
        raise InputError(str(folder), "exists already", "choose another folder, or remove it first")
    graph = PictureGraph(model)
    side = graph.engine.picture_size
    with TemporaryDirectory() as scratch:
        save_checkpoint(model, Path(scratch) / "model", half=half)
        written = TorchEngine(load_checkpoint(Path(scratch) / "model"))

        def ask(pictures: Tensor) -> Answer:
            return written(resize_images(pictures, (side, side)))

        difference = check_difference(ask, graph, tolerance=HALF_TOLERANCE if half else TOLERANCE)
    save_checkpoint(model, folder, half=half)
    return Agreement(difference, (Path(folder) / WEIGHTS).stat().st_size)
