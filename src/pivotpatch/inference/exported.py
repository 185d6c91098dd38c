"""Open what `pivotpatch export` wrote: an ONNX file."""

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from pivotpatch.core.patches import check_images
from pivotpatch.errors import InputError, quote_fault
from pivotpatch.inference.engine import Answer, check_answer
from pivotpatch.models.foreign import open_session
from pivotpatch.models.limits import GRID, Side

PROPERTY = "pivotpatch"
"""The metadata property of an ONNX file that holds its description."""
_AGAIN = "export the model again"


class Description(BaseModel):
    """What an exported file says of itself besides its graph, as JSON.

    Attributes:
        pivotpatch: the version that wrote it.
        torch: the version of torch that it was written with.
        labels: names of the L labels.
        thresholds: L numbers for `probs`; None where none were fitted: 0.5.
        grid: patches per side; 0 where there are none.
        overlap: share of a patch's side that it has in common with its neighbour.
        picture_size: S, rows and columns to which the graph resizes images.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    pivotpatch: str
    torch: str
    labels: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    thresholds: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None
    grid: Annotated[int, Field(ge=0, le=GRID)]
    overlap: Annotated[float, Field(ge=0, lt=1)]
    picture_size: Side

    @model_validator(mode="after")
    def _check_labels(self) -> "Description":
        if self.thresholds is not None and len(self.thresholds) != len(self.labels):
            raise ValueError(f"{len(self.thresholds)} thresholds for {len(self.labels)} labels")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("a label comes twice")
        return self

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what the graph gives, in order: the fields of `Answer` that there are."""
        return Answer._fields if self.grid else Answer._fields[:2]


class OnnxEngine:
    """An `Engine` that runs an ONNX file with ONNX Runtime on the CPU, with as many threads as torch.

    Attributes:
        description: what the file says of itself.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a file; a graph of ONNX is data, no code of the file's runs."""
        self.path = path = Path(path)
        self.session: Any = open_session(path)
        self.description = told = _read_description(path, self.session.get_modelmeta().custom_metadata_map)
        self.labels, self.thresholds = told.labels, told.thresholds
        self.picture_size, self.grid, self.overlap = told.picture_size, told.grid, told.overlap
        found = tuple(each.name for each in self.session.get_outputs())
        if found != told.outputs:
            wrong = f"its outputs are {', '.join(found)}, not {', '.join(told.outputs)}"
            raise InputError(str(path), wrong, _AGAIN)

    def __call__(self, pictures: Tensor) -> Answer:
        """What the model says of images (B,3,H,W) uint8, B >= 1; the graph resizes them to its own size."""
        check_images(pictures, "OnnxEngine")
        if pictures.dtype != torch.uint8 or pictures.shape[1] != 3:
            wrong = f"images are {pictures.dtype} of shape {tuple(pictures.shape)}"
            raise InputError("OnnxEngine", wrong, "give uint8 (B, 3, H, W)")
        feed = {self.session.get_inputs()[0].name: pictures.cpu().permute(0, 2, 3, 1).contiguous().numpy()}
        try:
            found = [torch.from_numpy(values) for values in self.session.run(None, feed)]
        except Exception as error:  # the runtime's own
            raise InputError(str(self.path), f"it cannot be run ({quote_fault(error)})", _AGAIN) from None
        count, labels = len(pictures), len(self.labels)
        shapes = [(count, labels)] * 3 + [(count, self.grid**2, labels)]
        if [tuple(part.shape) for part in found] != shapes[: len(found)]:
            wrong = f"it gives {' '.join(str(tuple(part.shape)) for part in found)} of {count} images"
            raise InputError(str(self.path), f"{wrong}, and there are {labels} labels", _AGAIN)
        return check_answer(Answer(*(part.float() for part in found)), str(self.path))


def _read_description(path: Path, properties: dict[str, str]) -> Description:
    if PROPERTY not in properties:
        wrong = "says nothing of labels and thresholds"
        raise InputError(str(path), wrong, "give --architecture and --labels, or a file that pivotpatch export wrote")
    try:
        return Description.model_validate_json(properties[PROPERTY])
    except ValidationError as error:
        fault = error.errors()[0]
    where = ".".join(map(str, fault["loc"])) or "as a whole"
    raise InputError(str(path), f"its description is wrong, {where}: {fault['msg']}", _AGAIN)
