"""A model as one graph from images to probabilities, and the proof that a written file computes the same."""

from collections.abc import Iterator
from copy import deepcopy
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from pivotpatch import __version__
from pivotpatch.core.patches import resize_images
from pivotpatch.errors import InputError, quote_fault
from pivotpatch.inference.engine import TorchEngine
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.foreign import quiet
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.engine import Answer, Array, Description, Engine

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

    step = 1
    """Of the rows and columns that it takes."""

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
            preferences=self.engine.preferences or None,
            grid=self.engine.grid,
            overlap=self.engine.overlap,
            picture_size=self.engine.picture_size,
        )
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
            pictures.permute(0, 3, 1, 2), size=size, mode="bilinear", align_corners=False, antialias=True
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
        if model.architecture.head != "linear":
            wrong = f"the head is {model.architecture.head}, whose answer is no mean over places"
            raise InputError("export", wrong, "leave --format looks out")
        if model.regions:
            raise InputError("export", "the patches are regions of the feature map", "leave --format looks out")
        cut = model.patching
        sizes = (model.preprocessing.image_size, cut.patch_size, cut.closer_size)
        if any(side is not None and side % self.step for side in sizes):
            wrong = f"a view has a side that is no multiple of {self.step} pixels"
            raise InputError("export", wrong, "leave --format looks out")
        self.model = deepcopy(model).cpu().float().to(memory_format=torch.contiguous_format)
        engine, prepare = TorchEngine(self.model), self.model.preprocessing
        self.description = Description(
            pivotpatch=__version__,
            torch=torch.__version__,
            labels=engine.labels,
            thresholds=engine.thresholds,
            preferences=engine.preferences or None,
            grid=engine.grid,
            overlap=engine.overlap,
            picture_size=engine.picture_size,
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


def trace_pictures(graph: PictureGraph | LookGraph) -> ExportedProgram:
    """The graph for any number of images of any one size."""
    shapes = {"pictures": {place: Dim(name) for place, name in FREE.items() if graph.step == 1 or place == 0}}
    try:
        with torch.no_grad(), quiet():
            return torch.export.export(graph, (graph.example,), dynamic_shapes=shapes)
    except RuntimeError as error:
        wrong = f"torch cannot trace this model ({quote_fault(error)})"
        raise InputError("export", wrong, "try another backbone or head") from error


def check_difference(written: Engine, expected: Engine, *, tolerance: float, sizes: tuple[int, ...] = (1,)) -> float:
    """Compare what a written file and torch say of made images.

    Args:
        written: the file.
        expected: torch.
        tolerance: the largest difference that is allowed.
        sizes: how many times the model's own the rows of images are, which the file then has to resize itself.

    Returns:
        The largest difference; refused where it is above the tolerance, or no number.
    """
    side, found = expected.picture_size, []
    for pictures in _make_pictures(side, sizes):
        known = expected.ask(_to_array(resize_images(pictures, (side, side))))  # first: a broken model names itself
        found.append(_difference(written.ask(_to_array(pictures)), known))
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


def _difference(one: Answer[Array], other: Answer[Array]) -> float:
    shapes = [[None if part is None else part.shape for part in answer] for answer in (one, other)]
    if shapes[0] != shapes[1]:
        return float("inf")
    pairs = zip(one, other, strict=True)
    return float(np.max([_find_largest(a, b) for a, b in pairs if a is not None and b is not None]))


def _find_largest(one: Array, other: Array) -> float:
    """The largest difference of two arrays; NaN in both, where patches were not looked at, is none."""
    return float(np.where(np.isnan(one) & np.isnan(other), 0, np.abs(one - other)).max())
