"""The paper's recipes train as its published code does."""

import pytest

from pivotpatch.training.build import make_model
from pivotpatch.training.config import list_recipes, load_config

OURS = ("coco-lite0-asl", "coco-lite0-pat", "tagger", "coco-resnet101_224-bce")  # not of the paper's own code


@pytest.mark.parametrize(
    "recipe", [each for each in list_recipes() if each.name not in OURS], ids=lambda each: each.name
)
def test_a_recipe_says_what_the_published_code_does(recipe) -> None:  # type: ignore[no-untyped-def]
    config = load_config(recipe.path)
    assert (config.optimiser.name, config.optimiser.weight_decay, config.optimiser.decay_all) == ("adamw", 1e-4, True)
    assert (config.ema.decay, config.ema.warmup) == (0.9997, False)
    assert (config.augment.randaugment, config.augment.operations, config.augment.cutout) == ("published", 2, 0.5)
    assert config.model.normalise == (not config.model.backbone.startswith("resnet101"))


def test_without_normalisation_pixels_stay_between_0_and_1() -> None:
    changes = ["model.backbone=test_resnet", "model.pretrained=false", "model.image_size=32", "model.normalise=false"]
    model = make_model(load_config(None, changes), ("cat", "dog"))
    assert (model.preprocessing.mean, model.preprocessing.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
