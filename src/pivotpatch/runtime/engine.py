"""One question to every kind of trained model, and ONNX files' answer.

A "whole" file goes from images to probabilities and runs anywhere. A "looks" one, such as the bundled tagger, goes from
views to logits per place of the feature map; cutting, pooling and calibration are done here, for every effort.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pivotpatch.errors import InputError, choose_one_of, explaining, import_extra, quote_fault
from pivotpatch.process import read_threads
from pivotpatch.runtime.checks import PREFERENCES, check_effort
from pivotpatch.runtime.decoding import resize_pixels
from pivotpatch.runtime.values import (
    GRID,
    SIDE,
    Adaptive,
    Calibration,
    Patching,
    Values,
    check_views,
    choose_effort,
    patch_boxes,
    squash,
)

Array = NDArray[np.float32]
Pixels = NDArray[np.uint8]

PROPERTY = "pivotpatch"
"""The metadata property of an ONNX file that holds its description."""
PROVIDERS = {
    "cuda": "CUDAExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "directml": "DmlExecutionProvider",
    "cpu": "CPUExecutionProvider",
}
"""What ONNX Runtime may compute on, by the name that a user gives, the fastest first."""
_PACKAGES = {"cuda": "onnxruntime-gpu", "openvino": "onnxruntime-openvino", "directml": "onnxruntime-directml"}
_AGAIN = "export the model again"
_ROUNDING = 1e-3  # by which a sigmoid or softmax of another runtime may leave [0, 1]
_CPU_PIXELS = 4 * 256 * 256  # of views at once; what is computed from more of them outgrows the caches


class Answer(NamedTuple, Generic[Values]):
    """What a model says of B images; all of it calibrated where a calibration was fitted."""

    probs: Values  # (B,L) to decide with: of the total direct effect where patches were looked at
    image_probs: Values  # (B,L) from the whole image alone; after a closer look from both looks at it
    # (B,L) from the pooled patches; NaN where an image's were not looked at, None where no image's.
    patch_probs: Values | None = None
    weights: Values | None = None  # (B,P,L) share of each patch, likewise


class Engine(Protocol):
    """What a `Predictor` needs to know of a model, however it is run."""

    name: str  # what messages call it
    labels: tuple[str, ...]  # names of the L labels
    thresholds: tuple[float, ...] | None  # L; a label is given where its `probs` are above. None, not fitted: 0.5
    preferences: Mapping[str, tuple[float, ...]]  # other thresholds, by what a user may prefer, see `PREFERENCES`
    picture_size: int  # S, rows and columns of the images that it takes
    interpolation: str  # how they are resized to that, "bilinear" or "bicubic"
    grid: int  # patches per side; 0 where none are looked at
    overlap: float  # share of a patch's side that it has in common with its neighbour
    effort: float  # share of images that get a second look

    def ask(self, images: Pixels) -> Answer[Array]:
        """What the model says of images (B,S,S,3), B >= 1."""
        ...

    def digest(self) -> str:
        """Tells models of the same name apart, whatever device they run on."""
        ...


def check_answer(answer: Answer[Array], model: str) -> Answer[Array]:
    """Refuse an answer of `model` that is no probability; NaN is one only for patches that were not looked at."""
    for place, values in enumerate(answer):
        rows = () if values is None else values.reshape(len(values), -1)
        looked = rows if place < 2 else [row for row in rows if not np.isnan(row).all()]
        odd = [value for row in looked for value in row[~((row >= -_ROUNDING) & (row <= 1 + _ROUNDING))]]  # also NaN
        if odd:
            wrong = f"it answers {odd[0]:g} where a probability is due"
            raise InputError(model, wrong, "its weights or its description are damaged; use a sound model")
    return answer


@dataclass(frozen=True)
class Description:
    """What an ONNX file says of itself besides its graph, as JSON."""

    pivotpatch: str  # the version that wrote it
    torch: str  # the version of torch that it was written with
    labels: tuple[str, ...]  # names of the L labels; the next four as in `Engine`
    thresholds: tuple[float, ...] | None
    grid: int
    overlap: float
    picture_size: int
    kind: str = "whole"  # "whole" or "looks"; the fields below are of the latter
    image_size: int | None = None  # rows and columns of the first look
    patching: Patching | None = None  # how patches are cut and mixed
    calibration: Calibration | None = None  # of the patches' answer; None where none was fitted
    adaptive: Adaptive | None = None  # when to look again; None where that was not fitted
    # L numbers for each of `PREFERENCES`, of both kinds; None where none were fitted.
    preferences: Mapping[str, tuple[float, ...]] | None = None
    interpolation: str = "bilinear"  # as in `Engine`

    def __post_init__(self) -> None:
        decided, many = [self.thresholds or (), *(self.preferences or {}).values()], len(self.labels)
        numbers, counts = [value for each in decided for value in each], {len(each) for each in decided} - {0, many}
        cut = self.patching or Patching(self.grid or 1, self.overlap)
        given = self.picture_size, self.image_size, cut.source_size, cut.patch_size, cut.closer_size
        sizes = [side for side in given if side is not None]
        again = () if self.adaptive is None else (self.adaptive.calibration, self.adaptive.again)
        counts |= {len(each.slope) for each in (self.calibration, *again) if each is not None} - {many}
        for valid, wrong in (
            (isinstance(self.labels, tuple) and self.labels, "labels are no list"),
            (all(isinstance(name, str) and name for name in self.labels), "labels are no names"),
            (len(set(self.labels)) == many, "a label comes twice"),
            (all(isinstance(value, (int, float)) and 0 <= value <= 1 for value in numbers), "a threshold is none"),
            (not counts, f"{', '.join(map(str, counts))} thresholds or calibrations for {many} labels"),
            ({*(self.preferences or ())} <= {*PREFERENCES}, f"preferences are {', '.join(self.preferences or ())}"),
            (isinstance(self.grid, int) and 0 <= self.grid <= GRID, f"grid is {self.grid!r}"),
            (isinstance(self.overlap, (int, float)) and 0 <= self.overlap < 1, f"overlap is {self.overlap!r}"),
            (all(type(side) is int and 1 <= side <= SIDE for side in sizes), f"sizes are {sizes}"),
            (self.kind in ("whole", "looks"), f"kind is {self.kind!r}"),
            (self.interpolation in ("bilinear", "bicubic"), f"interpolation is {self.interpolation!r}"),
            (self.kind == "whole" or (self.image_size and self.patching), "it does not say how to look"),
            ((cut.grid, cut.overlap) == (self.grid or 1, self.overlap), "grid or overlap are not its patches'"),
        ):
            if not valid:
                raise InputError("its description", wrong, _AGAIN)
        if self.image_size is not None:
            check_views(self.image_size, cut, where="its description")

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what the graph gives, in order; of a "whole" one the fields of `Answer` that there are."""
        if self.kind == "looks":
            return ("logits",)
        return Answer._fields if self.grid else Answer._fields[:2]

    def to_json(self) -> str:
        """As a line of JSON."""
        told = asdict(self)
        return json.dumps({name: told[name] for name in told if told[name] is not None or name == "thresholds"})

    @classmethod
    def from_json(cls, text: str) -> "Description":
        """What `to_json` gave; anything else is an error of one kind or another."""
        parts: dict[str, Callable[[Any], Any]] = {
            "patching": lambda told: Patching(**told),
            "calibration": Calibration.from_dict,
            "adaptive": Adaptive.from_dict,
            "preferences": lambda told: {name: tuple(values) for name, values in told.items()},
        }
        read: dict[str, Any] = json.loads(text)
        read = {name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}
        return cls(**read | {name: make(read[name]) for name, make in parts.items() if read.get(name) is not None})


def open_session(path: Path, *, device: str | None = None, threads: int = 0) -> Any:
    """An ONNX file in ONNX Runtime; a graph is data, no code of the file's runs.

    Args:
        path: the file.
        device: one of `PROVIDERS`, with a number behind a colon where there are several; the fastest by default.
        threads: of the CPU; 0 for one per core.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # else ONNX Runtime keeps a list of events in the home folder
    if not path.is_file():
        raise InputError(str(path), "is a folder" if path.is_dir() else "there is no such file", "check the path")
    runtime = import_extra("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or read_threads()
    # Threads that wait would take the cores from those that decode the next images.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # warnings about what it cannot place on a device are no use to users
    providers = choose_providers(device, runtime.get_available_providers())
    with explaining(str(path), "ONNX Runtime cannot open it", _AGAIN):
        return runtime.InferenceSession(path, options, providers=providers)


def is_present(device: str) -> bool:
    """Whether this ONNX Runtime can compute on a device, such as "cuda:1"."""
    kind = device.lower().partition(":")[0]
    return PROVIDERS.get(kind) in import_extra("onnxruntime").get_available_providers()


def choose_providers(device: str | None, present: Iterable[str]) -> list[Any]:
    """What ONNX Runtime is to compute on, in the order of preference.

    >>> choose_providers(None, ["CPUExecutionProvider", "CUDAExecutionProvider"])
    ['CUDAExecutionProvider', 'CPUExecutionProvider']
    >>> choose_providers("cuda:1", ["CPUExecutionProvider", "CUDAExecutionProvider"])
    [('CUDAExecutionProvider', {'device_id': 1}), 'CPUExecutionProvider']
    """
    found = set(present)
    if device is None:
        return [name for name in PROVIDERS.values() if name in found]
    kind, _, number = device.lower().partition(":")
    if kind not in PROVIDERS or (number and not number.isdecimal()):
        raise InputError("device", f"unknown device {device!r}", choose_one_of(kind, PROVIDERS))
    name = PROVIDERS[kind]
    if name not in found:
        package = _PACKAGES.get(kind, "onnxruntime")
        todo = (
            f"choose {', '.join(short for short, each in PROVIDERS.items() if each in found)}, or pip install {package}"
        )
        raise InputError("device", f"ONNX Runtime has no {kind} here", todo)
    wanted = (name, {"device_id": int(number)}) if number and kind != "cpu" else name
    return [wanted] if kind == "cpu" else [wanted, PROVIDERS["cpu"]]


class OnnxEngine:
    """An `Engine` that runs an ONNX file; `open_onnx` makes the one of its kind.

    It can be pickled: whoever unpickles it opens the file again.

    Attributes:
        path: the file.
        description: what it says of itself.
        device: where it was asked to run, as in `open_session`.
    """

    def __init__(
        self, path: str | Path, session: Any, description: Description, *, effort: float, device: str | None = None
    ) -> None:
        """Take what `open_onnx` has opened."""
        self.path, self.session, self.description, self.device = Path(path).absolute(), session, description, device
        self.name, self.effort = str(path), float(effort)
        self.labels, self.thresholds = description.labels, description.thresholds
        self.preferences: Mapping[str, tuple[float, ...]] = description.preferences or {}
        self.picture_size, self.overlap = description.picture_size, description.overlap
        self.interpolation = description.interpolation
        self.grid = description.grid if effort > 0 else 0
        with explaining(self.name, "its names cannot be read", _AGAIN):  # they are when they are asked for
            found = tuple(each.name for each in session.get_outputs())
        if found != description.outputs:
            wrong = f"its outputs are {', '.join(found)}, not {', '.join(description.outputs)}"
            raise InputError(self.name, wrong, _AGAIN)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"session": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"session": open_session(state["path"], device=state["device"])}

    def digest(self) -> str:
        """Of the file."""
        return sha256(self.path.read_bytes()).hexdigest()

    def ask(self, images: Pixels) -> Answer[Array]:
        """What the model says of images (B,H,W,3) of any size, B >= 1; the graph resizes them to its own."""
        found = self._run(images)
        count, labels = len(images), len(self.labels)
        self._check_shapes(found, [(count, labels)] * 3 + [(count, self.grid**2, labels)])
        return check_answer(Answer(*found), self.name)

    def _check_shapes(self, found: list[Array], shapes: list[tuple[int, ...]]) -> None:
        if [part.shape for part in found] != shapes[: len(found)]:
            wrong = f"it gives {' '.join(str(part.shape) for part in found)} where {shapes[: len(found)]} is due"
            raise InputError(self.name, wrong, _AGAIN)

    def _run(self, images: Pixels) -> list[Array]:
        """What the graph gives for images (N,H,W,3)."""
        with explaining(self.name, "it cannot be run", _AGAIN):
            feed = {self.session.get_inputs()[0].name: np.ascontiguousarray(images)}
            return [np.asarray(values, dtype=np.float32) for values in self.session.run(None, feed)]


class LookEngine(OnnxEngine):
    """Runs a graph from views to logits per place, with every effort; says what `TorchEngine` says of its model."""

    def __init__(
        self, path: str | Path, session: Any, description: Description, *, effort: float, device: str | None = None
    ) -> None:
        super().__init__(path, session, description, effort=effort, device=device)
        assert description.patching is not None
        assert description.image_size is not None
        self.patching, self.image_size = description.patching, description.image_size
        self.calibration, self.adaptive = description.calibration, description.adaptive
        if 0 < effort < 1 and self.adaptive is None:
            raise InputError(
                "effort", f"is {effort:g}, which needs a tuned model", "export a tuned one, or give 0 or 1"
            )

    def ask(self, images: Pixels) -> Answer[Array]:
        """What the model says of images (B,S,S,3), B >= 1."""
        at_once = max(_CPU_PIXELS // (images.shape[1] * images.shape[2]), 1)  # that a CPU is quickest with
        parts = (images[start : start + at_once] for start in range(0, len(images), at_once))
        first = np.concatenate([self._see(part, self.image_size)[0] for part in parts])
        fitted = self.calibration if self.adaptive is None or self.effort == 1 else self.adaptive.calibration
        probs = _calibrate(first, fitted)
        if self.effort == 0:
            return check_answer(Answer(probs, probs), self.name)
        nothing = np.full((len(probs), 1 + self.patching.count, probs.shape[1]), np.nan, dtype=np.float32)
        answer = Answer(probs, probs.copy(), nothing[:, 0], nothing[:, 1:])
        chosen = np.ones(len(probs), dtype=bool)
        if self.effort < 1:
            assert self.adaptive is not None
            chosen = self.adaptive.choose(probs, self.effort)
        for row in np.flatnonzero(chosen):
            for part, seen in zip(answer, self._look_again(images[row], first[row]), strict=True):
                assert part is not None
                part[row] = seen
        return check_answer(answer, self.name)

    def _look_again(self, image: Pixels, first: Array) -> tuple[Array, ...]:
        """The fields of `Answer` of one image (S,S,3) whose image logits (L,) are known."""
        cut, closer = self.patching, self.patching.closer_size if self.effort < 1 else None
        fitted = self.calibration
        if closer is None:
            side = cut.patch_size or self.image_size
            source = image if cut.source_size is not None else resize_pixels(image, (self.image_size, self.image_size))
            boxes = patch_boxes(*source.shape[:2], grid=cut.grid, overlap=cut.overlap)
            patches = [resize_pixels(source[box.top : box.bottom, box.left : box.right], (side, side)) for box in boxes]
            _, patch, weight = self._see(np.stack(patches), side)
        else:
            own, patch, weight = (part[0] for part in self._see(image[None], closer, regions=True))
            first = (first + own) / 2
            if self.adaptive is not None and self.adaptive.again is not None:
                fitted = self.adaptive.again
        exponents = np.exp((weight - weight.max(axis=0)) / cut.temperature)
        weights = exponents / exponents.sum(axis=0)
        pooled = (weights * patch).sum(axis=0)
        kinds = {"image": first, "patch": pooled, "tde": (first + cut.lam * pooled) / (1 + cut.lam)}
        probs = {kind: _calibrate(logits, fitted) for kind, logits in kinds.items()}
        return probs["tde" if fitted is None else fitted.kind], probs["image"], probs["patch"], weights

    def _see(self, images: Pixels, side: int, *, regions: bool = False) -> tuple[Array, Array, Array]:
        """Image, patch and weight logits of views (N,H,W,3) resized to `side`: (N,L) each.

        With `regions` the latter two are (N,P,L), of regions of the feature map.
        """
        views = np.stack([resize_pixels(image, (side, side)) for image in images])
        (places,) = self._run(views)
        if places.ndim != 4 or places.shape[:2] != (len(images), 3 * len(self.labels)):
            self._check_shapes([places], [(len(images), 3 * len(self.labels), -1, -1)])
        if not np.isfinite(places).all():
            wrong = "a logit is not finite"
            raise InputError(self.name, wrong, "its weights or its description are damaged; use a sound model")
        image, patch, weight = np.split(places, 3, axis=1)
        if not regions:
            whole = (part.mean(axis=(2, 3)) for part in (image, patch, weight))
            return tuple(whole)
        boxes = patch_boxes(*places.shape[2:], grid=self.patching.grid, overlap=self.patching.overlap)
        cut = [
            np.stack(
                [part[:, :, box.top : box.bottom, box.left : box.right].mean(axis=(2, 3)) for box in boxes], axis=1
            )
            for part in (patch, weight)
        ]
        return image.mean(axis=(2, 3)), cut[0], cut[1]


def open_onnx(path: str | Path, *, effort: float | None = None, device: str | None = None) -> OnnxEngine:
    """The engine of an ONNX file that `pivotpatch export` wrote.

    Args:
        path: the file.
        effort: share of images that get a second look, by default the model's own; a "whole" file knows only 1.
        device: as in `open_session`.
    """
    check_effort(effort, "effort")
    session = open_session(Path(path), device=device)
    with explaining(str(path), "its description cannot be read", _AGAIN):
        told = session.get_modelmeta().custom_metadata_map.get(PROPERTY)
    if told is None:
        todo = "give --architecture and --labels, or a file that pivotpatch export wrote"
        raise InputError(str(path), "says nothing of labels and thresholds", todo)
    try:
        description = Description.from_json(told)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        wrong = error.parts[1] if isinstance(error, InputError) else quote_fault(error)
        raise InputError(str(path), f"its description is wrong: {wrong}", _AGAIN) from None
    adaptive = None if description.kind == "whole" else description.adaptive
    effort = choose_effort(effort, adaptive)
    if description.kind == "whole" and effort != 1:
        wrong = f"this file looks at every patch, effort is {effort:g}"
        raise InputError(str(path), wrong, "leave effort out, or give the run or checkpoint")
    engine = LookEngine if description.kind == "looks" else OnnxEngine
    return engine(path, session, description, effort=effort, device=device)


def _calibrate(logits: Array, calibration: Calibration | None) -> Array:
    """Probabilities (...,L) of logits."""
    return squash(logits) if calibration is None else calibration.apply(logits)
