from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from PIL import Image
from published import PICTURES, write_all

from pivotpatch.data.loading import EpochSampler
from pivotpatch.errors import InputError
from pivotpatch.training import find_recipe, load_config
from pivotpatch.training.dry_run import DryRun, try_run
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
    ],
)
def test_recipes_pass_a_dry_run(
    name: str, change: str, labels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the smallest images that the model takes."""
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    changes = [*SMALL, "model.weights=", "model.image_size=32", change]
    if name.startswith("vg256"):
        changes += ["data.train=vg:data/vg256@train?min_images=1"]
    tried = try_changes(*changes, recipe=find_recipe(name))
    train = 2 * PICTURES * 7 // 10 if name.startswith("vg256") else PICTURES
    assert (tried.pictures, tried.val_pictures) == (train - round(train / 10), round(train / 10))
    assert tried.steps == (12 if "lite0" in name else 80) * -(-tried.pictures // 2)
    assert tried.labels == labels
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_the_tagger_trains_on_anybodys_images() -> None:
    scenes = ("data.train=scenes:@train?count=20&size=64", "train.batch_size=2", "data.workers=0")
    tried = try_changes(*scenes, recipe=find_recipe("tagger"))
    assert (tried.pictures, tried.val_pictures, tried.labels) == (18, 2, 10)


def test_numbers_that_can_be_counted_are_exact_and_the_caller_keeps_its_settings() -> None:
    torch.manual_seed(7)
    state, benchmark = torch.get_rng_state(), torch.backends.cudnn.benchmark
    tried = try_changes(*SCENES, "data.val_fraction=0.25", "train.epochs=7", "train.batch_size=5", "evaluation.every=2")
    assert (tried.pictures, tried.val_pictures, tried.labels, tried.processes) == (32, 11, 10, 1)
    assert tried.steps == 7 * 7
    # Evaluations after epochs 2, 4, 6 and the last.
    assert tried.seconds == pytest.approx(tried.seconds_per_step * 49 + tried.seconds_per_validation * 4)
    assert min(tried.seconds_per_step, tried.seconds_per_validation) > 0
    assert tried.weights * 16 < tried.memory_bytes < 2**40  # weights, gradients and two moments at least
    assert tried.held_bytes == 43 * 3 * 32**2
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled) == (benchmark, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.test=scenes:@tset-same", "unknown split 'tset-same'; did you mean 'test-same'?"),
        ("data.labels=tow", "unknown label 'tow'; did you mean 'two'?"),
        ("output.trackers=tensorbord", "there is no 'tensorbord' here"),
        ("model.start_from=nowhere", "nowhere: is neither a bundled model nor a folder"),
    ],
)
def test_what_would_stop_a_run_stops_its_trial(change: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        try_changes(*SCENES, change)
    assert message in str(caught.value)


def write_table(name: str, *, broken: Iterable[int] = ()) -> str:
    """Twelve images as a table, some of which cannot be read."""
    rows = ["image,labels"]
    for place in range(12):
        Image.new("RGB", (32, 32), (20 * place, 99, 0)).save(f"{name}{place}.png")
        rows.append(f"{name}{place}.png,{'cat' if place % 3 else 'dog'}")
    for place in broken:
        Path(f"{name}{place}.png").write_bytes(b"no image")
    Path(f"{name}.csv").write_text("\n".join(rows))
    return f"table:{name}.csv"


def try_tables(train: str, val: str, *, on_error: str = "skip") -> DryRun:
    return try_changes(f"data.train={train}", f"data.val={val}", f"data.on_error={on_error}", *SCENES[1:])


def test_skipped_images_are_named_and_the_next_batch_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but a batch of those to train on, and the first batches to validate; none is decoded to be held."""
    monkeypatch.chdir(tmp_path)
    order = list(EpochSampler(12, batch_size=2, shuffle=True, seed=1))
    broken = [place for batch in order[:4] + order[5:] for place in batch]
    tried = try_tables(write_table("a", broken=broken), write_table("b", broken=range(5)))
    met = [f"a{place}.png" for batch in order[:4] for place in batch] + [f"b{place}.png" for place in range(5)]
    assert sorted(tried.not_read) == sorted(met)
    assert (tried.pictures, tried.val_pictures) == (12, 12)
    assert min(tried.seconds_per_step, tried.seconds_per_validation) > 0
    with pytest.raises(InputError, match=r"a\d+.png: is in none of"):
        try_tables("table:a.csv", "table:b.csv", on_error="error")
    with pytest.raises(InputError, match="table:b.csv: none of the images could be read; see pivotpatch data check"):
        try_tables(write_table("a"), write_table("b", broken=range(12)))
