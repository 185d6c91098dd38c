from pathlib import Path

import pytest
import torch
from published import PICTURES, write_all
from run_process import write_images

from pivotpatch.data.loading import EpochSampler
from pivotpatch.errors import InputError
from pivotpatch.training import find_recipe, load_config
from pivotpatch.training.dry_run import STARTING_SECONDS, DryRun, try_run
from pivotpatch.training.processes import make_accelerator

SMALL = ("model.pretrained=false", "train.batch_size=2", "evaluation.batch_size=2", "data.workers=0")
SCENES = ("data.train=scenes:@train?count=43&size=32", "model.backbone=test_resnet", "model.image_size=32", *SMALL)


def try_changes(*changes: str, recipe: Path | None = None) -> DryRun:
    config = load_config(recipe, changes)
    return try_run(config, make_accelerator(config))


# Each data set and task; tests/training/test_recipes.py builds the models of all recipes.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "labels"),
    [
        ("coco-lite0-pat", "model.head=linear", 10),
        ("coco-resnet101-int", "data.labels=['car', 'fork']", 2),
        ("vg256-resnet101-asl", "data.test=vg:data/vg256@test?min_images=1", 10),
        ("voc2007-tresnet_l-asl", "model.head=linear", 20),
        ("coco-tresnet_l-patch_only", "task.kind=patch_only", 10),
        ("coco-resnet101-regions", "model.image_size=224", 10),
        ("coco-resnet101-ml_gcn", "model.head=ml_gcn", 10),
        ("voc2007-resnet101-mcar", "task.kind=crops", 20),
    ],
)
def test_recipes_pass_a_dry_run(name: str, change: str, labels: int, here: Path) -> None:
    """On the smallest images that the model takes."""
    write_all(here)
    before = sorted(here.rglob("*"))
    changes = [*SMALL, "model.weights=", "model.image_size=32", change]
    if name.startswith("vg256"):
        changes += ["data.train=vg:data/vg256@train?min_images=1"]
    tried = try_changes(*changes, recipe=find_recipe(name))
    train = 2 * PICTURES * 7 // 10 if name.startswith("vg256") else PICTURES
    assert (tried.pictures, tried.val_pictures) == (train - round(train / 10), round(train / 10))
    assert tried.steps == load_config(find_recipe(name)).train.epochs * -(-tried.pictures // 2)
    assert tried.labels == labels
    assert sorted(here.rglob("*")) == before


def test_numbers_that_can_be_counted_are_exact_and_the_caller_keeps_its_settings() -> None:
    torch.manual_seed(7)
    state, benchmark = torch.get_rng_state(), torch.backends.cudnn.benchmark
    tried = try_changes(*SCENES, "data.val_fraction=0.25", "train.epochs=7", "train.batch_size=5", "evaluation.every=2")
    assert (tried.pictures, tried.val_pictures, tried.labels, tried.processes) == (32, 11, 10, 1)
    assert tried.steps == 7 * 7
    # Evaluations after epochs 2, 4, 6 and the last.
    work = tried.seconds_per_step * 49 + tried.seconds_per_validation * 4
    assert work < tried.seconds < work + 2 * STARTING_SECONDS  # the start of the program counts, too
    assert min(tried.seconds_per_step, tried.seconds_per_validation) > 0
    assert tried.weights * 16 < tried.memory_bytes < 2**40  # weights, gradients and two moments at least
    assert tried.held_bytes == 43 * 3 * 32**2
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled) == (benchmark, True)


def test_skipped_images_are_named_and_the_next_batch_is_taken(tmp_path: Path) -> None:
    """Of those to train on one batch can be read, of those to validate not the first ones; none is held."""
    order = list(EpochSampler(40, batch_size=2, shuffle=True, seed=1))
    broken = [place for batch in order[:4] + order[5:] for place in batch]
    train, val = write_images(tmp_path / "a", broken=broken), write_images(tmp_path / "b", broken=range(5))
    tables = (f"data.train={train}", f"data.val={val}")
    tried = try_changes(*SCENES, *tables, "data.on_error=skip")
    met = {place for batch in order[:4] for place in batch} | set(range(5))
    assert sorted(Path(name).name for name in tried.not_read) == sorted(f"{place:04d}.png" for place in met)
    assert (tried.pictures, tried.val_pictures) == (40, 40)
    assert min(tried.seconds_per_step, tried.seconds_per_validation) > 0
    with pytest.raises(InputError, match=r"\d+.png: is in none of"):
        try_changes(*SCENES, *tables)
    write_images(tmp_path / "b", broken=range(40))
    with pytest.raises(InputError, match="b/all.csv: none of the images could be read"):
        try_changes(*SCENES, *tables, "data.on_error=skip")
