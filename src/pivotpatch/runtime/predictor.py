"""Tags for images of any kind: files, Pillow images, arrays, tensors."""

import os
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pivotpatch.errors import EXTRAS, InputError, check_known, import_extra
from pivotpatch.process import count_workers
from pivotpatch.runtime.checks import EXPORTED, PREFERENCES, Preference, check_effort
from pivotpatch.runtime.decoding import Decoded, ImageSource, decode_image, decode_with_size, read_ahead, resize_pixels
from pivotpatch.runtime.engine import Engine, OnnxEngine, is_present, open_onnx
from pivotpatch.runtime.prediction import Prediction, TagRule, fit

TAGGER = Path(__file__).parents[1] / "tagger" / "tagger.onnx"
"""The bundled tagger."""

Picture = str | os.PathLike[str] | bytes | Image.Image | NDArray[Any] | Any
"""A file's path, its bytes, a Pillow image, an array (H,W,3) or (H,W) of uint8, or a tensor (3,H,W)
of uint8 or of floats from 0 to 1."""
_TORCH = ("cuda", "mps", "xpu")  # what torch computes on besides the CPU
Read = tuple[str | None, ImageSource, Decoded]
"""An image's name, where figures take it from, and its pixels (S,S,3) for the model."""


class ModelError(InputError):
    """What is wrong with a model: no other image would mend it."""


class Predictor:
    """Says what is in images.

    Example:
        predictor = Predictor.load()
        prediction = predictor("photo.jpg")
        print([tag.label for tag in prediction.tags])
        prediction.plot().save("why.png")
    """

    def __init__(self, engine: Engine, *, batch_size: int = 8) -> None:
        """Ask an engine.

        Args:
            engine: a `TorchEngine`, or what `open_onnx` opens.
            batch_size: most images that it is asked about at once.
        """
        if not hasattr(engine, "ask"):
            raise InputError(
                "Predictor", f"it is given a {type(engine).__name__}", "write Predictor(TorchEngine(model))"
            )
        if batch_size < 1:
            raise InputError("Predictor", f"batch_size is {batch_size}", "give 1 or more")
        self.engine = engine
        self.batch_size = batch_size

    @classmethod
    def load(
        cls,
        name_or_folder: "str | os.PathLike[str] | Any" = "tagger",
        *,
        device: Any = None,
        effort: float | None = None,
        prefer: Preference | None = None,
    ) -> "Predictor":
        """Open a trained model.

        Args:
            name_or_folder: the bundled "tagger" or an exported file (.onnx), which need no torch; or the folder of a
                run (its best model) or of a checkpoint, "hub:owner/name" for a checkpoint on the Hugging Face hub, or
                "transformers:" or "timm:" before a folder or `owner/name` for somebody else's multi-label model,
                around which PAT-I looks at patches, cut at twice the model's size. A revision may follow a name:
                "hub:owner/name@v2". A model that was opened before is copied, and stays as it is.
            device: where to run; the fastest that ONNX Runtime, or torch for a checkpoint, has by default. Of ONNX
                files a name of `runtime.engine.PROVIDERS`, such as "cpu", "cuda:1" or "coreml".
            effort: share of images that get a second look, those that are the least clear without: 1 for all, at
                their patches, 0 for none. Anything between needs a model that was tuned (`pivotpatch tune`). Exported
                files know only 1 unless written with `--format looks`, PAT-I only 0 and 1. None for the model's own:
                0.6 of the bundled tagger, 1 where `tune --effort` set nothing else.
            prefer: which of the thresholds of a tuned model decide: "precision" gives few wrong tags, "recall" misses
                few, "balance" has the best F1. None for the model's own choice, of the bundled tagger "precision".
        """
        check_effort(effort, "Predictor")
        engine = cls._open(name_or_folder, device=device, effort=effort)
        if prefer is not None:
            check_known(prefer, PREFERENCES, where="Predictor", what="preference")
            if prefer not in engine.preferences:
                todo = "tune it (pivotpatch tune), or leave the preference out"
                raise InputError(engine.name, f"has no thresholds that prefer {prefer}", todo)
            engine.thresholds = engine.preferences[prefer]
        return cls(engine)

    @staticmethod
    def _open(name_or_folder: Any, *, device: Any, effort: float | None) -> Engine:
        """The engine of what `load` is given."""
        name = os.fspath(name_or_folder) if isinstance(name_or_folder, str | os.PathLike) else None
        kind = str(device).lower().partition(":")[0]
        lacking = kind in _TORCH and find_spec("torch") is not None and not is_present(kind)  # in this ONNX Runtime
        exported = name is not None and name.lower().endswith(EXPORTED) and ":" not in name and not Path(name).is_dir()
        if name is not None and (exported or (name == "tagger" and not lacking)):
            path = name if exported else TAGGER
            opened = open_onnx(path, effort=effort, device=None if device is None else str(device))
            opened.name = name
            return opened
        scheme = "" if name is None else name.partition(":")[0]
        import_extra("torch", scheme if scheme in EXTRAS.values() else None)  # such as hub, which brings torch too
        torch_engines = import_module("pivotpatch.inference.engine")
        return torch_engines.open_engine(name_or_folder, device=device, effort=effort)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the L labels that it knows."""
        return self.engine.labels

    def __repr__(self) -> str:
        kind = "ONNX Runtime" if isinstance(self.engine, OnnxEngine) else "torch"
        return f"<Predictor of {self.engine.name}: {len(self.labels)} labels, {kind}, effort {self.engine.effort:g}>"

    @overload
    def __call__(
        self, pictures: Sequence[Picture], *, threshold: float | None = ..., on_error: Literal["skip"]
    ) -> list[Prediction | InputError]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self,
        pictures: str | os.PathLike[str] | bytes | Image.Image | NDArray[Any],
        *,
        threshold: float | None = ...,
        on_error: Literal["error"] = ...,
    ) -> Prediction: ...
    @overload
    def __call__(
        self, pictures: Sequence[Picture], *, threshold: float | None = ..., on_error: Literal["error"] = ...
    ) -> list[Prediction]: ...
    @overload
    def __call__(self, pictures: Any, *, threshold: float | None = ..., on_error: Literal["error"] = ...) -> Any: ...
    def __call__(
        self,
        pictures: Picture | Sequence[Picture],
        *,
        threshold: float | None = None,
        on_error: Literal["error", "skip"] = "error",
    ) -> Any:
        """Say what is in an image, or in each of a list of them.

        Args:
            pictures: an image, or a list of images.
            threshold: above which a label is given, in the place of the fitted ones.
            on_error: an image that cannot be read ends the call with an error that names it; "skip" puts that error
                into its place of the list.
        """
        TagRule(threshold)  # refuses what is none
        check_known(on_error, ("error", "skip"), where="Predictor", what="on_error")
        if not isinstance(pictures, list | tuple):
            return answer_batch(self.engine, [self._read(("image", pictures))], threshold=threshold)[0]
        return list(self.predict(pictures, threshold=threshold, skip=on_error == "skip"))

    def predict(
        self, pictures: Iterable[Picture], *, threshold: float | None = None, skip: bool = False
    ) -> Generator[Any, None, None]:
        """What is in each of any number of images, in order; they are decoded while the model is at work.

        Args:
            pictures: images. Arrays may be written over once the next one is asked for; of a film that Pillow opened,
                give copies of its frames, which are one image that moves on while threads still read it.
            threshold: as in `__call__`.
            skip: yield the error of an image that cannot be read in its place.
        """
        if isinstance(pictures, str | bytes | os.PathLike | Image.Image) or getattr(pictures, "ndim", 0) in (2, 3):
            wrong = f"it is given one image ({type(pictures).__name__})"
            raise InputError("Predictor.predict", wrong, "give a list of images, or call predictor(image)")
        named = ((f"images[{place}]", _keep(picture)) for place, picture in enumerate(pictures))
        threads = min(count_workers(), self.batch_size)
        for batch in read_ahead(named, self._read, batch_size=self.batch_size, threads=threads):
            for each in batch:
                if isinstance(each, InputError) and not skip:
                    raise each
            yield from answer_batch(self.engine, batch, threshold=threshold)

    def _read(self, named: tuple[str, Any]) -> Read:
        where, picture = named
        if isinstance(picture, str | os.PathLike):
            path = Path(picture)
            return str(path), path, decode_for(self.engine, path)
        given = get_pixels(picture, where)
        decoded = decode_for(self.engine, given, name=where)
        if isinstance(given, bytes):
            return None, given, decoded
        # A small copy: the caller may go on to draw on it.
        return None, np.array(decode_image(given, size=fit(decoded.size), name=where)), decoded


def _keep(picture: Picture) -> Picture:
    """Pixels that stay as they are until they are read: who gave them may write the next ones in their place."""
    if isinstance(picture, np.ndarray):
        return picture.copy()
    return picture.clone() if hasattr(picture, "clone") else picture


def decode_for(engine: Engine, source: ImageSource | Image.Image, *, name: str = "image") -> Decoded:
    """An image as an engine takes it; the rest as in `decode_with_size`."""
    side, resize = engine.picture_size, partial(resize_pixels, interpolation=engine.interpolation)
    return decode_with_size(source, size=(side, side), name=name, resize=resize)


def answer_batch(
    engine: Engine, batch: Sequence[Read | InputError], *, threshold: float | None = None
) -> list[Prediction | InputError]:
    """What is in images that were read; what could not be read stays the error that it is."""
    read = [each for each in batch if not isinstance(each, InputError)]
    if not read:
        return [each for each in batch if isinstance(each, InputError)]
    try:
        answer = engine.ask(np.stack([pixels for *_, (pixels, _) in read]))
    except InputError as error:
        raise ModelError(*error.parts) from error
    limits = engine.thresholds or (0.5,) * len(engine.labels)
    thresholds = np.array(limits if threshold is None else (threshold,) * len(limits), dtype=np.float32)
    answered = (
        Prediction(
            picture=name,
            source=source,
            size=size,
            labels=engine.labels,
            probs=answer.probs[row],
            image_probs=answer.image_probs[row],
            patch_probs=_pick(answer.patch_probs, row),
            weights=_pick(answer.weights, row),
            thresholds=thresholds,
            overlap=engine.overlap,
        )
        for row, (name, source, (_, size)) in enumerate(read)
    )
    return [each if isinstance(each, InputError) else next(answered) for each in batch]


def _pick(part: NDArray[np.float32] | None, row: int) -> NDArray[np.float32] | None:
    """What an answer's part says of one image; None where its patches were not looked at."""
    return None if part is None or np.isnan(part[row]).all() else part[row]


def get_pixels(picture: Any, where: str) -> bytes | Image.Image | NDArray[np.uint8]:
    """What `decode_for` takes of an image that is no file; it checks arrays."""
    if isinstance(picture, np.ndarray):
        return np.repeat(picture[..., None], 3, axis=2) if picture.ndim == 2 else picture
    if isinstance(picture, bytes | bytearray | memoryview | Image.Image):
        return picture if isinstance(picture, Image.Image) else bytes(picture)
    if not hasattr(picture, "numel"):  # a tensor has it
        todo = "give a path, a Pillow image, an array (H, W, 3), a tensor (3, H, W), or a list of those"
        raise InputError(where, f"is a {type(picture).__name__}", todo)
    if picture.ndim != 3 or picture.shape[0] != 3 or picture.numel() == 0:
        todo = "give (3, H, W)" + (", or list(...) of a batch" if picture.ndim == 4 else "")
        raise InputError(where, f"the tensor has shape {tuple(picture.shape)}", todo)
    pixels = picture.detach().cpu()
    if pixels.is_floating_point() and pixels.min() >= 0 and pixels.max() <= 1:  # NaN is refused too
        pixels = (pixels.float() * 255).round().byte()
    if str(pixels.dtype) != "torch.uint8":
        wrong = f"the tensor is {pixels.dtype} from {float(pixels.min()):.3g} to {float(pixels.max()):.3g}"
        raise InputError(where, wrong, "give uint8, or floats from 0 to 1 that are not normalised yet")
    return pixels.permute(1, 2, 0).contiguous().numpy()
