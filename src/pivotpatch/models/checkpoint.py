"""A checkpoint folder: model.safetensors holds the tensors, model.json explains them, README.md is for people."""

import hashlib
import json
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from pivotpatch import __version__
from pivotpatch.errors import InputError, explaining, quote
from pivotpatch.models.backbone import Preprocessing
from pivotpatch.models.limits import Grid, Side, check_numbers
from pivotpatch.runtime.checks import Preference
from pivotpatch.runtime.values import Adaptive, Calibration, Patching, check_views
from pivotpatch.writing import explain_disk_faults, replacing_folder

WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
CARD = "README.md"
_TRAINED = ("patch_only", "regions")  # of a `PatchClassifier`, beside its patching
_COEFFICIENT = 1e4  # the largest of a logit, of which few are above 100

Kind = Literal["MultiLabelClassifier", "PatchClassifier", "IndependentClassifier", "MCARClassifier", "HCPClassifier"]
Text = Annotated[str, Field(min_length=1)]
Options = Annotated[dict[str, str | int | float | bool | None], AfterValidator(partial(check_numbers, where="options"))]
Threshold = Annotated[float, Field(ge=0, le=1)]
Mean = Annotated[float, Field(gt=-1e30, lt=1e30)]  # torch could not compute with more
Deviation = Annotated[float, Field(gt=0, lt=1e30)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class _Architecture(_Part):
    backbone: Text
    head: Text
    image_size: Side | None
    backbone_options: Options
    head_options: Options


class _Preprocessing(_Part):
    image_size: Side
    mean: Annotated[list[Mean], Field(min_length=3, max_length=3)]
    std: Annotated[list[Deviation], Field(min_length=3, max_length=3)]
    interpolation: Literal["bilinear", "bicubic"]

    def build(self) -> Preprocessing:
        # Models are trained on bilinear views, also those of before that state what timm says of the backbone.
        return Preprocessing(self.image_size, tuple(self.mean), tuple(self.std))


class _Patching(_Part):
    grid: Grid
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.0
    source_size: Side | None = None
    patch_size: Side | None = None
    closer_size: Side | None = None
    lam: Annotated[float, Field(ge=0)]
    temperature: Annotated[float, Field(gt=0)]
    patch_only: bool = False
    regions: bool = False

    def build(self) -> Patching:
        return Patching(**self.model_dump(exclude={*_TRAINED}))


class Description(_Part):
    """The content of model.json."""

    schema_: Literal[1] = Field(alias="schema")
    pivotpatch: str
    kind: Kind
    architecture: _Architecture
    labels: list[Text]
    preprocessing: _Preprocessing
    thresholds: list[Threshold] | None
    preferences: dict[Preference, list[Threshold]] = {}
    calibration: Calibration | None = None
    adaptive: Adaptive | None = None
    patching: _Patching | None

    @model_validator(mode="after")
    def _fits_together(self) -> "Description":
        if (self.patching is not None) != (self.kind == "PatchClassifier"):
            raise ValueError(f"patching is {self.patching} for a {self.kind}")
        fitted = [self.calibration]
        if self.adaptive is not None:
            fitted += [self.adaptive.calibration, self.adaptive.again]
        values = [
            self.thresholds,
            *self.preferences.values(),
            *(part for each in fitted if each for part in (each.slope, each.offset)),
        ]
        if any(each is not None and len(each) != len(self.labels) for each in values):
            raise ValueError(f"thresholds or a calibration are not of {len(self.labels)} labels")
        if any(abs(number) > _COEFFICIENT for each in values for number in each or ()):
            raise ValueError(f"a number of a calibration is beyond {_COEFFICIENT:g}")
        return self


def save_checkpoint(
    model: nn.Module, folder: str | Path, *, overwrite: bool = False, card: str | None = None, half: bool = False
) -> None:
    """Write a model as a checkpoint folder, whole or not at all.

    Args:
        model: any kind of `Classifier`, compiled or not.
        folder: where to; it must not exist unless `overwrite`.
        overwrite: replace the checkpoint that is there. It stays until the new one is complete; a
            crash in between leaves it beside as `<folder>.old`. Anything but a checkpoint is never replaced, and
            what else lies in its folder stays there, such as a README.md.
        card: text of a README.md to lie beside it.
        half: keep the weights in half precision, in half the bytes; they are float32 again when loaded.
    """
    with explain_disk_faults(Path(folder), also=(SafetensorError,)):
        folder = Path(folder).resolve()
        for place in (folder, folder.with_name(f"{folder.name}.old")):  # both give way
            empty = place.is_dir() and not any(place.iterdir())
            if place.exists() and not empty and not (place / DESCRIPTION).is_file():
                raise InputError(str(place), "exists and is no checkpoint", "choose another folder")
        if folder.exists() and not overwrite:
            raise InputError(str(folder), "exists already", "choose another folder or allow overwriting")
        with replacing_folder(folder) as scratch:
            if folder.exists():
                new = {WEIGHTS, DESCRIPTION} if card is None else {WEIGHTS, DESCRIPTION, CARD}
                ours = lambda at, _: new if Path(at) == folder else ()  # noqa: E731
                shutil.copytree(folder, scratch, symlinks=True, dirs_exist_ok=True, ignore=ours)
            write_checkpoint(model, scratch, half=half)
            if card is not None:
                (scratch / CARD).write_text(card, "utf-8")


def write_checkpoint(model: nn.Module, folder: Path, *, half: bool = False) -> None:
    """Write a checkpoint's two files into a folder that the caller is filling."""
    model = _unwrap(model)
    description = json.dumps(describe_model(model), indent=2, ensure_ascii=False) + "\n"
    (folder / DESCRIPTION).write_text(description, "utf-8")
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    if half:
        state = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
        for key, value in state.items():
            if not value.isfinite().all():
                wrong = f"{key} has values too large for half precision"
                raise InputError("save_checkpoint", wrong, "keep full precision")
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    # safetensors keeps its file to the owner; give it the rights that any new file gets.
    (folder / WEIGHTS).chmod((folder / DESCRIPTION).stat().st_mode)


def describe_model(model: nn.Module) -> dict[str, Any]:
    """The content of a model's model.json, checked as when it is loaded, which may be too late."""
    given: Any = _unwrap(model)
    kind = type(given).__name__
    if kind not in get_args(Kind):
        raise InputError("save_checkpoint", f"cannot save a {kind}", f"give a {' or '.join(get_args(Kind))}")
    patched = kind == "PatchClassifier"
    if given.preprocessing.interpolation != "bilinear":
        wrong = f"its images are resized {given.preprocessing.interpolation!r}, and those of checkpoints bilinearly"
        raise InputError("save_checkpoint", wrong, 'set interpolation="bilinear" in its preprocessing')
    content = {
        "schema": 1,
        "pivotpatch": __version__,
        "kind": kind,
        "architecture": asdict(given.architecture),
        "labels": given.labels,
        "preprocessing": asdict(given.preprocessing),
        "thresholds": given.thresholds,
        **({"preferences": given.preferences} if given.preferences else {}),
        "calibration": given.calibration and asdict(given.calibration),
        "adaptive": given.adaptive and asdict(given.adaptive),
        "patching": {**asdict(given.patching), **{name: getattr(given, name) for name in _TRAINED}}
        if patched
        else None,
    }
    plain: dict[str, Any] = json.loads(json.dumps(content))
    _validate(Description, plain, "save_checkpoint", todo="correct it in the model, then save it")
    return plain


def fingerprint(model: nn.Module) -> str:
    """Sixteen digits that tell a model's weights from any others, wherever they lie; what `tune` fits is no part."""
    found = hashlib.sha256()
    for key, value in sorted(_unwrap(model).state_dict().items()):
        found.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def _unwrap(model: nn.Module) -> nn.Module:
    """A model without what torch.compile wraps around it."""
    return getattr(model, "_orig_mod", model)


def read_description(folder: Path) -> Description:
    """The description of a checkpoint, complete and of a schema that this version reads."""
    path = folder / DESCRIPTION
    if not path.exists():
        todo = f"check the path; an interrupted save leaves the last one in {folder.name}.old"
        raise InputError(str(folder), f"is no checkpoint, {DESCRIPTION} is missing", todo)
    with explaining(str(path), "cannot be read as JSON", "copy the checkpoint again, if it is damaged"):
        content = json.loads(path.read_text("utf-8"))
    described = _validate(Description, content, str(path), todo="save the checkpoint again, or upgrade pivotpatch")
    if described.patching is not None and not described.patching.regions:
        check_views(described.preprocessing.image_size, described.patching.build(), where=str(path))
    return described


def check_preprocessing(preprocessing: Preprocessing, where: str) -> None:
    """Refuse what was read from somebody's files and cannot be done to images; `where` they are."""
    todo = "correct it in its configuration"
    _validate(_Preprocessing, asdict(preprocessing), f"{where}: preprocessing", todo=todo)


_Model = TypeVar("_Model", bound=BaseModel)


def _validate(schema: type[_Model], content: object, where: str, *, todo: str) -> _Model:
    """Content that fits a schema, or its first fault in one line."""
    try:
        return schema.model_validate_json(json.dumps(content))  # so that a list may be a tuple
    except ValidationError as error:
        fault = error.errors()[0]
    name, reason = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
    given = "" if fault["type"] == "missing" else f" is {quote(fault['input'])}"
    raise InputError(where, f"{name}{given} ({reason})" if name else reason, todo)
