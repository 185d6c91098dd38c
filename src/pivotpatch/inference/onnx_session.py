"""An ONNX Runtime session as a function from images to logits."""

from typing import Any

import torch
from torch import Tensor

from pivotpatch.errors import InputError

_DTYPES = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16, "tensor(uint8)": torch.uint8}


def is_onnx_session(model: object) -> bool:
    """Whether this is an `onnxruntime.InferenceSession`, found without importing onnxruntime."""
    return all(callable(getattr(model, name, None)) for name in ("run", "get_inputs", "get_outputs"))


class OnnxLogits:
    """Calls a session with tensors; a session made for one batch size is fed batches of that size."""

    def __init__(self, session: Any) -> None:
        inputs, outputs = session.get_inputs(), session.get_outputs()
        if len(inputs) != 1 or inputs[0].type not in _DTYPES:
            found = ", ".join(f"{item.name} {item.type}" for item in inputs)
            raise InputError("ONNX session", f"its inputs are {found}", "give a model with one image batch as input")
        names = [item.name for item in outputs]
        if len(names) > 1 and "logits" not in names:
            raise InputError("ONNX session", f"its outputs are {', '.join(names)}", "name the one to use 'logits'")
        self.session = session
        self.input_name: str = inputs[0].name
        self.output_name: str = "logits" if "logits" in names else names[0]
        self.dtype = _DTYPES[inputs[0].type]
        batch = inputs[0].shape[0] if inputs[0].shape else None
        self.batch_size: int | None = batch if isinstance(batch, int) and batch > 0 else None

    def __call__(self, images: Tensor) -> Tensor:
        """Logits (N,L) of images (N,C,H,W), on the images' device."""
        if self.batch_size is None:
            return self._run(images)
        return torch.cat([self._run_padded(chunk, self.batch_size) for chunk in images.split(self.batch_size)])

    def _run_padded(self, images: Tensor, size: int) -> Tensor:
        """Fill the last batch up with copies of its first image and drop their logits again."""
        missing = size - len(images)
        return self._run(torch.cat([images, images[:1].expand(missing, -1, -1, -1)]))[: len(images)]

    def _run(self, images: Tensor) -> Tensor:
        if self.dtype == torch.uint8 != images.dtype:
            raise InputError("ONNX session", f"it takes uint8 and images are {images.dtype}", "give uint8 pixels")
        pixels = images.detach().to(device="cpu", dtype=self.dtype).numpy()
        (logits,) = self.session.run([self.output_name], {self.input_name: pixels})
        return torch.from_numpy(logits).to(images.device)
