"""PAT-I: the total direct effect around any model that gives logits, without training."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pivotpatch.core.counterfactual import CounterfactualLogits, check_lam, check_temperature, combine_logits
from pivotpatch.core.patches import (
    check_grid,
    check_images,
    check_overlap,
    check_source,
    cut_patches,
    split_views,
    stack_views,
)
from pivotpatch.errors import InputError
from pivotpatch.inference.onnx_session import OnnxLogits, is_onnx_session


class PatchInference(nn.Module):
    """Wrap a trained model: logits of the whole image plus logits of the patch that holds the object.

    The model is called as it is: its mode, dtype, device and random state are never changed, and
    gradients are recorded if the caller records them. Put it into evaluation mode first, as for any
    prediction. Each call costs 1 + grid * grid forward passes, in one batch.

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
        lam: float | Tensor = 1.0,
        temperature: float | Tensor = 1.0,
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
            lam: weight of the patches' logits; a tensor (L,) sets it for each label.
            temperature: of the softmax over the patches; a tensor (L,) sets it for each label.
            normalised: take `probs` from (p + lam q) / (1 + lam), the scale of one model's logits;
                otherwise from p + lam q. The ranking of images is the same.
            chunk_size: most views the model is given at once; all of them by default.
            autocast: dtype to run the model in, on the images' device.
            channels: C of the images the model takes.
        """
        super().__init__()
        given: object = model
        if not callable(given) and not is_onnx_session(given):
            wrong = f"the model is {given!r}, which cannot be called"
            raise InputError("PatchInference", wrong, "give a module, a function or an ONNX Runtime session")
        check_grid(grid, "PatchInference")
        check_overlap(overlap, "PatchInference")
        check_lam(lam, "PatchInference")
        check_temperature(temperature, "PatchInference")
        if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
            raise InputError(
                "PatchInference", f"chunk_size is {chunk_size!r}", "give a whole number, or None for all at once"
            )
        self.model = OnnxLogits(model) if is_onnx_session(model) else model
        self.grid = grid
        self.overlap = overlap
        # Buffers, so that values for each label move with the module; not part of its state.
        self.lam: float | Tensor
        self.temperature: float | Tensor
        for name, value in (("lam", lam), ("temperature", temperature)):
            if isinstance(value, Tensor):
                self.register_buffer(name, value, persistent=False)
            else:
                setattr(self, name, value)
        self.normalised = normalised
        self.chunk_size = chunk_size
        self.autocast = autocast
        self.channels = channels

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
            raise InputError(
                "PatchInference",
                f"images have {images.shape[1]} channels",
                f"give (B, {self.channels}, H, W), or set channels= to what the model takes",
            )
        if source is not None:
            check_source(images, source, "PatchInference")
        size = (images.shape[-2], images.shape[-1])
        patches = cut_patches(images if source is None else source, grid=self.grid, overlap=self.overlap, size=size)
        views = stack_views(images, patches)
        with self._autocast(images.device.type):
            chunks = [views] if self.chunk_size is None else views.split(self.chunk_size)
            logits = torch.cat([self._logits(chunk) for chunk in chunks])
        image_logits, patch_logits = split_views(logits, patches=self.grid * self.grid)
        return combine_logits(
            image_logits,
            patch_logits,
            lam=self.lam,
            temperature=self.temperature,
            normalised=self.normalised,
        )

    def extra_repr(self) -> str:
        """The options, for printing."""
        names = ("grid", "overlap", "lam", "temperature", "normalised")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def _autocast(self, device: str) -> AbstractContextManager[object]:
        return nullcontext() if self.autocast is None else torch.autocast(device, dtype=self.autocast)

    def _logits(self, views: Tensor) -> Tensor:
        """The model's logits (N,L) of some views (N,C,H,W)."""
        output = self.model(views)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise InputError(
                "PatchInference",
                f"the model returned a {type(output).__name__}",
                "wrap it in a function that returns the logits tensor (N, L)",
            )
        if logits.ndim != 2 or logits.shape[0] != views.shape[0]:
            raise InputError(
                "PatchInference",
                f"the model returned shape {tuple(logits.shape)} for {views.shape[0]} views",
                "wrap it in a function that returns logits (N, L), one row a view",
            )
        return logits
