"""What a training run is: one schema with defaults; the package's recipes and overrides are diffs from it."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from pivotpatch.errors import InputError, check_known, choose_one_of, cut, explaining, quote
from pivotpatch.models.limits import HEAD_NAMES, Grid, Side
from pivotpatch.runtime.values import Patching

_FOLDER = Path(__file__).parents[1] / "recipes"
# What the first two lines of a recipe say, as comments.
_COMMENTS = re.compile(r"# (?P<title>.+)\n# published mAP: (?P<published>none|\d+\.\d) \((?P<source>.+)\)\n")

_BOTH = {"train.epochs", "train.batch_size", "optimiser.lr"}

Positive = Annotated[int, Field(ge=1, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Part = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
if TYPE_CHECKING:
    HeadName = str
else:
    HeadName = Literal[HEAD_NAMES]


def _check_folds(count: int) -> int:
    if count == 1:  # its heads would learn from no image at all
        raise PydanticCustomError("folds", "Give 2 or more, or 0 for none")
    return count


def _list_names(value: Any) -> Any:
    each = (value,) if isinstance(value, str | int) else value
    if not isinstance(each, list | tuple):
        return each
    return tuple(str(name) if type(name) is int else name for name in each)  # labels may be numbers


# One name needs no list around it, so that an override is as easy to write as an address.
Names = Annotated[tuple[str, ...], BeforeValidator(_list_names)]


class Section(BaseModel):
    """A part of the schema: no unknown key, no change after it was made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class DataSection(Section):
    """Which images."""

    train: str | None = Field(None, description="address of the training images")
    val: str | None = Field(None, description="address of the validation images; else part of train is held out")
    val_fraction: Part = Field(0.1, description="part of train that is held out without val; 0 selects nothing")
    test: Names = Field((), description="addresses that the chosen model is evaluated on at the end")
    corrections: str | None = Field(None, description="address of corrected labels, which win (pivotpatch review)")
    labels: Names | None = Field(None, description="train for these labels only")
    workers: Count | None = Field(None, description="processes that decode; else a share of the cores, at most 12")
    hold: Literal["auto", "device", "memory", "nothing"] = Field("auto", description="where decoded images stay")
    on_error: Literal["error", "skip"] = Field("error", description="what an image that cannot be read does")


class ModelSection(Section):
    """Which model."""

    backbone: str = Field("resnet101.tv_in1k", description="a timm model, with the tag of its weights after a dot")
    head: HeadName = Field("linear", description="kind of head; docs/peers.md explains those of other systems")
    image_size: Side | None = Field(None, description="pixels per side of the model's input; None is its own")
    pretrained: bool = Field(True, description="fetch timm's weights for the backbone")
    weights: str | None = Field(
        None, description="local file instead: the backbone's weights, and the head's where they fit"
    )
    normalise: bool = Field(True, description="subtract timm's mean and divide by its deviation; else 0 and 1")
    start_from: str | None = Field(None, description="checkpoint folder, tagger or hub:owner/name to train further")
    frozen: Literal["auto", True, False] = Field(
        "auto", description="train the heads alone; auto: without a GPU, where start_from names a trained backbone"
    )
    backbone_options: dict[str, bool | int | float | str] = Field({}, description="further arguments of timm's")
    head_options: dict[str, bool | int | float] = Field({}, description="arguments of the head")
    first_logits: Literal["auto", "small", "published"] = Field(
        "auto", description="of a new head: small or as published; auto: small where the backbone has learned something"
    )
    vectors: str | None = Field(None, description="text file of word vectors for heads that use them; else random ones")


class FrozenSection(Section):
    """How the heads are trained where the backbone is frozen; what is said of them in train and optimiser is not."""

    epochs: Positive = Field(30, description="in the place of train.epochs")
    batch_size: Positive = Field(64, description="in the place of train.batch_size")
    lr: PositiveFloat = Field(2e-3, description="in the place of optimiser.lr")
    ordinary: Share = Field(
        0.3, description="images without any label that heads see for each one; ordinary ones of the tagger's fill up"
    )
    folds: Annotated[Count, AfterValidator(_check_folds)] = Field(
        5, description="parts, of ten images or more, that heads trained on the others are judged on; 0 for none"
    )


class TaskSection(Section):
    """What is trained."""

    kind: Literal["image", "patch", "patch_only", "independent", "crops", "windows"] = Field(
        "patch",
        description="image: baseline; patch: PAT-T; patch_only: scale; independent: InT; crops: MCAR; windows: HCP",
    )
    grid: Grid = Field(2, description="patches per side")
    overlap: Part = Field(0.0, description="part of a patch that its neighbour shares")
    lam: NonNegativeFloat = Field(1.0, description="weight of the patches in the total direct effect")
    temperature: PositiveFloat = Field(1.0, description="of the patch weights")
    source_size: Side | None = Field(None, description="pixels per side to cut native patches from; else the input's")
    patch_size: Side | None = Field(None, description="pixels per side at which the model sees a patch")
    regions: bool = Field(
        False, description="patch: cut patches from the feature map, which takes one pass over the image"
    )
    closer_size: Side | None = Field(None, description="patch: pixels per side of a closer look, for efforts below 1")

    @property
    def patching(self) -> Patching:
        """How patches are cut and mixed, as `PatchClassifier` takes it."""
        return Patching(**self.model_dump(exclude={"kind", "regions"}))


class MixSection(Section):
    """What is added to each batch, for task.kind=image: SpliceMix's grids of shrunken images."""

    share: Share = Field(0.0, description="grids for each image of a batch; SpliceMix: 0.25")
    consistent: bool = Field(False, description="draw what is said of a cell to what is said of the whole image")


class DistilSection(Section):
    """Whom a model learns from beside the labels: for task.kind=image, and for task.regions from one PAT-T."""

    teachers: Names = Field((), description="checkpoints; each teaches the labels that it knows")
    groups: Count = Field(0, description="CPSD: train twice so many teachers first, each for a group of labels")
    share: Share = Field(0.5, description="of the loss that is the difference from teachers")


class LossSection(Section):
    """What a mistake costs."""

    name: Literal["asymmetric", "binary_cross_entropy", "squared_hinge"] = Field("asymmetric", description="its kind")
    gamma_neg: NonNegativeFloat = Field(4.0, description="asymmetric: focusing power for negatives")
    gamma_pos: NonNegativeFloat = Field(0.0, description="asymmetric: focusing power for positives")
    clip: Part = Field(0.05, description="asymmetric: negatives below it cost nothing")
    detach_focus: bool = Field(True, description="asymmetric: constant focusing factors, as in its authors' training")
    reduction: Literal["sum", "mean"] = Field("sum", description="over images and labels")


class OptimiserSection(Section):
    """How weights move."""

    name: Literal["adamw", "adam", "sgd"] = Field("adamw", description="kind of optimiser")
    lr: PositiveFloat = Field(1e-4, description="peak learning rate")
    backbone_share: PositiveFloat = Field(1.0, description="of that rate, for the backbone; above 1 the head is slower")
    weight_decay: NonNegativeFloat = Field(1e-4, description="decay, on weights only")
    decay_all: bool = Field(False, description="decay norms and biases too")
    clip_norm: PositiveFloat | None = Field(None, description="largest norm of the gradient")


class ScheduleSection(Section):
    """How the learning rate moves at every step."""

    name: Literal["one_cycle", "steps"] = Field("one_cycle", description="one_cycle: up and down; steps: falls at some")
    warmup: Share = Field(0.2, description="part of the run in which the rate rises")
    falls: tuple[Share, ...] = Field((), description="steps: parts of the run after which the rate falls to a tenth")


class EmaSection(Section):
    """The averaged weights that are evaluated and kept."""

    decay: Part = Field(0.9997, description="0 keeps no average")
    warmup: bool = Field(True, description="a short memory at first: decay 1 - (1 + step)^(-2/3) where that is less")


class AugmentSection(Section):
    """What happens to each view, each on its own."""

    flip: Share = Field(0.0, description="probability of a horizontal flip")
    crop: float = Field(1.0, gt=0, le=1, description="smallest side of a random crop, as a part of the view's")
    cutout: Share = Field(0.5, description="side of the covered box, as a part of the view's side")
    operations: int = Field(2, ge=0, description="operations of RandAugment")
    randaugment: Literal["torchvision", "published"] = Field("torchvision", description="whose operations")
    magnitude: float = Field(9.0, ge=0, le=30, description="strength of torchvision's")


class PrecisionSection(Section):
    """How numbers are held."""

    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="autocast; auto: bfloat16 on a GPU")
    channels_last: bool = Field(True, description="memory order of images and weights")
    compile: Literal["auto", True, False] = Field("auto", description="torch.compile; auto: on a GPU, where it pays")


class TrainSection(Section):
    """How long and how much at once."""

    epochs: Positive = Field(80, description="passes over the training images")
    batch_size: Positive = Field(128, description="images per step, over all processes")
    accumulate: Positive = Field(1, description="parts that each process computes its share of a batch in")
    seed: int = Field(1, ge=0, lt=2**63, strict=True, description="of weights, order and augmentation")


class EvaluationSection(Section):
    """When and how the validation images are scored."""

    every: Positive = Field(1, description="epochs between evaluations")
    batch_size: Positive = Field(128, description="images at once, over all processes")
    definition: Literal["step", "envelope"] = Field("step", description="of average precision")
    patience: Positive | None = Field(None, description="evaluations without a gain before the run stops early")


class OutputSection(Section):
    """What is written."""

    save_every: Positive = Field(500, description="steps between saves of last/, besides one after each epoch")
    log_every: Positive = Field(10, description="steps between entries of the log, besides one after each epoch")
    trackers: Names = Field(("tensorboard",), description="Accelerate's trackers by name")


class RunConfig(Section):
    """Everything that decides a run."""

    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    mix: MixSection = MixSection()
    distil: DistilSection = DistilSection()
    loss: LossSection = LossSection()
    optimiser: OptimiserSection = OptimiserSection()
    schedule: ScheduleSection = ScheduleSection()
    ema: EmaSection = EmaSection()
    augment: AugmentSection = AugmentSection()
    precision: PrecisionSection = PrecisionSection()
    train: TrainSection = TrainSection()
    evaluation: EvaluationSection = EvaluationSection()
    output: OutputSection = OutputSection()
    frozen: FrozenSection = FrozenSection()


def load_config(recipe: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The defaults, changed by a recipe and then by overrides.

    Args:
        recipe: a TOML file that states what differs from the defaults.
        overrides: `section.key=value`, the value as TOML writes it; what is no TOML is taken as text, and
            nothing as the default, which takes back what the recipe says.
    """
    values = {} if recipe is None else _read_recipe(recipe)
    config = _validate(values, where=str(recipe))
    for override in overrides:
        section, key, value = _parse_override(override)
        key, _, option = key.partition(".")
        if option:  # of a key that holds several, as in model.head_options.lam; a table of the recipe keeps its others
            held = values.get(section, {}).get(key)
            value = {**held, option: value} if isinstance(held, dict) else {option: value}
        stated = values.setdefault(section, {})
        stated[key] = value
        if value is None and not _may_be_none(getattr(config, section, None), key):
            del stated[key]
        elif f"{section}.{key}" in _BOTH:  # a recipe's number is for training everything, a user's for what is trained
            values.setdefault("frozen", {})[key] = value
        config = _validate(values, where=cut(override))
    return config


def _may_be_none(section: object, key: str) -> bool:
    """Whether a key may have no value; true of one that there is not, too, which is refused later."""
    fields = type(section).model_fields if isinstance(section, Section) else {}
    return key not in fields or type(None) in get_args(fields[key].annotation)


def settle_config(config: RunConfig, *, frozen: bool) -> RunConfig:
    """The configuration that a run has in the end, once it is known whether its backbone is frozen."""
    update: dict[str, Section] = {"model": config.model.model_copy(update={"frozen": frozen})}
    if frozen:
        said, ema = config.frozen, config.ema.model_copy(update={"decay": 0.0})  # the rate's end averages enough
        once = {"epochs": said.epochs, "batch_size": said.batch_size, "accumulate": 1}
        update |= {"train": config.train.model_copy(update=once), "ema": ema}
        update["optimiser"] = config.optimiser.model_copy(update={"lr": said.lr})
    return config.model_copy(update=update)


def dump_config(config: RunConfig, *, explained: bool = False) -> str:
    """A configuration as TOML; `explained`, each key with what it means, and those that have no value."""
    lines = []
    for section, values in config.model_dump(mode="json").items():
        fields = type(getattr(config, section)).model_fields
        lines.append(f"[{section}]")
        for key, value in values.items():
            if isinstance(value, dict):
                stated = [f"{key}.{_to_toml(name)} = {_to_toml(each)}" for name, each in value.items()]
            else:
                stated = [] if value is None else [f"{key} = {_to_toml(value)}"]
            if explained:
                first, *rest = stated or [f"# {key} ="]
                stated = [f"{first:<40}  # {fields[key].description}", *rest]
            lines += stated
        lines.append("")
    return "\n".join(lines)


@dataclass(frozen=True)
class Recipe:
    """A recipe of the package: what it trains in one line, and the mAP in per cent that a table was published with."""

    name: str
    path: Path
    title: str
    published: float | None
    source: str  # the table and row of the figure, or why there is none


def list_recipes() -> list[Recipe]:
    """All recipes of the package, by name."""
    recipes = []
    for path in sorted(_FOLDER.glob("*.toml")):
        said = _COMMENTS.match(path.read_text("utf-8"))
        assert said is not None, path
        published = None if said["published"] == "none" else float(said["published"])
        recipes.append(Recipe(path.stem, path, said["title"], published, said["source"]))
    return recipes


def find_recipe(name: str) -> Path:
    """The file of a recipe: of the package by name, or the path of a `.toml` file, which need not exist."""
    if name.endswith(".toml"):
        return Path(name)
    known = {path.stem: path for path in _FOLDER.glob("*.toml")}
    check_known(name, known, where="recipes", what="recipe")
    return known[name]


def _read_recipe(path: Path) -> dict[str, dict[str, object]]:
    if not path.exists():
        raise InputError(str(path), "there is no such recipe", "see pivotpatch recipes, or give a TOML file")
    with explaining(str(path), "is not valid TOML", "correct it there"):
        return tomllib.loads(path.read_text("utf-8"))


def _parse_override(text: str) -> tuple[str, str, object]:
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot:
        raise InputError(f"override {quote(text)}", "is not like section.key=value", "write for example train.epochs=3")
    if not value.strip():
        return section, key, None
    try:
        return section, key, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return section, key, value


def _validate(values: Mapping[str, object], *, where: str) -> RunConfig:
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
    place = [str(part) for part in fault["loc"]]
    name = ".".join(place)
    if fault["type"] == "extra_forbidden":
        known = RunConfig.model_fields
        if len(place) > 1:
            known = known[place[0]].annotation.model_fields  # type: ignore[union-attr]
        raise InputError(where, f"unknown key {quote(name)}", choose_one_of(place[-1], known))
    value = fault["input"]
    if fault["type"] == "literal_error":
        choices = set(re.findall(r"\w+", fault["ctx"]["expected"].lower())) - {"or"}
        raise InputError(where, f"{name} is {quote(value)}", choose_one_of(str(value), choices))
    raise InputError(where, f"{name} is {quote(value)}", fault["msg"][0].lower() + fault["msg"][1:])


def _to_toml(value: object) -> str:
    """JSON, which TOML reads the same: strings escape alike, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
