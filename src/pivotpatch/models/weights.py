"""Weights from files: read without pickled code, loaded only where every key and shape agrees."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pivotpatch.errors import InputError, quote_fault, shorten

# Published checkpoints hold these beside their tensors: the command line, and average precisions. None runs code.
_HARMLESS: list[Any] = [Namespace, np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in "?bhilqBHILQefd"}]
_MAKERS: list[Any] = [np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
_HARMLESS += [(each, f"numpy.{core}.multiarray.{each.__name__}") for each in _MAKERS for core in ("core", "_core")]
_WRAPPERS = ("state_dict_ema", "model_ema", "ema", "state_dict", "model")  # an average is what was evaluated
_SPARE = 1 << 25  # elements besides those of the weights: masks and tables that are computed, not stored
_MAKING = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.linspace}


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a torch file without pickled code; all finite.

    A variance of batch norm that was too large for float16 comes back as the largest that is not: training moves it
    to its place, which it could not from infinity.
    """
    if not path.is_file():
        raise InputError(str(path), "there is no such file", "check the path")
    state: dict[str, Tensor]
    state = _read_safetensors(path, load_file) if path.suffix == ".safetensors" else _read_tensors(path)
    for name, value in state.items():
        if value.is_floating_point() and not value.isfinite().all():
            if not (name.endswith("running_var") and value.dtype == torch.float16 and not value.isnan().any()):
                raise InputError(str(path), f"{name} holds values that are not finite", "give weights that are sound")
            state[name] = value.clamp(max=torch.finfo(torch.float16).max)
    return state


def read_labels(path: Path) -> list[str] | None:
    """The names of labels that a torch file holds beside its weights, as ASL's and ML-Decoder's do."""
    content = None if path.suffix == ".safetensors" else _read_torch(path)
    names = content.get("idx_to_class") if isinstance(content, dict) else None
    return [str(name) for _, name in sorted(names.items())] if isinstance(names, dict) else None


def _read_torch(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch reports a damaged file in many ways
        wrong = f"cannot be read as plain tensors ({type(error).__name__})"
        raise InputError(str(path), wrong, "save its state_dict as .safetensors") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    state = _read_torch(path)
    for wrapper in _WRAPPERS:
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(str(path), "holds more than named tensors", "save its state_dict as .safetensors")
    return {key.removeprefix("module.").removeprefix("_orig_mod."): value for key, value in state.items()}


def _read_shapes(path: Path) -> list[tuple[int, ...]]:
    """The shapes of a .safetensors file's tensors; none of them is read."""
    with safe_open(path, "pt") as file:
        return [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118 # it is no dict


def _read_safetensors(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (SafetensorError, OSError) as error:
        todo = "it is damaged or cut short, copy it again"
        raise InputError(str(path), f"cannot be read ({quote_fault(error)})", todo) from error


def load_exactly(module: nn.Module, state: Mapping[str, Tensor], *, where: str) -> None:
    """Load tensors into a module; a missing, extra or misshapen key is an error that names it."""
    expected = module.state_dict()
    missing = [key for key in expected if key not in state]
    extra = [key for key in state if key not in expected]
    misshapen = []
    for key, value in expected.items():
        given = state.get(key, value)
        if given.shape != value.shape:
            misshapen.append(f"{key} is {tuple(given.shape)} instead of {tuple(value.shape)}")
        elif given.is_floating_point() != value.is_floating_point():
            misshapen.append(f"{key} is {given.dtype} instead of {value.dtype}")
    kinds = {"missing": missing, "extra": extra, "misshapen": misshapen}
    parts = [f"{len(names)} {kind} ({shorten(names)})" for kind, names in kinds.items() if names]
    if parts:
        wrong = f"weights do not fit the model: {', '.join(parts)}"
        raise InputError(where, wrong, "give the weights of this very architecture")
    module.load_state_dict(dict(state))


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
        shapes = [shape for path in weights for shape in _read_safetensors(path, _read_shapes)]
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
