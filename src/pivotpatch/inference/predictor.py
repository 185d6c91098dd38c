"""Tags for images of any kind: files, Pillow images, arrays, tensors."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from pivotpatch.accel import quicken_inference
from pivotpatch.accel.device import has_bfloat16
from pivotpatch.core.adaptive import check_effort
from pivotpatch.data.decoding import Decoded, decode_image, decode_with_size
from pivotpatch.errors import InputError
from pivotpatch.inference.engine import Engine, TorchEngine
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.prediction import Prediction, fit
from pivotpatch.models.classifier import Classifier, SharedClassifier
from pivotpatch.models.foreign import ForeignClassifier
from pivotpatch.models.limits import check_views
from pivotpatch.models.open import is_named, open_model

EXPORTED = ".onnx"
"""How the names of exported models end."""
_TRIED = 512  # rows and columns of images on which folding is tried, at most: more would only take longer

Picture = str | os.PathLike[str] | bytes | Image.Image | NDArray[Any] | Tensor
"""A file's path, its bytes, a Pillow image, an array (H,W,3) or (H,W) of uint8, or a tensor (3,H,W)
of uint8 or of floats from 0 to 1."""


class ModelError(InputError):
    """What is wrong with a model: no other image would mend it."""


class Predictor:
    """Says what is in images.

    Example:
        predictor = Predictor.load("my-run")
        prediction = predictor("photo.jpg")
        print([tag.label for tag in prediction.tags])
        prediction.plot().savefig("why.png")
    """

    def __init__(self, engine: Engine, *, batch_size: int = 8) -> None:
        """Ask an engine.

        Args:
            engine: a `TorchEngine`, or an `OnnxEngine`.
            batch_size: most images that it is asked about at once.
        """
        if isinstance(engine, torch.nn.Module):
            raise InputError("Predictor", "it is given a model", "write Predictor(TorchEngine(model))")
        if batch_size < 1:
            raise InputError("Predictor", f"batch_size is {batch_size}", "give 1 or more")
        self.engine = engine
        self.batch_size = batch_size

    @classmethod
    def load(
        cls,
        name_or_folder: str | os.PathLike[str] | Classifier = "tagger",
        *,
        device: str | torch.device | None = None,
        effort: float = 1.0,
        fold: bool = True,
    ) -> "Predictor":
        """Open a trained model.

        Args:
            name_or_folder: the bundled "tagger", the folder of a run (its best model) or of a checkpoint, an exported
                file (.onnx), "hub:owner/name" for a checkpoint on the Hugging Face hub, or "transformers:" or "timm:"
                before a folder or `owner/name` for somebody else's multi-label model, around which PAT-I looks at
                patches, cut at twice the model's size. A revision may follow a name: "hub:owner/name@v2". A model
                that was opened before is taken as it is.
            device: where to run; a GPU where there is one by default. Exported models run on the CPU.
            effort: share of images that get a second look, those that are the least clear without: 1 for all, at
                their patches, 0 for none. Anything between needs a model that was tuned (`pivotpatch tune`). Exported
                models know only 1, PAT-I only 0 and 1.
            fold: fold batch norms into convolutions, on a GPU the ReLU behind them too, which says the same sooner;
                False leaves the model as it is.
        """
        check_effort(effort, "Predictor")
        given = name_or_folder if isinstance(name_or_folder, Classifier) else None
        name = os.fspath(name_or_folder) if given is None else ""  # type: ignore[arg-type]
        chosen = _choose_device(device)
        if name.lower().endswith(EXPORTED) and not Path(name).is_dir() and not is_named(name):
            from pivotpatch.inference.exported import OnnxEngine

            if effort != 1 or (device is not None and chosen.type != "cpu"):
                wrong = f"exported models run on the CPU with effort 1, not on {chosen} with {effort:g}"
                raise InputError(name, wrong, "leave device and effort out, or give the run or checkpoint")
            return cls(OnnxEngine(name))
        model = given or open_model(name)
        if isinstance(model, ForeignClassifier):
            if 0 < effort < 1:
                wrong = f"is {effort:g}, but PAT-I looks at the patches of all images or of none"
                raise InputError("effort", wrong, "give 1 or 0")
            return cls(_wrap_foreign(model, pat=effort == 1, device=chosen))
        return cls(prepare_engine(model, device=chosen, effort=effort, fold=fold))

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the L labels that it knows."""
        return self.engine.labels

    @overload
    def __call__(self, pictures: Picture) -> Prediction: ...  # type: ignore[overload-overlap] # a str is one image
    @overload
    def __call__(self, pictures: Sequence[Picture]) -> list[Prediction]: ...
    def __call__(self, pictures: Picture | Sequence[Picture]) -> Prediction | list[Prediction]:
        """Say what is in an image, or in each of a list of them.

        An image that cannot be read is an error that names it; then none of the list is answered.
        """
        if not isinstance(pictures, list | tuple):
            return self._predict([("picture", pictures)])[0]
        named = [(f"pictures[{place}]", picture) for place, picture in enumerate(pictures)]
        starts = range(0, len(named), self.batch_size)
        return [each for start in starts for each in self._predict(named[start : start + self.batch_size])]

    def _predict(self, named: list[tuple[str, Any]]) -> list[Prediction]:
        """What is in images; those without a name of their own have one for messages."""
        read = [self._read(picture, where) for where, picture in named]
        pixels = torch.from_numpy(np.stack([pixels for *_, (pixels, _) in read]))
        try:
            answer = self.engine(pixels.permute(0, 3, 1, 2))
        except InputError as error:
            raise ModelError(*error.parts) from error
        thresholds = np.array(self.engine.thresholds or (0.5,) * len(self.labels), dtype=np.float32)
        return [
            Prediction(
                picture=name,
                source=source,
                size=size,
                labels=self.labels,
                probs=answer.probs[row].numpy(),
                image_probs=answer.image_probs[row].numpy(),
                patch_probs=_pick(answer.patch_probs, row),
                weights=_pick(answer.weights, row),
                thresholds=thresholds,
                overlap=self.engine.overlap,
            )
            for row, (name, source, (_, size)) in enumerate(read)
        ]

    def _read(self, picture: Any, where: str) -> tuple[str | None, Path | bytes | NDArray[np.uint8], Decoded]:
        """An image's name, where figures take it from, and its pixels (S,S,3) for the model."""
        size = (self.engine.picture_size, self.engine.picture_size)
        if isinstance(picture, str | os.PathLike):
            path = Path(picture)
            return str(path), path, decode_with_size(path, size=size)
        given = _get_pixels(picture, where)
        decoded = decode_with_size(given, size=size, name=where)
        if isinstance(given, bytes):
            return None, given, decoded
        # A small copy: the caller may go on to draw on it.
        return None, np.array(decode_image(given, size=fit(decoded.size), name=where)), decoded


def _pick(part: Tensor | None, row: int) -> NDArray[np.float32] | None:
    """What an answer's part says of one image; None where its patches were not looked at."""
    return None if part is None or part[row].isnan().all() else part[row].numpy()


def _choose_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        reason = str(error).partition("\n")[0]
        raise InputError("device", f"{device!r} cannot be used ({reason})", "choose cpu or another") from None


def prepare_engine(model: Classifier, *, device: torch.device, effort: float = 1.0, fold: bool = True) -> TorchEngine:
    """An engine for a model that nobody else holds, which is changed into what the device is fastest with.

    Args:
        model: the model, on any device.
        device: where to run.
        effort: as in `Predictor.load`.
        fold: likewise.
    """
    model.eval()
    half = torch.bfloat16 if has_bfloat16(device) else torch.float16
    dtype = half if device.type == "cuda" else torch.float32
    if fold and isinstance(model, SharedClassifier):
        seen = model.preprocessing.image_size
        side = seen if model.backbone.fixed_size else min(seen, _TRIED)
        model.backbone = quicken_inference(model.backbone, side=side, device=device, dtype=dtype)
    return TorchEngine(model.to(memory_format=torch.channels_last), device=device, dtype=dtype, effort=effort)


def _wrap_foreign(model: ForeignClassifier, *, pat: bool, device: torch.device) -> TorchEngine:
    """An engine around somebody else's model, with PAT-I or without: no fitted thresholds are there to spoil."""
    if not pat:
        return TorchEngine(model, device=device)
    wrapped, seen = PatchInference(model), model.preprocessing.image_size
    model.source_size = wrapped.patching.grid * seen
    check_views(seen, replace(wrapped.patching, source_size=model.source_size), where=model.called)
    return TorchEngine(wrapped, device=device)


def _get_pixels(picture: Any, where: str) -> bytes | Image.Image | NDArray[np.uint8]:
    """What `decode_with_size` takes; it checks arrays."""
    if isinstance(picture, np.ndarray):
        return np.repeat(picture[..., None], 3, axis=2) if picture.ndim == 2 else picture
    if isinstance(picture, bytes | Image.Image):
        return picture
    if not isinstance(picture, Tensor):
        todo = "give a path, a Pillow image, an array (H, W, 3), a tensor (3, H, W), or a list of those"
        raise InputError(where, f"is a {type(picture).__name__}", todo)
    if picture.ndim != 3 or picture.shape[0] != 3 or picture.numel() == 0:
        todo = "give (3, H, W)" + (", or list(...) of a batch" if picture.ndim == 4 else "")
        raise InputError(where, f"the tensor has shape {tuple(picture.shape)}", todo)
    pixels = picture.detach().cpu()
    if pixels.is_floating_point() and pixels.min() >= 0 and pixels.max() <= 1:  # NaN is refused too
        pixels = (pixels.float() * 255).round().to(torch.uint8)
    if pixels.dtype != torch.uint8:
        wrong = f"the tensor is {pixels.dtype} from {pixels.min():.3g} to {pixels.max():.3g}"
        raise InputError(where, wrong, "give uint8, or floats from 0 to 1 that are not normalised yet")
    return pixels.permute(1, 2, 0).contiguous().numpy()
