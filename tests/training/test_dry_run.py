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


# Each data set, task, head and kind of backbone; tests/training/test_recipes.py builds the models of all recipes.
TRIED = (
    "coco-lite0-pat",
    "coco-resnet101-det",
    "coco-resnet101-int",
    "coco-resnet101-pat",
    "coco-tresnet_l-q2l-patch_only",
    "coco-tresnet_l_oi-mldec-pat",
    "vg256-resnet101-asl",
    "voc2007-tresnet_l-asl",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    write_all(root)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_recipes_pass_a_dry_run(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the smallest images that the model takes; of InT's eight models two, of Query2Label a narrow one."""
    monkeypatch.chdir(root)
    before = sorted(root.rglob("*"))
    changes = [*SMALL, "model.weights=", "model.image_size=32"]
    if name.startswith("vg256"):
        changes += [f"data.{part}=vg:data/vg256@{part}?min_images=1" for part in ("train", "test")]
    if name.endswith("-int"):
        changes += ["data.labels=['car', 'fork']"]
    if "-q2l-" in name:
        changes += ["model.head_options={width=256}"]
    tried = try_changes(*changes, recipe=find_recipe(name))
    train = 2 * PICTURES * 7 // 10 if name.startswith("vg256") else PICTURES
    assert tried.pictures + tried.val_pictures == train
    assert tried.val_pictures == round(train / 10)
    assert tried.steps == (12 if "lite0" in name else 80) * -(-tried.pictures // 2)
    labels = {"coco": 10, "voc2007": 20, "vg256": 10}[name.partition("-")[0]]
    assert tried.labels == {"int": 2, "det": 8}.get(name.rpartition("-")[2], labels)
    assert tried.weights > (3e6 if "lite0" in name else 4e7)
    assert sorted(root.rglob("*")) == before


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
    assert list(tried.choices) == ["data.hold", "precision.compile"]
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled) == (benchmark, True)
    without = try_changes(*SCENES, "data.val_fraction=0", "data.hold=nothing")
    assert (without.pictures, without.val_pictures, without.seconds_per_validation) == (43, 0, 0)
    assert without.held_bytes == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.test=scenes:@tset-same", "unknown split 'tset-same'; did you mean 'test-same'?"),
        ("data.labels=tow", "unknown label 'tow'; did you mean 'two'?"),
        ("output.trackers=tensorbord", "there is no 'tensorbord' here; install it, or leave it out; did you mean"),
        ("model.start_from=nowhere", "nowhere: is no checkpoint"),
        ("model.backbone=resnet11", "timm has no model 'resnet11'; did you mean 'resnet101'?"),
        ("task.source_size=16", "source_size is 16; give a side of 32 pixels"),
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
