"""Other people's multi-label models, of transformers or timm, with what ours know: labels and preprocessing."""

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from pivotpatch.errors import InputError, explaining, import_extra
from pivotpatch.models.backbone import Preprocessing, convert_names, get_config, read_preprocessing
from pivotpatch.models.checkpoint import WEIGHTS, check_preprocessing
from pivotpatch.models.classifier import OWN_HEAD, Architecture, Classifier
from pivotpatch.models.hub import fetch_folder
from pivotpatch.models.limits import check_numbers
from pivotpatch.models.weights import Allowance, load_exactly, read_weights
from pivotpatch.runtime.engine import open_session

CONFIG = "config.json"
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_MULTI_LABEL = "multi_label_classification"
_TORCH_FILE = "pytorch_model.bin"  # what timm's `save_for_hf` writes by default; read without pickled code
_NAME_LABELS = f"name each logit in its {CONFIG}, or in Python open it with labels=[...]"
_CUBIC = 3  # Pillow's number
_DTYPES = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16, "tensor(uint8)": torch.uint8}
_KNOWN_STEPS = {"do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"}
_ODD_STEPS = {"include_top", "rescale_offset"}  # a second division, and a shift behind the scale


class ForeignClassifier(Classifier):
    """A model that is not ours: images (B,C,H,W) in, logits (B,L) out.

    It can be asked, wrapped by PAT-I, evaluated and exported like our own, but not saved as a checkpoint.

    Attributes:
        network: theirs; it gives logits, or an object that has them as `logits`.
        source_size: rows and columns of the images that a loader is to give, for PAT-I to cut patches from; those
            that the model sees where None.
    """

    source_size: int | None = None

    def __init__(
        self,
        network: nn.Module,
        labels: Sequence[str],
        *,
        name: str,
        preprocessing: Preprocessing,
    ) -> None:
        """Take a model in; it is asked once, to see whether it gives a logit for each label."""
        super().__init__(Architecture(name, OWN_HEAD, preprocessing.image_size), labels)
        check_preprocessing(preprocessing, name)
        self.origin = name
        self.network = network
        self.preprocessing = preprocessing
        self.train(network.training)
        side = preprocessing.image_size
        with torch.inference_mode():
            shape = tuple(self(torch.zeros(1, len(preprocessing.mean), side, side)).shape)
        if shape != (1, len(self.labels)):
            wrong = f"the model gives logits {shape} of one image, and there are {len(self.labels)} labels"
            raise InputError(name, wrong, _NAME_LABELS)

    @property
    def picture_size(self) -> int:
        """Rows and columns of the images that a loader is to give."""
        return self.source_size or super().picture_size

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B,L) of preprocessed images (B,C,H,W)."""
        output = self.network(images)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            wrong = f"the model gives a {type(output).__name__}, no logits"
            raise InputError(self.architecture.backbone, wrong, "give one that classifies images")
        return logits


def load_transformers(
    name_or_folder: str | os.PathLike[str],
    *,
    labels: Sequence[str] | None = None,
    multi_label: bool = False,
    preprocessing: Preprocessing | None = None,
    revision: str | None = None,
) -> ForeignClassifier:
    """Open an image classifier of transformers, in evaluation mode, on the CPU, in float32.

    Only safetensors are read, and no code that comes with a model is run. What is done to images is read from its
    processor's configuration; where that is a crop, the whole image is stretched to the crop's size instead.

    Args:
        name_or_folder: a folder that `save_pretrained` of transformers wrote, or `owner/name` on the hub.
        labels: names of the L labels, in place of those that its configuration states.
        multi_label: say that it was trained for several labels per image where its configuration does not.
            The logits of one that was trained to choose a single label are no log odds, so it is refused otherwise.
        preprocessing: what is done to images, in place of what its processor's configuration states.
        revision: a branch, tag or commit of the hub's; the newest by default.
    """
    where = os.fspath(name_or_folder)
    library = import_extra("transformers")
    also = ("*.safetensors", f"{WEIGHTS}.index.json", *_PROCESSORS)
    folder = _fetch(where, also=also, revision=revision)
    safely = {"trust_remote_code": False, "local_files_only": True}
    with _opening("transformers", where):
        config = library.AutoConfig.from_pretrained(folder, **safely)
        stated = getattr(config, "problem_type", None)
        if stated != _MULTI_LABEL and not multi_label:
            wrong = f"its problem_type is {stated!r}, so it may have been trained to choose a single label"
            todo = f"if it is multi-label all the same, write problem_type {_MULTI_LABEL!r} into its {CONFIG}"
            raise InputError(where, wrong, f"{todo}, or in Python load_transformers(..., multi_label=True)")
        with Allowance(folder.glob("*.safetensors"), where=where):
            network, told = library.AutoModelForImageClassification.from_pretrained(
                folder, config=config, use_safetensors=True, output_loading_info=True, **safely
            )
        if preprocessing is None:
            processor = library.AutoImageProcessor.from_pretrained(folder, **safely)
            preprocessing = _read_processor(processor.to_dict(), where)
        lacking = [*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])]
        if lacking:
            wrong = f"{len(lacking)} of its weights are missing or of another shape, such as {sorted(lacking)[0]}"
            raise InputError(where, wrong, "give a model that was trained as an image classifier")
        return ForeignClassifier(
            network.float().eval(),
            _order_labels(config.id2label) if labels is None else labels,
            name=f"transformers:{where}",
            preprocessing=preprocessing,
        )


def load_timm(
    name_or_folder: str | os.PathLike[str], *, labels: Sequence[str] | None = None, revision: str | None = None
) -> ForeignClassifier:
    """Open a whole timm model, with its own classifier, in evaluation mode, on the CPU, in float32.

    Args:
        name_or_folder: a folder as timm's `save_for_hf` writes it, with safetensors, or `owner/name` on the hub. That
            it was trained for several labels per image is yours to know: timm does not write it down.
        labels: names of the L labels, in place of those that its configuration states.
        revision: a branch, tag or commit of the hub's; the newest by default.
    """
    where = os.fspath(name_or_folder)
    folder = _fetch(where, also=(WEIGHTS,), revision=revision, others=(_TORCH_FILE,))
    weights = folder / (WEIGHTS if (folder / WEIGHTS).is_file() else _TORCH_FILE)
    with _opening("timm", where):
        with Allowance([weights], where=where):
            network = timm.create_model(f"local-dir:{folder}")
        names = network.pretrained_cfg.get("label_names") if labels is None else labels
        if not names:
            raise InputError(where, f"its {CONFIG} states no label_names", _NAME_LABELS)
        size = _find_size(network, where)
        return _fill_timm(network, _order_labels(names), weights, name=f"timm:{where}", image_size=size)


def _fill_timm(network: Any, labels: Sequence[str], weights: Path, *, name: str, image_size: int) -> ForeignClassifier:
    """A whole timm model with the weights of a file, under timm's names or their authors'."""
    state = read_weights(weights)
    if not network.state_dict().keys() <= state.keys():
        state = convert_names(state, network)
    load_exactly(network.eval(), state, where=str(weights))
    prepare = read_preprocessing(network.pretrained_cfg, image_size=image_size)
    return ForeignClassifier(network, labels, name=name, preprocessing=prepare)


def build_timm(name: str, labels: Sequence[str], weights: Path, *, image_size: int | None) -> ForeignClassifier:
    """A whole timm model by its name, with its own classifier and the weights of a file."""
    fixed = get_config(name).get("fixed_input_size")
    sized = {"img_size": image_size} if fixed and image_size is not None else {}
    with _opening("timm", str(weights)):
        network = timm.create_model(name, num_classes=len(labels), **sized)
        size = image_size or _find_size(network, str(weights))
        return _fill_timm(network, labels, weights, name=str(weights), image_size=size)


_PASSING = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten")  # what changes no value
_SURE = 100.0  # the logit of a sigmoid that was rounded to 1


class OnnxNetwork(nn.Module):
    """Somebody's ONNX graph, run on the CPU: images (B,3,H,W) in, logits (B,L) out."""

    def __init__(self, path: Path) -> None:
        """Open a file; its one input takes images in float32, and its first output gives logits or their sigmoid."""
        super().__init__()
        session = open_session(path, device="cpu", threads=torch.get_num_threads())
        graph = import_extra("onnx").load(path, load_external_data=False).graph
        self.run = wrap_session(session, output=graph.output[0].name)
        digest = torch.tensor(list(sha256(path.read_bytes()).digest()), dtype=torch.float32)
        self.digest = nn.Parameter(digest, requires_grad=False)  # tells graphs apart, and where answers are wanted
        self.shape: list[int | str] = session.get_inputs()[0].shape
        if len(self.shape) != 4 or self.shape[1] != 3:
            raise InputError(str(path), f"its input is {self.shape}", "give a graph of images (B, 3, H, W)")
        made = {name: node for node in graph.node for name in node.output}
        last = made.get(graph.output[0].name)
        while last is not None and last.op_type in _PASSING:
            last = made.get(last.input[0])
        self.ends_in_sigmoid = last is not None and last.op_type == "Sigmoid"

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B,L) of preprocessed images (B,3,H,W)."""
        found = self.run(images.float())
        return found.double().logit().clamp(-_SURE, _SURE).float() if self.ends_in_sigmoid else found


def wrap_session(session: Any, *, output: str | None = None) -> Callable[[Tensor], Tensor]:
    """An ONNX Runtime session as a function of tensors; one made for one batch size is fed batches of that size.

    Its logits are the `output` of that name, else the one called "logits", else the only one.
    """
    inputs, names = session.get_inputs(), [item.name for item in session.get_outputs()]
    if len(inputs) != 1 or inputs[0].type not in _DTYPES:
        found = ", ".join(f"{item.name} {item.type}" for item in inputs)
        raise InputError("ONNX session", f"its inputs are {found}", "give a model with one image batch as input")
    if output is None and len(names) > 1 and "logits" not in names:
        raise InputError("ONNX session", f"its outputs are {', '.join(names)}", "name the one to use 'logits'")
    output = output or ("logits" if "logits" in names else names[0])
    dtype, fixed = _DTYPES[inputs[0].type], inputs[0].shape[0] if inputs[0].shape else None
    size = fixed if isinstance(fixed, int) else 0

    def run(images: Tensor) -> Tensor:
        if (dtype == torch.uint8) != (images.dtype == torch.uint8):
            todo = "give uint8 pixels" if dtype == torch.uint8 else "normalise them first, as it was trained with"
            raise InputError("ONNX session", f"images are {images.dtype}, which the model does not take", todo)
        found = []
        for part in images.split(size or max(len(images), 1)):
            full = nn.functional.pad(part, (0, 0, 0, 0, 0, 0, 0, max(size - len(part), 0)))
            (logits,) = session.run([output], {inputs[0].name: full.detach().to("cpu", dtype).numpy()})
            found.append(torch.from_numpy(logits[: len(part)]))
        return torch.cat(found).to(images.device)

    return run


def _find_size(network: Any, where: str) -> int:
    """Rows and columns of the images that a timm model sees."""
    channels, *sides = network.pretrained_cfg["input_size"]
    sides = getattr(getattr(network, "patch_embed", None), "img_size", None) or sides  # set by an argument, or its own
    if channels != 3 or sides[0] != sides[1]:
        wrong = f"it sees {channels} channels of {sides[0]} x {sides[1]} pixels"
        raise InputError(where, wrong, "give one for square RGB images")
    return int(sides[0])


def _fetch(where: str, *, also: Sequence[str], revision: str | None, others: Sequence[str] = ()) -> Path:
    """A folder with what describes a model and its weights, as safetensors or, of a local folder, one of `others`."""
    folder = fetch_folder(where, needed=CONFIG, also=also, revision=revision)
    held = any(folder.glob("*.safetensors")) or any((folder / name).is_file() for name in others)
    if not (folder / CONFIG).is_file() or not held:
        wrong = f"holds no {CONFIG}, or no weights as safetensors; others can run code when they are opened"
        raise InputError(where, wrong, "check the path, or save it again with safetensors")
    with explaining(where, f"its {CONFIG} is no JSON", "copy the model again"):
        content = json.loads((folder / CONFIG).read_bytes())
    check_numbers(content, f"{where}: {CONFIG}")
    return folder


@contextmanager
def _opening(library: str, where: str) -> Iterator[None]:
    """A configuration may be wrong in as many ways as there are models."""
    said = explaining(where, f"{library} cannot open it", "check what it is")
    with said, quiet(), torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Keep another library's remarks and bars to itself for a while: what matters of them is checked."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _order_labels(stated: Mapping[Any, str] | Sequence[str]) -> list[str]:
    """Names in the order of the logits."""
    return [stated[place] for place in sorted(stated, key=int)] if isinstance(stated, Mapping) else list(stated)


def _read_processor(stated: Mapping[str, Any], where: str) -> Preprocessing:
    """The preprocessing that the configuration of a transformers' processor states."""
    steps = {name for name, value in stated.items() if value is True and (name.startswith("do_") or name in _ODD_STEPS)}
    size = stated.get("crop_size" if "do_center_crop" in steps else "size")
    sides: set[Any] = set(size.values()) if isinstance(size, Mapping) else {size}
    sides.discard(None)
    if steps - _KNOWN_STEPS or "do_resize" not in steps or len(sides) != 1:
        does = f"{', '.join(sorted(steps)) or 'nothing'} to size {size}"
        wrong = f"its processor does {does}, not only a resize to a square and a normalisation of RGB"
        raise InputError(where, wrong, "in Python, open it with preprocessing=Preprocessing(...)")
    (side,) = sides
    levels = 255 * stated["rescale_factor"] if "do_rescale" in steps else 255.0
    normal = "do_normalize" in steps
    mean, std = (stated["image_mean"], stated["image_std"]) if normal else ((0.0,) * 3, (1.0,) * 3)
    return Preprocessing(
        image_size=side,
        mean=tuple(value / levels for value in mean),
        std=tuple(value / levels for value in std),
        interpolation="bicubic" if stated.get("resample") == _CUBIC else "bilinear",
    )
