"""The engine that asks a model with torch, opened by the model's name and prepared for its device."""

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from pivotpatch.accel.device import has_bfloat16
from pivotpatch.accel.inference import quicken_inference
from pivotpatch.core.counterfactual import CounterfactualLogits
from pivotpatch.errors import InputError, explaining
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.scores import KINDS
from pivotpatch.inference.scoring import evaluating, get_classifier, look_again, score_images, split_for_device
from pivotpatch.models.classifier import Classifier, SharedClassifier
from pivotpatch.models.foreign import ForeignClassifier
from pivotpatch.models.heads import project_embedding
from pivotpatch.models.open import open_model
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.views import make_views
from pivotpatch.runtime.checks import check_effort
from pivotpatch.runtime.engine import Answer, Array, Pixels, check_answer
from pivotpatch.runtime.predictor import TAGGER
from pivotpatch.runtime.values import Adaptive, Calibration, check_views, choose_effort

_TRIED = 512  # rows and columns of images on which folding is tried, at most: more would only take longer


class TorchEngine:
    """Runs a model with torch, in evaluation mode; its own mode is as before afterwards.

    A model's calibration was fitted to one kind of logits, "image", "patch" or "tde", the last in the normalised form
    (p + lam q) / (1 + lam); `Answer.probs` are what it makes of them. It maps the image's and the patches' logits too,
    so that all are on one scale: a calibrated TDE logit then still is the weighted mean of the other two.
    What was fitted to an ordinary model does not hold for the PAT-I around it, so that there its thresholds and
    calibration count only if the latter is of kind "tde".

    With an effort below 1 the image comes first, and a second look at images about which the model is unsure: at their
    patches or, where that was fitted, at the whole image once more, larger. The others are answered by the image
    alone, whose logits have a calibration of their own (`Adaptive`), so that the probabilities of both can be compared
    with each other and with the same thresholds.
    """

    def __init__(
        self,
        model: Classifier | PatchInference,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        effort: float | None = None,
    ) -> None:
        """Ask a model.

        Args:
            model: a classifier, or PAT-I around one.
            device: where to run; the model is moved there. It stays where it is by default.
            dtype: of autocast; float32 for none.
            effort: share of images that get a second look, among such as the model was tuned on: 1 for all,
                0 for none, anything between where `Classifier.adaptive` was fitted, which has the default.
        """
        classifier = get_classifier(model, "TorchEngine")
        check_effort(effort, "TorchEngine")
        effort = choose_effort(effort, model.adaptive if isinstance(model, PatchClassifier) else None)
        if isinstance(model, PatchInference) and effort < 1:
            wrong = f"is {effort:g}, but PAT-I looks at the patches of all images or of none"
            raise InputError("effort", wrong, "give 1, or 0 for the model without PAT-I")
        if 0 < effort < 1 and (not isinstance(model, PatchClassifier) or model.adaptive is None):
            why = "needs a tuned checkpoint" if isinstance(model, PatchClassifier) else "needs a model with patches"
            raise InputError("effort", f"is {effort:g}, which {why}", "run pivotpatch tune, or give 0 or 1")
        if isinstance(classifier, PatchClassifier) and classifier.patch_only:
            wrong = "the model was trained on patches alone, for the study of scale, and does not see the whole image"
            raise InputError("TorchEngine", wrong, "give one that was trained by another task")
        patching = model.patching
        held = next(classifier.parameters()).dtype  # under autocast parts of a model may be of half precision
        if dtype == torch.float32 and held != torch.float32:
            todo = "keep it in float32 (model.float()), and give dtype= for autocast"
            raise InputError("TorchEngine", f"the model's weights are {held}", todo)
        fitted, thresholds = classifier.calibration, classifier.thresholds
        if isinstance(model, PatchInference) and (fitted is None or fitted.kind != "tde"):
            fitted = thresholds = None
        if fitted is not None and patching is None and fitted.kind != "image":
            wrong = f"the calibration is of {fitted.kind!r} logits, which a model without patches has not"
            raise InputError("TorchEngine", wrong, "fit it again")
        self.model = model if device is None else model.to(device)
        self.device = next(classifier.parameters()).device
        self.dtype = dtype
        self.effort = effort
        self.name = classifier.called
        self.labels: tuple[str, ...] = classifier.labels
        self.picture_size: int = classifier.picture_size
        self.interpolation: str = classifier.preprocessing.interpolation
        self.grid: int = 0 if patching is None or effort == 0 else patching.grid
        self.overlap: float = 0.0 if patching is None else patching.overlap
        self.thresholds: tuple[float, ...] | None = thresholds
        self.preferences: Mapping[str, tuple[float, ...]] = {} if thresholds is None else classifier.preferences
        self.calibration: Calibration | None = fitted
        self.adaptive: Adaptive | None = classifier.adaptive
        self.exported: Path | None = None

    def ask(self, images: Pixels) -> Answer[Array]:
        """What the model says of images (B,S,S,3), B >= 1."""
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with evaluating(self.model), torch.inference_mode(), autocast:
            own = images if images.flags.writeable else images.copy()  # torch warns of others
            pictures = torch.from_numpy(own).to(self.device).permute(0, 3, 1, 2)
            # Where some are looked at again, they are chosen from all, so that second looks come many at a time, too.
            parts = (pictures,) if 0 < self.effort < 1 else split_for_device(pictures)
            answers = [self.answer(part) for part in parts]
            return check_answer(Answer._make(map(_join, zip(*answers, strict=True))), self.name)

    def digest(self) -> str:
        """Of what the model is made of, whatever device it runs on.

        A backbone of ours is made into what a device is fastest with. It is left out, for no training changes a
        backbone and not what stands on it. A model that also comes as an ONNX file goes by that, so that one engine
        goes on with what the other began.
        """
        if self.exported is not None:
            return sha256(self.exported.read_bytes()).hexdigest()
        fitted = self.thresholds, self.calibration, self.adaptive, getattr(self.model, "patching", None)
        seen = get_classifier(self.model, "digest").preprocessing
        content = sha256(repr((self.labels, fitted, seen)).encode())
        for name, value in self.model.state_dict().items():
            if not name.startswith("backbone."):
                content.update(name.encode())
                content.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return content.hexdigest()

    def answer(self, pictures: Tensor) -> Answer[Tensor]:
        """The same of images on the model's device; with effort 1 a graph that can be exported."""
        if self.effort < 1 and isinstance(self.model, PatchClassifier):
            return self._answer_adaptively(self.model, pictures)
        out = score_images(self.model, pictures)
        if isinstance(out, Tensor):
            probs = _mark(_calibrate(out, self.calibration), out)
            return Answer(probs, probs)
        return self._mix(out, self.calibration)

    def _answer_adaptively(self, model: PatchClassifier, pictures: Tensor) -> Answer[Tensor]:
        """A first look at every image, then a second one at those about which the model is unsure."""
        views = (make_views(model, part, patches=False).image for part in split_for_device(pictures))
        logits = torch.cat([project_embedding(model.head.project, model.embed_images(image)) for image in views])
        fitted = self.calibration if self.adaptive is None else self.adaptive.calibration
        probs = _mark(_calibrate(logits, fitted), logits)
        if self.effort == 0:
            return Answer(probs, probs)
        assert self.adaptive is not None
        nothing = probs.new_full((len(probs), 1 + self.grid**2, probs.shape[1]), torch.nan)
        parts = probs, probs.clone(), nothing[:, 0], nothing[:, 1:]
        (rows,) = self.adaptive.choose(probs, self.effort).nonzero(as_tuple=True)
        fitted = model.find_calibration(closer_size=model.closer_size)
        for some in split_for_device(pictures[rows]) if len(rows) else ():
            now, rows = rows.split([len(some), len(rows) - len(some)])
            again = look_again(model, some, logits[now], closer_size=model.closer_size)
            for part, seen in zip(parts, self._mix(again, fitted), strict=True):
                assert seen is not None
                part[now] = seen
        return Answer(*parts)

    def _mix(self, out: CounterfactualLogits, calibration: Calibration | None) -> Answer[Tensor]:
        """The answer of images whose patches were seen, in a calibration of one kind of their logits."""
        assert isinstance(self.model, PatchInference | PatchClassifier)
        rows = (out.image_logits, out.pooled_logits, out.tde_logits / (1 + self.model.patching.lam))
        kinds = dict(zip(KINDS, (_calibrate(row, calibration) for row in rows), strict=True))
        probs = out.probs if calibration is None else kinds[calibration.kind]
        # TDE logits are finite only where those of the image and the patches are.
        return Answer(_mark(probs, out.tde_logits), kinds["image"], kinds["patch"], out.weights)


def _calibrate(logits: Tensor, calibration: Calibration | None) -> Tensor:
    """Probabilities (B,L) of logits."""
    return torch.sigmoid(logits.float()) if calibration is None else calibration.apply(logits)


def _mark(probs: Tensor, logits: Tensor) -> Tensor:
    """Probabilities (B,L), NaN where the logit is not finite: the sigmoid of infinity would pass for an answer."""
    return torch.where(logits.isfinite(), probs, torch.nan)


def _join(parts: Sequence[Tensor | None]) -> Array | None:
    """The same field of several answers."""
    held = [part.float().cpu() for part in parts if part is not None]
    return torch.cat(held).numpy() if held else None


def open_engine(
    name: str | os.PathLike[str] | Classifier,
    *,
    device: str | torch.device | None = None,
    effort: float | None = None,
    fold: bool = True,
) -> TorchEngine:
    """As `Predictor.load`, for what is no ONNX file.

    A model that is given as such stays what it is. Unless `fold` is False, the copy that is asked, as what is opened
    here, is changed into what the device is fastest with.
    """
    chosen = _choose_device(device)
    given: object = name
    if not isinstance(given, Classifier | str | os.PathLike):
        todo = "give a name, a folder or a model of ours; around others write Predictor(TorchEngine(it))"
        raise InputError("Predictor", f"it is given a {type(given).__name__}", todo)
    model = deepcopy(name) if isinstance(name, Classifier) else open_model(os.fspath(name))
    seen = model.preprocessing.image_size
    if isinstance(model, ForeignClassifier):
        if effort == 0:
            return TorchEngine(model, device=chosen)
        wrapped = PatchInference(model)
        model.source_size = wrapped.patching.grid * seen
        check_views(seen, replace(wrapped.patching, source_size=model.source_size), where=model.called)
        return TorchEngine(wrapped, device=chosen, effort=effort)
    half = torch.bfloat16 if has_bfloat16(chosen) else torch.float16
    dtype = half if chosen.type == "cuda" else torch.float32
    model.eval()
    if fold and isinstance(model, SharedClassifier):
        side = seen if model.backbone.fixed_size else min(seen, _TRIED)
        model.backbone = quicken_inference(model.backbone, side=side, device=chosen, dtype=dtype)
    engine = TorchEngine(model.to(memory_format=torch.channels_last), device=chosen, dtype=dtype, effort=effort)
    engine.exported = TAGGER if name == "tagger" else None
    return engine


def _choose_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = [kind for kind in ("cuda", "mps", "xpu") if getattr(torch, kind).is_available()]
    with explaining("device", f"{device!r} cannot be used", f"choose {' or '.join(['cpu', *there])}"):
        return torch.empty(0, device=device).device
