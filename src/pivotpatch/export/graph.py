"""A model as one graph from images to probabilities, and the proof that a written file computes the same."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from pivotpatch import __version__
from pivotpatch.core.patches import resize_images
from pivotpatch.errors import InputError, quote_fault
from pivotpatch.inference.engine import Answer, TorchEngine
from pivotpatch.inference.exported import Description
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.foreign import quiet

BATCHES = (1, 3)
"""Batch sizes at which a written file is compared with torch."""
FREE = {0: "batch", 1: "height", 2: "width"}
"""Dimensions of the graph's input (B,H,W,3) that are not fixed."""
TOLERANCE = 1e-3
"""Largest difference in a probability or weight that float32 arithmetic in another order may make."""
LOOSE_TOLERANCE = 5e-2
"""The same for weights of half precision (an ImageNet model differs by up to 0.028 on photographs), and where bytes are
resized by no whole factor: ONNX Runtime rounds a few in a hundred of them to the neighbour of torch's."""


class Agreement(NamedTuple):
    """How a written file compares with torch.

    Attributes:
        difference: the largest of any probability or weight.
        size: of the file, in bytes.
    """

    difference: float
    size: int


class PictureGraph(nn.Module):
    """Everything between the pixels of an image and what is said of it, as a module that can be traced.

    Attributes:
        engine: the model, a copy on the CPU in float32 and evaluation mode.
        description: what a file has to say besides the graph.
    """

    def __init__(self, model: Classifier | PatchInference) -> None:
        """Take a copy of a model, or of PAT-I around one."""
        super().__init__()
        self.model = deepcopy(model).cpu().float().to(memory_format=torch.contiguous_format)
        self.engine = TorchEngine(self.model)
        self.description = Description(
            pivotpatch=__version__,
            torch=torch.__version__,
            labels=self.engine.labels,
            thresholds=self.engine.thresholds,
            grid=self.engine.grid,
            overlap=self.engine.overlap,
            picture_size=self.engine.picture_size,
        )
        self.eval()

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        """The fields of `Answer` that there are, of images (B,H,W,3) uint8 of any size."""
        size = (self.engine.picture_size, self.engine.picture_size)
        # Not `resize_images`, which leaves images of the right size alone: one graph has to do for every size.
        images = F.interpolate(
            pictures.permute(0, 3, 1, 2), size=size, mode="bilinear", align_corners=False, antialias=True
        )
        # Copies, because without patches two fields are one tensor, which some exporters do not name twice.
        return tuple(part.clone() for part in self.engine.answer(images) if part is not None)


def trace_pictures(graph: PictureGraph) -> ExportedProgram:
    """The graph for any number of images of any one size."""
    side = graph.engine.picture_size
    # Sides that differ from each other and from the model's own, so that torch sees that they are free.
    example = torch.zeros(2, side + 3, side + 5, 3, dtype=torch.uint8)
    shapes = {"pictures": {place: Dim(name) for place, name in FREE.items()}}
    try:
        with torch.no_grad(), quiet():
            return torch.export.export(graph, (example,), dynamic_shapes=shapes)
    except RuntimeError as error:
        wrong = f"torch cannot trace this model ({quote_fault(error)})"
        raise InputError("export", wrong, "try another backbone or head") from error


def check_difference(written: Callable[[Tensor], Answer], graph: PictureGraph, *, tolerance: float) -> float:
    """Compare what a written file and torch say of made images.

    Returns:
        The largest difference; refused where it is above the tolerance, or no number.
    """
    size = (graph.engine.picture_size, graph.engine.picture_size)
    found = []
    for pictures in _make_pictures(graph.engine.picture_size):
        expected = graph.engine(resize_images(pictures, size))  # first: a broken model is named as the user knows it
        found.append(_difference(written(pictures), expected))
    difference = torch.stack(found).max().item()  # NaN where any is
    if not difference <= tolerance:
        wrong = f"the file and torch differ by {difference:.2g}, which is more than {tolerance:g}"
        raise InputError("export", wrong, "nothing was kept; try another version of torch")
    return difference


def _make_pictures(side: int) -> Iterator[Tensor]:
    """Noise and smooth colours (B,3,H,W) of the model's own size at each of `BATCHES`, then twice as high."""
    generator = torch.Generator().manual_seed(0)
    for count, height in (*((count, side) for count in BATCHES), (2, 2 * side)):
        yield torch.randint(0, 256, (count, 3, height, side), dtype=torch.uint8, generator=generator)
        colours = torch.randint(0, 256, (count, 3, 5, 7), dtype=torch.uint8, generator=generator)
        yield resize_images(colours, (height, side))


def _difference(one: Answer, other: Answer) -> Tensor:
    shapes = [[None if part is None else part.shape for part in answer] for answer in (one, other)]
    if shapes[0] != shapes[1]:
        return torch.tensor(torch.inf)
    pairs = zip(one, other, strict=True)
    return torch.stack([(a - b).abs().max() for a, b in pairs if a is not None and b is not None]).max()
