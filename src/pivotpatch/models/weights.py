"""Weights from files: read without pickled code, loaded only where every key and shape agrees."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from pivotpatch.errors import InputError, quote_fault, shorten


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a torch file that holds nothing but tensors; all finite.

    A variance of batch norm that was too large for float16 comes back as the largest that is not: training moves it
    to its place, which it could not from infinity.
    """
    state = _read(path)
    for name, value in state.items():
        if value.is_floating_point() and not value.isfinite().all():
            if not (name.endswith("running_var") and value.dtype == torch.float16 and not value.isnan().any()):
                raise InputError(str(path), f"{name} holds values that are not finite", "give weights that are sound")
            state[name] = value.clamp(max=torch.finfo(torch.float16).max)
    return state


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a .safetensors file, by name; none of them is read."""
    with _explaining(path), safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 # it is no dict


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Turn what is wrong with a .safetensors file into a message of one line."""
    if not path.is_file():
        raise InputError(str(path), "there is no such file", "check the path")
    try:
        yield
    except (SafetensorError, OSError) as error:
        reason = quote_fault(error)
        raise InputError(
            str(path), f"cannot be read ({reason})", "it is damaged or cut short, copy it again"
        ) from error


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        with _explaining(path):
            return dict(load_file(path))
    if not path.is_file():
        raise InputError(str(path), "there is no such file", "check the path")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch reports a damaged file in many ways
        raise InputError(
            str(path),
            f"cannot be read as plain tensors ({type(error).__name__})",
            "save its state_dict as .safetensors",
        ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(str(path), "holds more than named tensors", "save its state_dict as .safetensors")
    return {key.removeprefix("module."): value for key, value in state.items()}


def load_exactly(module: nn.Module, state: Mapping[str, Tensor], *, where: str) -> None:
    """Load tensors into a module; a missing, extra or misshapen key is an error that names it."""
    expected = module.state_dict()
    missing = [key for key in expected if key not in state]
    extra = [key for key in state if key not in expected]
    misshapen = [
        f"{key} is {tuple(state[key].shape)} instead of {tuple(value.shape)}"
        if state[key].shape != value.shape
        else f"{key} is {state[key].dtype} instead of {value.dtype}"
        for key, value in expected.items()
        if key in state
        and (state[key].shape != value.shape or state[key].is_floating_point() != value.is_floating_point())
    ]
    parts = [
        f"{len(names)} {kind} ({shorten(names)})"
        for kind, names in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
        if names
    ]
    if parts:
        raise InputError(
            where, "weights do not fit the network: " + ", ".join(parts), "give the weights of this very architecture"
        )
    module.load_state_dict(dict(state))
