"""No larger a model is built than there are weights to fill."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pivotpatch.errors import InputError
from pivotpatch.models.weights import read_shapes

_SPARE = 1 << 25  # elements besides those of the weights: masks and tables that are computed, not stored
_MAKING = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.linspace}


class Allowance(TorchFunctionMode):
    """While a model is built, refuses one that is far larger than the weights that are to fill it.

    What describes a model is a few bytes, and may ask for any number of weights; its file of weights holds what it
    holds. Twice as many elements may be made, and some more for what is computed.
    """

    def __init__(self, weights: Iterable[Path], *, where: str) -> None:
        """Read what the files hold.

        Args:
            weights: .safetensors files.
            where: what describes the model, for the message.
        """
        super().__init__()
        shapes = [shape for path in weights for shape in read_shapes(path).values()]
        self._elements = 2 * sum(torch.Size(shape).numel() for shape in shapes) + _SPARE
        self._tensors = 4 * len(shapes) + 1000
        self._where = where

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MAKING:
            made: Tensor = func(*args, **{**kwargs, "device": "meta"})
            self._elements -= made.numel()
            self._tensors -= 1
            if self._elements < 0 or self._tensors < 0:
                wrong = "describes a far larger model than its weights are of"
                raise InputError(self._where, wrong, "it is damaged, copy the model again")
        return func(*args, **kwargs)
