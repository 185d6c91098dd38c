"""PAT-I: the total direct effect around any model that gives logits, without training."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pivotpatch.core.counterfactual import CounterfactualLogits, combine_logits
from pivotpatch.core.patches import check_images, cut_views, split_views, stack_views
from pivotpatch.errors import InputError, explaining
from pivotpatch.runtime.values import Patching

_BYTES = "images are torch.uint8, which the model does not take", "normalise them first, as it was trained with"


class PatchInference(nn.Module):
    """Wrap a trained model: logits of the whole image plus logits of the patch that holds the object.

    The model is called as it is: its mode, dtype, device and random state are never changed, and
    gradients are recorded if the caller records them. Put it into evaluation mode first, as for any
    prediction; a module in training mode is warned of. Each call costs 1 + grid * grid forward passes, in one batch.

    Attributes:
        patching: how patches are cut and mixed with the image.

    Example:
        pat = PatchInference(model)
        with torch.inference_mode():
            tags = pat(images).probs > 0.5
    """

    def __init__(
        self,
        model: Callable[[Tensor], Any],
        *,
        grid: int = 2,
        overlap: float = 0.0,
        lam: float = 1.0,
        temperature: float = 1.0,
        normalised: bool = True,
        chunk_size: int | None = None,
        autocast: torch.dtype | None = None,
        channels: int = 3,
    ) -> None:
        """Wrap a model.

        Args:
            model: maps images (N,C,H,W) to logits (N,L): a torch module (timm, torchvision), a
                transformers model (an output with `.logits`), a plain function, or an ONNX Runtime
                session. A model that gives probabilities will not do.
            grid: patches per side.
            overlap: share of a patch's side that it has in common with its neighbour, in [0, 1).
            lam: weight of the patches' logits.
            temperature: of the softmax over the patches.
            normalised: take `probs` from (p + lam q) / (1 + lam), the scale of one model's logits;
                otherwise from p + lam q. The ranking of images is the same.
            chunk_size: most views the model is given at once; all of them by default.
            autocast: dtype to run the model in, on the images' device.
            channels: C of the images the model takes.
        """
        super().__init__()
        given: Any = model
        if _is_onnx_session(given):
            from pivotpatch.models.foreign import wrap_session  # others need not wait for what it imports

            given = wrap_session(given)
        if not callable(given):
            wrong = f"the model is {given!r}, which cannot be called"
            raise InputError("PatchInference", wrong, "give a module, a function or an ONNX Runtime session")
        if chunk_size is not None and not (isinstance(chunk_size, int) and chunk_size >= 1):
            raise InputError("PatchInference", f"chunk_size is {chunk_size!r}", "give 1 or more, or None for all")
        self.model = given
        self.patching = Patching(grid, overlap, lam=lam, temperature=temperature)
        self.normalised = normalised
        self.chunk_size = chunk_size
        self.autocast = autocast
        self.channels = channels
        self._warned = False

    def forward(self, images: Tensor, *, source: Tensor | None = None) -> CounterfactualLogits:
        """Image logits, patch logits, weights and TDE logits of a batch.

        Args:
            images: (B,C,H,W), preprocessed as the model wants them.
            source: the same images, preprocessed alike but larger, (B,C,H',W'): patches are cut from
                it ("native"), so that they show detail that `images` have lost. By default patches
                are cut from `images`, as in the paper.
        """
        check_images(images, "PatchInference")
        if images.shape[1] != self.channels:
            todo = f"give (B, {self.channels}, H, W), or set channels= to what the model takes"
            raise InputError("PatchInference", f"images have {images.shape[1]} channels", todo)
        if isinstance(self.model, nn.Module) and self.model.training and not self._warned:
            self._warned = True
            told = "PatchInference: the model is in training mode, so that its answers change; call model.eval() first"
            warnings.warn(told, stacklevel=4)  # the caller of this module
        views = stack_views(images, cut_views(self.patching, images, source=source))
        device = images.device.type
        with nullcontext() if self.autocast is None else torch.autocast(device, dtype=self.autocast):
            chunks = [views] if self.chunk_size is None else views.split(self.chunk_size)
            logits = torch.cat([self._logits(chunk) for chunk in chunks])
        image_logits, patch_logits = split_views(logits, patches=self.patching.count)
        lam, temperature = self.patching.lam, self.patching.temperature
        return combine_logits(image_logits, patch_logits, lam=lam, temperature=temperature, normalised=self.normalised)

    def extra_repr(self) -> str:
        """The options, for printing."""
        return f"{self.patching}, normalised={self.normalised}"

    def _logits(self, views: Tensor) -> Tensor:
        """The model's logits (N,L) of some views (N,C,H,W)."""
        pixels = views.dtype == torch.uint8
        with explaining("PatchInference", *_BYTES, of=(RuntimeError, TypeError)) if pixels else nullcontext():
            output = self.model(views)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[0] != views.shape[0]:
            found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(output).__name__}"
            wrong = f"the model returned {found} for {views.shape[0]} views"
            raise InputError("PatchInference", wrong, "wrap it in a function that returns logits (N, L)")
        if not logits.is_floating_point():
            raise InputError("PatchInference", f"the model returned {logits.dtype}", "give logits, not decisions")
        return logits


def _is_onnx_session(model: object) -> bool:
    """Whether this is an `onnxruntime.InferenceSession`, found without importing onnxruntime."""
    return all(callable(getattr(model, name, None)) for name in ("run", "get_inputs", "get_outputs"))
