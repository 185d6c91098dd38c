from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from PIL import Image
from published import PICTURES, write_all

from pivotpatch.data.loading import EpochSampler
from pivotpatch.errors import InputError
from pivotpatch.training.config import load_config
from pivotpatch.training.dry_run import DryRun, try_run
from pivotpatch.training.processes import make_accelerator
from pivotpatch.training.recipes import find_recipe

SMALL = ("model.pretrained=false", "train.batch_size=2", "evaluation.batch_size=2", "data.workers=0")
SCENES = ("data.train=scenes:@train?count=43&size=32", "model.backbone=test_resnet", "model.image_size=32", *SMALL)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    write_all(root)
    return root


def list_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


def try_changes(*changes: str, recipe: Path | None = None) -> DryRun:
    config = load_config(recipe, changes)
    return try_run(config, make_accelerator(config))


# Each data set, task, head and kind of backbone; tests/training/test_recipes.py builds the networks of all recipes.
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


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_recipes_pass_a_dry_run(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the smallest images that the network takes; of InT's eight networks two, of Query2Label a narrow one."""
    monkeypatch.chdir(root)
    before = list_files(root)
    changes = [*SMALL, "model.weights=", "model.image_size=32"]
    if name.startswith("vg256"):
        changes += [
            f"data.{part}=vg:data/vg256@{split}?min_images=1" for part, split in (("train", "train"), ("test", "test"))
        ]
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
    assert list_files(root) == before


def test_the_tagger_trains_on_anybodys_pictures() -> None:
    scenes = ("data.train=scenes:@train?count=20&size=64", "train.batch_size=2", "data.workers=0")
    tried = try_changes(*scenes, recipe=find_recipe("tagger"))
    assert (tried.pictures, tried.val_pictures, tried.labels) == (18, 2, 10)


def test_numbers_that_can_be_counted_are_exact() -> None:
    tried = try_changes(*SCENES, "data.val_fraction=0.25", "train.epochs=7", "train.batch_size=5", "evaluation.every=2")
    assert (tried.pictures, tried.val_pictures, tried.labels) == (32, 11, 10)
    assert tried.steps == 7 * 7
    assert tried.processes == 1
    assert tried.device.startswith("cpu") or torch.accelerator.is_available()
    # Evaluations after epochs 2, 4, 6 and the last.
    assert tried.seconds == pytest.approx(tried.seconds_per_step * 49 + tried.seconds_per_validation * 4)
    assert min(tried.seconds_per_step, tried.seconds_per_validation) > 0
    assert tried.weights * 16 < tried.memory_bytes < 2**40  # weights, gradients and two moments at least
    assert tried.held_bytes == 0


def use_coco(root: Path) -> tuple[str, ...]:
    pictures = f"data.train=coco:{root}/data/coco@train2014"
    return (pictures, "model.backbone=test_resnet", "model.image_size=32", *SMALL)


def test_pictures_to_be_held_are_counted_but_not_decoded(tmp_path: Path) -> None:
    write_all(tmp_path)
    changes = (*use_coco(tmp_path), "task.source_size=48", "data.hold=memory")
    assert try_changes(*changes).held_bytes == PICTURES * 48 * 48 * 3
    *_, last = sorted((tmp_path / "data/coco/train2014").iterdir())
    last.write_bytes(b"no picture")
    try_changes(*changes, "data.on_error=skip", "train.seed=3")


def test_without_validation_none_is_counted() -> None:
    tried = try_changes(*SCENES, "data.val_fraction=0")
    assert (tried.pictures, tried.val_pictures, tried.seconds_per_validation) == (43, 0, 0)
    assert tried.seconds == pytest.approx(tried.seconds_per_step * tried.steps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.test=scenes:@tset-same", "unknown split 'tset-same'; did you mean 'test-same'?"),
        ("data.val=scenes:@vla", "unknown split 'vla'; did you mean 'val'?"),
        ("data.labels=tow", "unknown label 'tow'; did you mean 'two'?"),
        ("output.trackers=tensorbord", "unknown tracker 'tensorbord'; did you mean 'tensorboard'?"),
        ("model.start_from=nowhere", "nowhere: is no checkpoint"),
        ("model.backbone=resnet11", "timm has no model 'resnet11'; did you mean 'resnet101'?"),
        ("task.patch_size=64", "patch_size is 64; give a side of at most 32 pixels"),
        ("task.source_size=16", "source_size is 16; give a side of 32 pixels"),
    ],
)
def test_what_would_stop_a_run_stops_its_trial(change: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        try_changes(*SCENES, change)
    assert message in str(caught.value)


def test_an_unreadable_picture_ends_a_trial_or_is_left_out(tmp_path: Path) -> None:
    write_all(tmp_path)
    pictures = tmp_path / "data/coco/train2014"
    changes = use_coco(tmp_path)
    for path in pictures.iterdir():
        path.write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"COCO_train2014_\d+.jpg: .*"):
        try_changes(*changes)
    with pytest.raises(InputError, match="@train2014.*: none of the pictures could be read; see pivotpatch data check"):
        try_changes(*changes, "data.on_error=skip")


def write_table(name: str, *, broken: Iterable[int] = ()) -> str:
    """Twelve pictures as a table, some of which cannot be read."""
    rows = ["image,labels"]
    for place in range(12):
        Image.new("RGB", (32, 32), (20 * place, 99, 0)).save(f"{name}{place}.png")
        rows.append(f"{name}{place}.png,{'cat' if place % 3 else 'dog'}")
    for place in broken:
        Path(f"{name}{place}.png").write_bytes(b"no picture")
    Path(f"{name}.csv").write_text("\n".join(rows))
    return f"table:{name}.csv"


def try_tables(train: str, val: str) -> DryRun:
    return try_changes(f"data.train={train}", f"data.val={val}", "data.on_error=skip", "train.seed=3", *SCENES[1:])


def test_skipped_pictures_are_named_and_the_next_batch_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but a batch of those to train on, and the first batches to validate."""
    monkeypatch.chdir(tmp_path)
    order = list(EpochSampler(12, batch_size=2, shuffle=True, seed=3))
    broken = [place for batch in order[:4] + order[5:] for place in batch]
    tried = try_tables(write_table("a", broken=broken), write_table("b", broken=range(5)))
    met = [f"a{place}.png" for batch in order[:4] for place in batch] + [f"b{place}.png" for place in range(5)]
    assert sorted(tried.not_read) == sorted(met)
    assert all("is in none of the known formats" in wrong for wrong in tried.not_read.values())
    assert (tried.pictures, tried.val_pictures) == (12, 12)
    assert min(tried.seconds_per_step, tried.seconds_per_validation) > 0
    assert try_tables(write_table("a"), write_table("b")).not_read == {}


def test_validation_pictures_of_which_none_can_be_read_stop_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"table:b.csv: none of the pictures could be read; see pivotpatch data check"):
        try_tables(write_table("a"), write_table("b", broken=range(12)))


def test_the_caller_keeps_its_random_state_and_settings() -> None:
    torch.manual_seed(7)
    state, benchmark = torch.get_rng_state(), torch.backends.cudnn.benchmark
    try_changes(*SCENES)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.cudnn.benchmark == benchmark
    assert torch.backends.cudnn.enabled
