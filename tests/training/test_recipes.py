import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import timm
import torch

from pivotpatch.core.errors import InputError
from pivotpatch.data.address import parse_address
from pivotpatch.data.prepare import PLANS
from pivotpatch.models.heads import HEADS
from pivotpatch.training.build import make_model
from pivotpatch.training.config import RunConfig, load_config
from pivotpatch.training.recipes import Recipe, find_recipe, list_recipes

ROOT = Path(__file__).parents[2]
EVERY_RECIPE = list_recipes()
RECIPES = [recipe for recipe in EVERY_RECIPE if recipe.name != "tagger"]  # which brings no pictures
NAME = re.compile(
    r"(?P<data>coco|voc2007|vg256)"
    r"-(?P<backbone>resnet101|resnet101_224|tresnet_l|tresnet_l_21k|tresnet_l_oi|swin_l_21k|lite0)"
    r"(-(?P<head>q2l|mldec))?"
    r"-(?P<method>asl|bce|pat|patch_only|det|int)"
)
BACKBONES = {
    "resnet101": ("resnet101.tv_in1k", 448),
    "resnet101_224": ("resnet101.tv_in1k", 224),
    "tresnet_l": ("tresnet_l.miil_in1k_448", 448),
    "tresnet_l_21k": ("tresnet_v2_l.miil_in21k", 448),
    "tresnet_l_oi": ("tresnet_v2_l", 448),
    "swin_l_21k": ("swin_large_patch4_window12_384.ms_in22k", 384),
    "lite0": ("tf_efficientnet_lite0.in1k", 224),
}
HEAD_NAMES = {None: "linear", "q2l": "query2label", "mldec": "ml_decoder"}
TASKS = {
    "asl": ("image", "asymmetric"),
    "bce": ("image", "binary_cross_entropy"),
    "pat": ("patch", "asymmetric"),
    "patch_only": ("patch_only", "asymmetric"),
    "det": ("image", "asymmetric"),
    "int": ("independent", "asymmetric"),
}

# mAP of the paper, table by table: data, backbone, head, method. Typed from the tables, not from the recipes.
PAPER = {
    "table 1": {
        ("coco", "resnet101_224", None, "bce"): 78.3,
        ("coco", "resnet101", None, "pat"): 85.0,
        ("coco", "tresnet_l", None, "asl"): 86.6,
        ("coco", "tresnet_l_21k", None, "asl"): 88.4,
        ("coco", "tresnet_l", None, "pat"): 88.7,
        ("coco", "tresnet_l_21k", None, "pat"): 90.6,
        ("coco", "tresnet_l", "q2l", "asl"): 87.3,
        ("coco", "tresnet_l_21k", "q2l", "asl"): 89.2,
        ("coco", "tresnet_l", "q2l", "pat"): 89.5,
        ("coco", "tresnet_l_21k", "q2l", "pat"): 91.0,
        ("coco", "tresnet_l_oi", "mldec", "asl"): 90.0,
        ("coco", "tresnet_l_oi", "q2l", "asl"): 90.1,
        ("coco", "swin_l_21k", "q2l", "asl"): 90.5,
        ("coco", "tresnet_l_oi", "mldec", "pat"): 91.4,
        ("coco", "tresnet_l_oi", "q2l", "pat"): 91.7,
    },
    "table 2": {
        ("voc2007", "tresnet_l", None, "asl"): 95.8,
        ("voc2007", "tresnet_l", "q2l", "asl"): 96.1,
        ("voc2007", "tresnet_l", None, "pat"): 96.2,
    },
    "table 3": {
        ("vg256", "resnet101", None, "asl"): 47.7,
        ("vg256", "resnet101", None, "pat"): 49.9,
        ("vg256", "tresnet_l_21k", None, "asl"): 53.9,
        ("vg256", "tresnet_l_21k", None, "pat"): 56.2,
        ("vg256", "tresnet_l_oi", "q2l", "asl"): 57.7,
        ("vg256", "tresnet_l_oi", "q2l", "pat"): 59.5,
    },
    "table 4": {
        ("coco", "tresnet_l", None, "patch_only"): 87.1,
        ("coco", "tresnet_l_21k", None, "patch_only"): 88.8,
        ("coco", "tresnet_l_oi", None, "patch_only"): 89.5,
        ("coco", "tresnet_l", "q2l", "patch_only"): 87.9,
        ("coco", "tresnet_l_21k", "q2l", "patch_only"): 89.1,
        ("coco", "tresnet_l_oi", "q2l", "patch_only"): 90.1,
        ("coco", "tresnet_l_oi", None, "pat"): 90.8,
    },
    "table 5": {
        ("voc2007", "tresnet_l_21k", None, "asl"): 96.6,
        ("voc2007", "tresnet_l_21k", "q2l", "asl"): 96.7,
        ("voc2007", "tresnet_l_21k", None, "pat"): 96.9,
    },
}
# Without a figure: the baseline beside a row of PAT-T, the two of the first figure, and the small network of our own.
UNPUBLISHED = {
    ("coco", "lite0", None, "asl"),
    ("coco", "lite0", None, "pat"),
    ("coco", "resnet101", None, "asl"),
    ("coco", "tresnet_l_oi", None, "asl"),
    ("coco", "resnet101", None, "det"),
    ("coco", "resnet101", None, "int"),
}


def take_apart(name: str) -> tuple[str | None, ...]:
    parts = NAME.fullmatch(name)
    assert parts is not None, f"{name} is not dataset-backbone[-head]-method"
    return parts["data"], parts["backbone"], parts["head"], parts["method"]


each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def test_every_row_has_one_recipe_with_its_figure() -> None:
    held = {take_apart(recipe.name): recipe for recipe in RECIPES}
    published = {row: (table, figure) for table, rows in PAPER.items() for row, figure in rows.items()}
    assert {row for row, recipe in held.items() if recipe.published is None} == UNPUBLISHED
    assert set(held) == set(published) | UNPUBLISHED
    for row, (table, figure) in published.items():
        assert held[row].published == figure, row
        assert held[row].source.startswith(f'{table}, row "'), row


@each_recipe
def test_a_recipe_is_what_its_name_says(recipe: Recipe) -> None:
    data, backbone, head, method = take_apart(recipe.name)
    config = load_config(recipe.path)
    assert (config.model.backbone, config.model.image_size) == BACKBONES[str(backbone)]
    assert config.model.head == HEAD_NAMES[head]
    assert (config.task.kind, config.loss.name) == TASKS[str(method)]
    assert str(data) in str(config.data.train)


@each_recipe
def test_a_recipe_states_nothing_that_is_the_default(recipe: Recipe) -> None:
    default = RunConfig().model_dump(mode="json")
    stated = tomllib.loads(recipe.path.read_text("utf-8"))
    said_twice = [(part, key) for part, values in stated.items() for key in values if values[key] == default[part][key]]
    assert said_twice == []


@each_recipe
def test_a_recipe_reads_what_prepare_makes(recipe: Recipe) -> None:
    """Its addresses are those that `pivotpatch data prepare NAME --root data/NAME` counts, or splits of them."""
    data = str(take_apart(recipe.name)[0])
    prepared = [parse_address(address.format(root=f"data/{data}")) for address in PLANS[data].records]
    config = load_config(recipe.path)
    assert config.data.train is not None
    addresses = [config.data.train, *config.data.test]
    assert len(set(addresses)) == 2
    for address in map(parse_address, addresses):
        homes = [home for home in prepared if (home.scheme, home.location) == (address.scheme, address.location)]
        assert homes, address
        assert all(home.split is None for home in homes) or address.split in [home.split for home in homes]
    assert "train" in str(parse_address(addresses[0]).split)
    assert "train" not in str(parse_address(addresses[1]).split)


@each_recipe
def test_a_recipe_never_starts_from_random_weights(recipe: Recipe) -> None:
    """Either timm has the weights, or a file is named, which must be there when the network is built."""
    model = load_config(recipe.path).model
    if model.pretrained:
        assert model.backbone in timm.list_pretrained(model.backbone)
        assert model.weights is None
    else:
        assert timm.is_model(model.backbone)
        assert model.weights is not None
        assert f"{model.weights} comes from" in recipe.path.read_text("utf-8")


def test_query2label_is_as_wide_as_the_features_that_it_reads() -> None:
    """As its authors have it; the head's own default is that of 2,048 features."""
    widths = {}
    for recipe in RECIPES:
        model = load_config(recipe.path).model
        if model.head == "query2label":
            widths[model.backbone] = model.head_options.get("width", 2048)
        else:
            assert model.head_options == {}
    with torch.device("meta"):
        features = {backbone: timm.create_model(backbone, num_classes=0).num_features for backbone in widths}
    assert set(features.values()) == {1536, 2048, 2432}
    assert widths == features


def test_heads_are_heads_of_the_models_layer() -> None:
    assert set(HEAD_NAMES.values()) == set(HEADS) - {"max"}  # a baseline, in none of the paper's tables


def test_dependent_and_independent_training_differ_in_nothing_else() -> None:
    dependent, independent = (load_config(find_recipe(f"coco-resnet101-{way}")) for way in ("det", "int"))
    labels = dependent.data.labels
    assert labels is not None
    assert {"car", "parking meter"} <= set(labels)  # the pair that the paper names
    assert dependent == independent.model_copy(update={"task": dependent.task})


@pytest.mark.parametrize("method", ["pat", "patch_only"])
def test_a_baseline_differs_in_the_task_alone(method: str) -> None:
    for recipe in RECIPES:
        if recipe.name.endswith(f"-{method}"):
            baseline = load_config(find_recipe(recipe.name.removesuffix(method) + "asl"))
            config = load_config(recipe.path)
            assert baseline == config.model_copy(update={"task": baseline.task}), recipe.name


def test_a_recipe_is_found_by_name_or_path(tmp_path: Path) -> None:
    assert [find_recipe(recipe.name) for recipe in RECIPES] == [recipe.path for recipe in RECIPES]
    assert find_recipe(str(tmp_path / "mine.toml")) == tmp_path / "mine.toml"
    with pytest.raises(InputError, match="recipe 'coco-resnet101-pta': .*; did you mean 'coco-resnet101-pat'"):
        find_recipe("coco-resnet101-pta")
    with pytest.raises(InputError, match="recipe '': there is none of that name; known: coco-"):
        find_recipe("")


def test_listing_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from pivotpatch.training.config import load_config; from pivotpatch.training.recipes import *\n"
        "print(len([load_config(recipe.path) for recipe in list_recipes()]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(EVERY_RECIPE)), "False"]


def test_the_wheel_holds_every_recipe_and_the_tagger(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="builds a wheel, which needs hatchling")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(built).namelist()
    held = {name for name in names if name.startswith("pivotpatch/recipes/")}
    assert held == {f"pivotpatch/recipes/{recipe.name}.toml" for recipe in EVERY_RECIPE}
    assert "pivotpatch/tagger/model.safetensors" in names


def test_the_documentation_lists_every_recipe_with_its_figure() -> None:
    rows = re.findall(r"^\| `([a-z0-9_-]+)` \|.*\| ([\d.]+|-) \|", (ROOT / "docs" / "recipes.md").read_text(), re.M)
    figures = {recipe.name: "-" if recipe.published is None else f"{recipe.published:.1f}" for recipe in EVERY_RECIPE}
    assert dict(rows) == figures
    assert len(rows) == len(figures)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_builds_its_network(recipe: Recipe) -> None:
    """As wide as it is, on images of its own size, without the memory that it would take."""
    config = load_config(recipe.path, ["model.pretrained=false", "model.weights="])
    with torch.device("meta"), torch.no_grad():
        model = make_model(config, ("cat", "cup", "dog")).eval()
        out = model(torch.empty(2, 3, model.picture_size, model.picture_size))
    logits = out if isinstance(out, torch.Tensor) else out.tde_logits
    assert logits.shape == (2, 3)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert millions > (3 if "lite0" in recipe.name else 40)
    if recipe.name.endswith("-q2l-pat"):
        baseline = load_config(find_recipe(f"{recipe.name.rpartition('-')[0]}-asl"))
        assert config.model.head_options == baseline.model.head_options
