"""Weights from files: read without pickled code, under whatever names, loaded only where every key and shape agrees."""

import math
import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pivotpatch.errors import InputError, explaining, shorten
from pivotpatch.models.backbone import convert_names

# Published checkpoints hold these beside their tensors: the command line, and average precisions. None runs code.
_HARMLESS: list[Any] = [Namespace, np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in "?bhilqBHILQefd"}]
_MAKERS: list[Any] = [np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
_HARMLESS += [(each, f"numpy.{core}.multiarray.{each.__name__}") for each in _MAKERS for core in ("core", "_core")]
_WRAPPERS = ("state_dict_ema", "model_ema", "ema", "state_dict", "model")  # an average is what was evaluated
_SPARE = 1 << 25  # elements besides those of the weights: masks and tables that are computed, not stored
_MAKING = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.linspace}
_LAYERS = r"transformer\.(encoder|decoder)\.layers\.(\d+)\."
_DECODER = r"(?:head|fc)\.decoder\."
_HEADS = (  # names of heads, which begin so, and ours
    (r"query_embed\.weight$", "head.queries"),
    (r"input_proj\.", "head.enter."),
    (r"transformer\.decoder\.norm\.", "head.norm."),
    (rf"{_LAYERS}self_attn\.", r"head.\1.\2.self_attention."),
    (rf"{_LAYERS}multihead_attn\.", r"head.\1.\2.image_attention."),
    (rf"{_LAYERS}linear1\.", r"head.\1.\2.feedforward.0."),
    (rf"{_LAYERS}linear2\.", r"head.\1.\2.feedforward.3."),
    (rf"{_LAYERS}norm1\.", r"head.\1.\2.self_norm."),
    (r"transformer\.encoder\.layers\.(\d+)\.norm2\.", r"head.encoder.\1.feedforward_norm."),
    (r"transformer\.decoder\.layers\.(\d+)\.norm2\.", r"head.decoder.\1.image_norm."),
    (r"transformer\.decoder\.layers\.(\d+)\.norm3\.", r"head.decoder.\1.feedforward_norm."),
    (rf"{_DECODER}embed_standart\.", "head.enter."),
    (rf"{_DECODER}query_embed\.weight$", "head.queries"),
    (rf"{_DECODER}layers\.0\.", "head.decoder."),
    (rf"{_DECODER}duplicate_pooling$", "head.project.weight"),
    (rf"{_DECODER}duplicate_pooling_bias$", "head.project.bias"),
)
# MLC-PAT's outputs: of the image, of the patches' weights, of the patches; where there are two, the second is both.
_OUTPUTS = {None: "head.project", "1": "head.project", "2": "weight_projection", "3": "patch_projection"}


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a torch file without pickled code; all finite."""
    if path.suffix == ".safetensors":
        with _reading(path):
            state: Any = load_file(path)
    else:
        state = _read_torch(path)
        for wrapper in _WRAPPERS:
            if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
                state = state[wrapper]
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise InputError(str(path), "holds more than named tensors", "save its state_dict as .safetensors")
        state = {key.removeprefix("module.").removeprefix("_orig_mod."): value for key, value in state.items()}
    for name, value in state.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise InputError(str(path), f"{name} holds values that are not finite", "give weights that are sound")
    return dict(state)


def read_labels(path: Path) -> list[str] | None:
    """The names of labels that a torch file holds beside its weights, as ASL's and ML-Decoder's do."""
    content = None if path.suffix == ".safetensors" else _read_torch(path)
    names = content.get("idx_to_class") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        return None
    with explaining(str(path), "its idx_to_class is not numbered", "give --labels"):
        return [str(name) for _, name in sorted(names.items(), key=lambda pair: int(pair[0]))]


def _read_torch(path: Path) -> Any:
    with _reading(path), torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings(action="ignore"):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch reports a damaged file in many ways, and advises to run what it holds
            wrong = f"cannot be read as plain tensors ({type(error).__name__})"
            raise InputError(str(path), wrong, "save its state_dict as .safetensors") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A file of weights that must be there and whole."""
    if not path.is_file():
        raise InputError(str(path), "there is no such file", "check the path")
    with explaining(str(path), "cannot be read", "it is damaged or cut short, copy it again"):
        yield


def load_exactly(
    module: nn.Module,
    state: Mapping[str, Tensor],
    *,
    where: str,
    todo: str = "give the weights of this very architecture",
) -> None:
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
        raise InputError(where, f"weights do not fit the model: {', '.join(parts)}", todo)
    module.load_state_dict(dict(state))


class Allowance(TorchFunctionMode):
    """While a model is built, refuses one that is far larger than the weights that are to fill it.

    What describes a model is a few bytes, and may ask for any number of weights; its file of weights holds what it
    holds. Twice as many elements may be made, and some more for what is computed.
    """

    def __init__(self, weights: Iterable[Path], *, where: str) -> None:
        """Read what files of weights hold; `where` the model is described."""
        super().__init__()
        counts = [count for path in weights for count in _count_elements(path)]
        self._elements = 2 * sum(counts) + _SPARE
        self._tensors = 4 * len(counts) + 1000
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


def _count_elements(path: Path) -> list[int]:
    """Of each tensor in a file of weights."""
    if path.suffix != ".safetensors":
        return [value.numel() for value in read_weights(path).values()]
    with _reading(path), safe_open(path, "pt") as file:
        return [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118 # it is no dict


def rename_published(state: Mapping[str, Tensor], network: Any) -> dict[str, Tensor]:
    """Weights of a whole model under our names, with as many projections as there are; what is unknown keeps its name.

    Args:
        state: under our names, timm's, or those of the model's authors.
        network: the timm model of the backbone, which knows names of its authors, too.
    """
    if any(name.startswith("backbone.network.") for name in state):
        return dict(state)
    asked = "query_embed.weight" in state  # Query2Label
    classifier = network.pretrained_cfg["classifier"]
    tops = [classifier] if isinstance(classifier, str) else list(classifier)
    output = re.compile(rf"{'fc' if asked else re.escape(tops[0])}\.(?:fc([123])\.)?(weight|bias|W|b)")
    plain = not asked and _averages(network)
    named, body = {}, {}
    for name, value in state.items():
        found, known = output.fullmatch(name), [pair for pair in _HEADS if re.match(pair[0], name)]
        if found is not None and (asked or plain or found[1] is not None):
            part = {"W": "weight", "b": "bias"}.get(found[2], found[2])
            ours = value[0, :, :, None] if found[2] == "W" else value[0] if found[2] == "b" else value
            named[f"{_OUTPUTS[found[1]]}.{part}"] = ours
        elif known:
            named[re.sub(*known[0], name)] = value
        else:
            body[name.removeprefix("backbone.0.").removeprefix("body.") if asked else name] = value
    expected = network.state_dict()
    if not expected.keys() <= body.keys():
        body = convert_names(body, network)
    for name, value in body.items():
        another = name not in expected and name.startswith(tuple(f"{top.partition('.')[0]}." for top in tops))
        named[name if another else f"backbone.network.{name}"] = value  # a head that is none of ours keeps its name
    if "weight_projection.weight" in named and "patch_projection.weight" not in named:
        named |= {f"patch_projection.{part}": named[f"weight_projection.{part}"] for part in ("weight", "bias")}
    return named


def _averages(network: Any) -> bool:
    """Whether a timm model's classifier stands on the mean of its feature map, as our linear head does."""
    features = torch.linspace(-1, 1, network.num_features * 4).reshape(1, network.num_features, 2, 2)
    channels_last, training = getattr(network, "output_fmt", "") == "NHWC", network.training
    try:
        network.eval()  # without dropout
        pooled = network.forward_head(features.permute(0, 2, 3, 1) if channels_last else features, pre_logits=True)
    except Exception:  # it wants tokens, or has no such step
        return False
    finally:
        network.train(training)
    mean = features.mean(dim=(2, 3))
    return pooled.shape == mean.shape and torch.allclose(pooled, mean, atol=1e-6)


def read_head_options(state: Mapping[str, Tensor]) -> dict[str, int | bool]:
    """Options of the decoder head that published weights are of, as their shapes tell; none for any other head."""
    queries = {name: value.shape for name, value in state.items() if name.endswith("query_embed.weight")}
    if "query_embed.weight" in queries:
        layers = {match.groups() for name in state if (match := re.match(_LAYERS, name))}
        inner = state.get("transformer.decoder.layers.0.linear1.weight", torch.empty(1))
        return {
            "width": queries["query_embed.weight"][-1],
            "projection": "input_proj.weight" in state,
            "self_attention": any(re.match(r"transformer\.decoder\.layers\.\d+\.self_attn", name) for name in state),
            "encoder_layers": sum(kind == "encoder" for kind, _ in layers),
            "decoder_layers": sum(kind == "decoder" for kind, _ in layers),
            "feedforward": inner.shape[0],
        }
    return next(({"groups": shape[0], "width": shape[-1]} for shape in queries.values()), {})
