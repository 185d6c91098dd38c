"""Write a checkpoint folder: model.safetensors holds the tensors, model.json explains them; and check the latter."""

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from pivotpatch import __version__
from pivotpatch.errors import InputError, choose_one_of, quote, quote_fault
from pivotpatch.models.limits import Grid, Side, check_views
from pivotpatch.models.preprocessing import Preprocessing
from pivotpatch.writing import explain_disk_faults, replacing_folder

SCHEMA = 1
WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
CARD = "README.md"
_CORRECT = "correct it in the model, then save it"
Kind = Literal["MultiLabelClassifier", "PatchClassifier", "IndependentClassifier"]
Text = Annotated[str, Field(min_length=1)]
Coefficient = Annotated[float, Field(ge=-1e4, le=1e4)]  # of a logit, of which few are above 100


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class _Architecture(_Part):
    backbone: Text
    head: Text
    image_size: Side | None
    backbone_options: dict[str, str | int | float | bool | None]
    head_options: dict[str, int | float | bool | None]


class _Preprocessing(_Part):
    image_size: int
    mean: list[float]
    std: list[float]
    interpolation: Literal["bilinear", "bicubic"]

    def build(self) -> Preprocessing:
        return Preprocessing(self.image_size, tuple(self.mean), tuple(self.std), self.interpolation)


class _Patching(_Part):
    grid: Grid
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.0
    source_size: Side | None = None
    patch_size: Side | None = None
    closer_size: Side | None = None
    lam: Annotated[float, Field(ge=0)]
    temperature: Annotated[float, Field(gt=0)]
    patch_only: bool = False


def _check_rising(values: list[float]) -> list[float]:
    if values != sorted(values):
        raise ValueError("they do not rise")
    return values


class _Calibration(_Part):
    kind: Literal["image", "patch", "tde"]
    method: Text
    slope: list[Coefficient]
    offset: list[Coefficient]


class _ImageCalibration(_Calibration):
    kind: Literal["image"]


class _TdeCalibration(_Calibration):
    kind: Literal["tde"]


class _Adaptive(_Part):
    calibration: _ImageCalibration
    again: _TdeCalibration | None = None
    cutoffs: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=2), AfterValidator(_check_rising)]


class Description(_Part):
    """The content of model.json."""

    schema_: Literal[1] = Field(alias="schema")
    pivotpatch: str
    kind: Kind
    architecture: _Architecture
    labels: list[Text]
    preprocessing: _Preprocessing
    thresholds: list[Annotated[float, Field(ge=0, le=1)]] | None
    calibration: _Calibration | None = None
    adaptive: _Adaptive | None = None
    patching: _Patching | None

    @model_validator(mode="after")
    def _fits_together(self) -> "Description":
        if (self.patching is not None) != (self.kind == "PatchClassifier"):
            raise ValueError(f"patching is {self.patching} for a {self.kind}")
        fitted: dict[str, Any] = {"thresholds": self.thresholds}
        stated = {"calibration": self.calibration}
        if self.adaptive is not None:
            stated |= {"adaptive.calibration": self.adaptive.calibration, "adaptive.again": self.adaptive.again}
        for name, part in stated.items():
            fitted |= {f"values of {name}.{each}": getattr(part, each, None) for each in ("slope", "offset")}
        for name, values in fitted.items():
            if values is not None and len(values) != len(self.labels):
                raise ValueError(f"{len(values)} {name} for {len(self.labels)} labels")
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
        _check_place(folder, overwrite=overwrite)
        with replacing_folder(folder) as scratch:
            if folder.exists():
                _keep_rest(folder, scratch)
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
        state = {key: _halve(key, value) if value.is_floating_point() else value for key, value in state.items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    # safetensors keeps its file to the owner; give it the rights that any new file gets.
    (folder / WEIGHTS).chmod((folder / DESCRIPTION).stat().st_mode)


def describe_model(model: nn.Module) -> dict[str, Any]:
    """The content of a model's model.json, checked as when it is loaded, which may be too late."""
    given: Any = _unwrap(model)
    kind = type(given).__name__
    if kind not in get_args(Kind):
        raise InputError("save_checkpoint", f"cannot save a {kind}", f"give a {' or '.join(get_args(Kind))}")
    content = {
        "schema": SCHEMA,
        "pivotpatch": __version__,
        "kind": kind,
        "architecture": asdict(given.architecture),
        "labels": list(given.labels),
        "preprocessing": asdict(given.preprocessing),
        "thresholds": None if given.thresholds is None else list(given.thresholds),
        "calibration": None if given.calibration is None else given.calibration.to_dict(),
        "adaptive": None if given.adaptive is None else given.adaptive.to_dict(),
        "patching": {name: getattr(given, name) for name in _Patching.model_fields}
        if kind == "PatchClassifier"
        else None,
    }
    try:
        plain: dict[str, Any] = json.loads(json.dumps(content, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError("save_checkpoint", f"the model cannot be described ({error})", _CORRECT) from None
    _validate(plain, "save_checkpoint", todo=_CORRECT)
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
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def _halve(key: str, value: Tensor) -> Tensor:
    small = value.half()
    if not small.isfinite().all():
        raise InputError("save_checkpoint", f"{key} has values too large for half precision", "keep full precision")
    return small


def read_description(folder: Path) -> Description:
    """The description of a checkpoint, complete and of a schema that this version reads."""
    path = folder / DESCRIPTION
    try:
        content = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        old = folder.with_name(folder.name + ".old") if folder.name else folder
        within = sorted(found.parent for found in folder.glob(f"*/{DESCRIPTION}"))
        todo = f"give {within[0]}, which is one" if within else "check the path"
        if not folder.exists() and old.is_dir():
            todo = f"an interrupted save left the last one in {old}, rename it"
        raise InputError(str(folder), f"is no checkpoint, {DESCRIPTION} is missing", todo) from None
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "check the path and its rights") from None
    except (ValueError, RecursionError) as error:
        reason = quote_fault(error)
        raise InputError(str(path), f"is no JSON ({reason})", "it is damaged, copy the checkpoint again") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        wrong = f"schema {schema} is newer than {SCHEMA}, the newest that pivotpatch {__version__} reads"
        raise InputError(str(path), wrong, "upgrade pivotpatch")
    return _validate(content, str(path), todo="save the checkpoint again")


def _validate(content: object, where: str, *, todo: str) -> Description:
    """A description that a model can be built from."""
    try:
        described = Description.model_validate(content)
    except ValidationError as error:
        fault = error.errors()[0]
    else:
        described.preprocessing.build().check(where)
        seen, cut = described.preprocessing.image_size, described.patching
        if cut is not None:
            sizes = {"source_size": cut.source_size, "patch_size": cut.patch_size}
            check_views(seen, grid=cut.grid, overlap=cut.overlap, **sizes, where=where)
        return described
    name = ".".join(map(str, fault["loc"])) or "content"
    value, reason = quote(fault["input"]), fault["msg"].removeprefix("Value error, ")
    wrong = f"lacks {name}" if fault["type"] == "missing" else f"{name} is {value} ({reason})"
    if not fault["loc"] and isinstance(content, dict):  # parts that do not fit together
        wrong = reason
    raise InputError(where, wrong, choose_one_of(value, get_args(Kind)) if name == "kind" else todo)


def _keep_rest(folder: Path, scratch: Path) -> None:
    """Copy what a checkpoint's folder holds besides the checkpoint."""
    own = (WEIGHTS, DESCRIPTION)
    shutil.copytree(
        folder, scratch, symlinks=True, dirs_exist_ok=True, ignore=lambda at, _: own if Path(at) == folder else ()
    )


def _check_place(folder: Path, *, overwrite: bool) -> None:
    """Refuse to replace what is there, unless it is a checkpoint and the caller wants that."""
    for place in (folder, folder.with_name(f"{folder.name}.old")):
        if place.exists() and not (place / DESCRIPTION).is_file() and not (place.is_dir() and not any(place.iterdir())):
            raise InputError(str(place), "exists and is no checkpoint", "choose another folder")
    if folder.exists() and not overwrite:
        raise InputError(str(folder), "exists already", "choose another folder or allow overwriting")
