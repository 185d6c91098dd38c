"""Open what `pivotpatch export` wrote: an ONNX file, or a package that AOTInductor compiled."""

import os
from abc import ABC, abstractmethod
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any
from zipfile import ZipFile

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from pivotpatch.core.patches import check_images
from pivotpatch.errors import InputError, choose_one_of, install_hint, quote_fault
from pivotpatch.inference.engine import Answer, check_answer
from pivotpatch.models.limits import GRID, Side

PROPERTY = "pivotpatch"
"""The metadata property of an ONNX file that holds its description."""
MEMBER = "extra/pivotpatch.json"
"""The file that holds that of a package, inside the one folder of its archive."""
_LONGEST = 1 << 24  # bytes of a description; an archive may hold zeros without end in a few
_AGAIN = "export the network again"


class Description(BaseModel):
    """What an exported file says of itself besides its graph, as JSON.

    Attributes:
        pivotpatch: the version that wrote it.
        torch: the version of torch that it was written with.
        labels: names of the L labels.
        thresholds: L numbers for `probs`; None where none were fitted: 0.5.
        grid: patches per side; 0 where there are none.
        overlap: share of a patch's side that it has in common with its neighbour.
        picture_size: S, rows and columns to which the graph resizes pictures.
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
    def _check_thresholds(self) -> "Description":
        if self.thresholds is not None and len(self.thresholds) != len(self.labels):
            raise ValueError(f"{len(self.thresholds)} thresholds for {len(self.labels)} labels")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("a label comes twice")
        return self

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what the graph gives, in order: the fields of `Answer` that there are."""
        return Answer._fields if self.grid else Answer._fields[:2]


class _ExportedEngine(ABC):
    """What both kinds have in common: an `Engine` that takes pictures of any size.

    Attributes:
        description: what the file says of itself.
    """

    def __init__(self, path: Path, description: Description) -> None:
        self.path = path
        self.description = description
        self.labels = description.labels
        self.thresholds = description.thresholds
        self.picture_size = description.picture_size
        self.grid = description.grid
        self.overlap = description.overlap

    def __call__(self, pictures: Tensor) -> Answer:
        """What the network says of pictures (B,3,H,W) uint8, B >= 1; the graph resizes them to its own size."""
        check_images(pictures, type(self).__name__)
        if pictures.dtype != torch.uint8 or pictures.shape[1] != 3:
            wrong = f"pictures are {pictures.dtype} of shape {tuple(pictures.shape)}"
            raise InputError(type(self).__name__, wrong, "give uint8 (B, 3, H, W)")
        try:
            found = self._run(pictures.cpu().permute(0, 2, 3, 1).contiguous())
        except Exception as error:  # the runtimes' own
            raise InputError(str(self.path), f"it cannot be run ({quote_fault(error)})", _AGAIN) from None
        count, labels = len(pictures), len(self.labels)
        shapes = [(count, labels)] * 3 + [(count, self.grid**2, labels)]
        if [tuple(part.shape) for part in found] != shapes[: len(self.description.outputs)]:
            wrong = f"it gives {' '.join(str(tuple(part.shape)) for part in found)} of {count} pictures"
            raise InputError(str(self.path), f"{wrong}, and there are {labels} labels", _AGAIN)
        return check_answer(Answer(*(part.float() for part in found)), str(self.path))

    @abstractmethod
    def _run(self, pictures: Tensor) -> list[Tensor]:
        """The graph's outputs for pictures (B,H,W,3)."""


class OnnxEngine(_ExportedEngine):
    """Runs an ONNX file with ONNX Runtime on the CPU, with as many threads as torch."""

    def __init__(self, path: str | Path) -> None:
        """Open a file; a graph of ONNX is data, no code of the file's runs."""
        path = _check_file(path)
        runtime = import_extra("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            self.session: Any = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors have no other ancestor
            raise InputError(str(path), f"ONNX Runtime cannot open it ({quote_fault(error)})", _AGAIN) from None
        super().__init__(path, _read_description(path, self.session.get_modelmeta().custom_metadata_map.get(PROPERTY)))
        found = tuple(each.name for each in self.session.get_outputs())
        if found != self.description.outputs:
            wrong = f"its outputs are {', '.join(found)}, not {', '.join(self.description.outputs)}"
            raise InputError(str(path), wrong, _AGAIN)

    def _run(self, pictures: Tensor) -> list[Tensor]:
        feed = {self.session.get_inputs()[0].name: pictures.numpy()}
        return [torch.from_numpy(values) for values in self.session.run(None, feed)]


class PackageEngine(_ExportedEngine):
    """Runs a package of AOTInductor on the CPU. Opening one runs machine code: open only packages that you trust."""

    def __init__(self, path: str | Path) -> None:
        """Open a package; its description is read before any code of it runs."""
        path = _check_file(path)
        super().__init__(path, _read_description(path, _read_member(path)))
        from torch._inductor import aoti_load_package

        try:
            self.compiled = aoti_load_package(str(path))
        except Exception as error:  # the loader's own, the system's, the archive's
            versions = f"torch {torch.__version__} cannot load what torch {self.description.torch} compiled"
            wrong = f"{versions} ({quote_fault(error)})"
            raise InputError(str(path), wrong, "export the network again, on a machine of this kind") from None

    def _run(self, pictures: Tensor) -> list[Tensor]:
        with torch.inference_mode():
            return list(self.compiled(pictures))


def open_exported(path: str | Path) -> OnnxEngine | PackageEngine:
    """Open an exported network by the ending of its name.

    A package holds machine code, which runs once it is opened: open only packages that you trust.

    Args:
        path: a file that ends in .onnx or .pt2.
    """
    kinds: dict[str, type[OnnxEngine | PackageEngine]] = {".onnx": OnnxEngine, ".pt2": PackageEngine}
    suffix = Path(path).suffix.lower()
    if suffix not in kinds:
        raise InputError(str(path), f"ends in {suffix!r}", choose_one_of(suffix, kinds))
    return kinds[suffix](path)


def import_extra(name: str) -> Any:
    """A library of the extra "onnx"; where it is missing, a message that says how to install it."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # else ONNX Runtime keeps a list of events in the home folder
    try:
        return import_module(name)
    except ImportError:
        raise InputError(name, "is not installed", install_hint("onnx")) from None


def _check_file(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise InputError(str(path), "is a folder" if path.is_dir() else "there is no such file", "check the path")
    return path


def _read_member(path: Path) -> bytes | None:
    """The description in a package's archive; None where it holds none."""
    try:
        with ZipFile(path) as archive:
            inside = [name for name in archive.namelist() if name.partition("/")[2] == MEMBER]
            if not inside:
                return None
            with archive.open(inside[0]) as file:
                return file.read(_LONGEST + 1)
    except Exception as error:  # the archive may be damaged in its directory, its entries or what they hold
        raise InputError(str(path), f"is no package, or a damaged one ({quote_fault(error)})", _AGAIN) from None


def _read_description(path: Path, text: str | bytes | None) -> Description:
    if text is None:
        wrong = "says nothing of labels and thresholds"
        raise InputError(str(path), wrong, "give a file that pivotpatch export wrote")
    if len(text) > _LONGEST:
        raise InputError(
            str(path), f"its description is wrong, as a whole: it is longer than {_LONGEST >> 20} MB", _AGAIN
        )
    try:
        return Description.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors()[0]
    where = ".".join(map(str, fault["loc"])) or "as a whole"
    raise InputError(str(path), f"its description is wrong, {where}: {fault['msg']}", _AGAIN)
