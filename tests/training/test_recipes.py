import re
import tomllib
import zipfile
from pathlib import Path

import pytest
import timm
import torch

from pivotpatch.data.address import parse_address
from pivotpatch.data.prepare import PLANS
from pivotpatch.models.backbone import get_config
from pivotpatch.models.limits import PEERS
from pivotpatch.training.config import (
    EmaSection,
    OptimiserSection,
    Recipe,
    RunConfig,
    find_recipe,
    list_recipes,
    load_config,
)
from pivotpatch.training.model import make_model

ROOT = Path(__file__).parents[2]
EVERY_RECIPE = list_recipes()
RECIPES = [recipe for recipe in EVERY_RECIPE if recipe.name != "tagger"]  # which brings no images
OTHERS = (*PEERS, "mcar", "cpsd", "hcp", "splicemix")  # other systems, in settings of their own
METHODS = ("asl", "bce", "pat", "patch_only", "det", "int", "regions", "taught", *OTHERS)
NAME = re.compile(rf"(coco|voc2007|vg256)-([a-z0-9_]+)(?:-(q2l|mldec))?-({'|'.join(METHODS)})")
BACKBONES = {
    "resnet101": ("resnet101.tv_in1k", 448),
    "resnet101_224": ("resnet101.tv_in1k", 224),
    "resnet101_576": ("resnet101.tv_in1k", 576),
    "tresnet_l": ("tresnet_l.miil_in1k_448", 448),
    "tresnet_l_21k": ("tresnet_v2_l.miil_in21k", 448),
    "tresnet_l_oi": ("tresnet_v2_l", 448),
    "swin_l_21k": ("swin_large_patch4_window12_384.ms_in22k", 384),
    "cvt_w24_21k": ("cvt_w24", 384),
    "vgg16": ("vgg16.tv_in1k", 448),
    "lite0": ("tf_efficientnet_lite0.in1k", 224),
}
HEAD_NAMES = {None: "linear", "q2l": "query2label", "mldec": "ml_decoder"}
TASKS = {"pat": "patch", "patch_only": "patch_only", "int": "independent", "regions": "patch"} | {
    "taught": "patch",
    "mcar": "crops",
    "hcp": "windows",
}


def take_apart(name: str) -> tuple[str | None, ...]:
    parts = NAME.fullmatch(name)
    assert parts is not None, f"{name} is not dataset-backbone[-head]-method"
    return parts.groups()


def test_a_recipe_is_what_its_name_says_and_states_no_default() -> None:
    default = RunConfig().model_dump(mode="json")
    for recipe in RECIPES:
        data, backbone, head, method = take_apart(recipe.name)
        config = load_config(recipe.path)
        assert (config.model.backbone, config.model.image_size) == BACKBONES[str(backbone)], recipe.name
        expected = "max" if method == "splicemix" else method if method in PEERS else HEAD_NAMES[head]
        assert config.model.head == expected
        assert config.task.regions == (method in ("regions", "taught"))
        assert config.task.kind == TASKS.get(str(method), "image")
        if method not in OTHERS:
            assert config.loss.name == ("binary_cross_entropy" if method == "bce" else "asymmetric")
        assert config.model.head_options == ({"deep_regions": False} if method == "taught" else {})
        assert str(data) in str(config.data.train)
        assert (config.data.hold, config.precision.compile) == ("auto", "auto")
        stated = tomllib.loads(recipe.path.read_text("utf-8"))
        twice = [(part, key) for part, values in stated.items() for key in values if values[key] == default[part][key]]
        assert twice == [], recipe.name


def test_the_papers_recipes_train_as_its_published_code_does() -> None:
    for recipe in RECIPES:
        if recipe.name.startswith("coco-lite0") or recipe.name.endswith(("-bce", *OTHERS)):
            continue  # not of the paper's own code
        config = load_config(recipe.path)
        assert config.optimiser == OptimiserSection(weight_decay=1e-4, decay_all=True), recipe.name
        assert config.ema == EmaSection(decay=0.9997, warmup=False)
        assert (config.augment.randaugment, config.augment.operations, config.augment.cutout) == ("published", 2, 0.5)
        assert config.model.normalise == (not config.model.backbone.startswith("resnet101"))
        ours = recipe.name.endswith(("regions", "taught"))  # which the paper does not have
        assert config.model.first_logits == ("auto" if ours else "published")


def test_without_normalisation_pixels_stay_between_0_and_1() -> None:
    changes = ["model.backbone=test_resnet", "model.pretrained=false", "model.image_size=32", "model.normalise=false"]
    model = make_model(load_config(None, changes), ("cat", "dog"))
    assert (model.preprocessing.mean, model.preprocessing.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_a_recipe_reads_what_prepare_makes() -> None:
    """Its addresses are those that `pivotpatch data prepare NAME --root data/NAME` counts, or splits of them."""
    for recipe in RECIPES:
        data = str(take_apart(recipe.name)[0])
        prepared = [parse_address(address.format(root=f"data/{data}")) for address in PLANS[data].records]
        section = load_config(recipe.path).data
        train, test = map(parse_address, (str(section.train), *section.test))
        for address in (train, test):
            homes = [home for home in prepared if (home.scheme, home.location) == (address.scheme, address.location)]
            assert homes, address
            assert all(home.split is None for home in homes) or address.split in [home.split for home in homes]
        assert "train" in str(train.split)
        assert "train" not in str(test.split)


def test_a_recipe_never_starts_from_random_weights() -> None:
    """Either timm has the weights, or a file is named, which must be there when the model is built."""
    for recipe in RECIPES:
        model = load_config(recipe.path).model
        if model.pretrained:
            assert model.backbone in timm.list_pretrained(model.backbone)
            assert model.weights is None
        else:
            get_config(model.backbone)
            assert f"{model.weights} comes from" in recipe.path.read_text("utf-8")


def test_dependent_and_independent_training_differ_in_nothing_else() -> None:
    dependent, independent = (load_config(find_recipe(f"coco-resnet101-{way}")) for way in ("det", "int"))
    labels = dependent.data.labels
    assert labels is not None
    assert {"car", "parking meter"} <= set(labels)  # the pair that the paper names
    assert dependent == independent.model_copy(update={"task": dependent.task})


def test_a_baseline_differs_in_the_task_alone() -> None:
    for recipe in RECIPES:
        stem, _, method = recipe.name.rpartition("-")
        if method in ("pat", "patch_only"):
            baseline = load_config(find_recipe(f"{stem}-asl"))
            config = load_config(recipe.path)
            assert baseline == config.model_copy(update={"task": baseline.task}), recipe.name


@pytest.mark.slow
def test_the_wheel_holds_every_recipe_and_the_tagger(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="builds a wheel, which needs hatchling")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(built).namelist()
    held = {name for name in names if name.startswith("pivotpatch/recipes/")}
    tables = {f"pivotpatch/recipes/{recipe.name}.toml" for recipe in EVERY_RECIPE}
    assert held == {*tables, "pivotpatch/recipes/published.json"}
    assert "pivotpatch/tagger/model.safetensors" in names


def test_the_documentation_lists_every_recipe_with_its_figure() -> None:
    """Typed from the paper's tables: by what they have in common, then by their method, the head of a column."""
    text = (ROOT / "docs" / "training.md").read_text()
    table = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*\|$", text, re.M)]
    start = next(place for place, row in enumerate(table) if row[0] == "recipe")
    methods, told = table[start][1:4], dict[str, str]()
    for stem, *figures in table[start + 2 :]:
        if not NAME.fullmatch(f"{stem}-asl"):
            break
        told |= {f"{stem}{method}": figure for method, figure in zip(methods, figures, strict=False) if figure}
    expected = {recipe.name: "-" if recipe.published is None else f"{recipe.published:.1f}" for recipe in RECIPES}
    others = {"coco-resnet101_224-bce"} | {
        f"coco-resnet101-{name}" for name in ("det", "int", "regions", "mldec-taught")
    }
    peers = {name for name in expected if name.endswith(OTHERS)}
    assert told == {name: figure for name, figure in expected.items() if name not in others | peers}
    assert all(f"`{name}`" in text for name in (*others, "tagger"))
    listed = dict(re.findall(r"^\| `(\w+-\w+-\w+)` \| (\d+\.\d|-) ", (ROOT / "docs" / "peers.md").read_text(), re.M))
    assert listed == {name: expected[name] for name in peers}


# One recipe for each backbone, head and size: those that differ in weights, data or loss build the same model.
BUILT: dict[object, Recipe] = {}
for each in RECIPES:
    section = load_config(each.path).model
    BUILT[
        section.backbone.partition(".")[0], section.head, section.image_size, each.name.endswith(("-int", "-hcp"))
    ] = each


@pytest.mark.parametrize("recipe", BUILT.values(), ids=lambda recipe: recipe.name)
def test_recipes_build_their_models(recipe: Recipe) -> None:
    """As wide as they are, on images of their own size, without the memory that it would take."""
    config = load_config(recipe.path, ["model.pretrained=false", "model.weights="])
    with torch.device("meta"), torch.no_grad():
        model = make_model(config, ("cat", "cup", "dog")).eval()
        out = model(torch.empty(2, 3, model.picture_size, model.picture_size))
    logits = out if isinstance(out, torch.Tensor) else out.tde_logits
    assert logits.shape == (2, 3)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert millions > {"lite0": 3, "vgg16": 14}.get(recipe.name.split("-")[1], 40)
