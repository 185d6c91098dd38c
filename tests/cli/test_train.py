"""`pivotpatch train`: its words, its mistakes, what it leaves and what it tells."""

import json
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from verb import SCENES, Errors, read_refusal, train

from pivotpatch.cli.main import main
from pivotpatch.cli.train import read_words
from pivotpatch.models import load_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training import find_recipe, load_config
from pivotpatch.training.config import settle_config
from pivotpatch.training.folder import read_log

ADDRESS = "scenes:@test-same?count=20&size=32"


def test_words_come_in_any_order(here: Path) -> None:
    words = ["coco-resnet101-pat", "coco:elsewhere@train2017", "train.epochs=3", "model.head=ml_decoder"]
    name, config = read_words(words)
    expected = load_config(find_recipe(words[0]), ["data.train=coco:elsewhere@train2017", "data.test=[]", *words[2:]])
    assert (name, config) == ("coco-resnet101-pat", expected)
    assert read_words(words[::-1]) == (name, config)
    assert read_words([*words, "train.epochs=5"])[1].train.epochs == 5  # the last wins


def test_a_folder_becomes_its_address_but_never_hides_a_recipe(here: Path) -> None:
    for name in ("my photos", "coco-resnet101-pat"):
        Path(name).mkdir()
    assert read_words(["my photos"])[1].data.train == "folder:my photos"
    assert read_words(["coco-resnet101-pat"])[1].data.train == "coco:data/coco@train2014"


def test_the_shown_configuration_is_the_one_that_trains(here: Path, capsys: Errors) -> None:
    words = ["coco-tresnet_l-q2l-pat", "optimiser.clip_norm=1", "data.labels=['car', 'dog']", "train.epochs=3"]
    assert main(["train", *words, "--show-config"]) == 0
    (here / "shown.toml").write_text(capsys.readouterr().out)
    assert read_words(["shown.toml"])[1] == read_words(words)[1]


def test_images_of_ones_own_take_the_place_of_all_that_a_recipe_names(here: Path) -> None:
    recipe = "[data]\ntrain = 'theirs@train'\nval = 'theirs@val'\ntest = ['theirs@test']\n"
    (here / "theirs.toml").write_text(recipe, "utf-8")
    name, config = read_words(["theirs.toml", "photos.csv"])
    assert (name, config.data.train, config.data.val, config.data.test) == ("theirs", "table:photos.csv", None, ())
    assert read_words(["theirs.toml", "photos.csv", "data.test=['other']"])[1].data.test == ("other",)
    assert read_words(["theirs.toml", "data.train=mine"])[1].data.test == ("theirs@test",)


def test_a_run_leaves_its_folder_and_tells_its_result(here: Path, capsys: Errors) -> None:
    words = [*SCENES, f"data.test=['{ADDRESS}']", "output.trackers=tensorboard", "output.log_every=3"]
    assert main(["train", *words]) == 0
    out = here / "runs" / "patch-test_resnet"
    held = {path.name for path in out.iterdir()}
    assert {"config.toml", "environment.json", "log.jsonl", "metrics.json", "last", "best", "curves.png"} <= held
    captured = capsys.readouterr()
    metrics = json.loads((out / "metrics.json").read_text())
    assert f"{100 * metrics['test'][ADDRESS]['tde']['mean']:.2f}" in captured.out
    assert captured.out.splitlines()[-1].endswith("the model is in runs/patch-test_resnet/best")
    assert max(map(len, captured.out.splitlines())) <= 80
    best = max((entry["val_mAP_tde"], -entry["step"]) for entry in read_log(out) if "val_mAP_tde" in entry)
    assert (metrics["best_val_mAP"], metrics["best_step"]) == (best[0], -best[1])
    assert isinstance(load_checkpoint(out / "best"), PatchClassifier)
    assert load_config(out / "config.toml") == settle_config(read_words(words)[1], frozen=False)
    number = r"[\d.e+-]+"
    told = rf"^train: 7 of 12, \d:\d\d:\d\d left, loss {number} \({number} \+ {number}\), {number} images/s$"
    assert re.search(told, captured.err, re.MULTILINE)
    assert "\x1b" not in captured.err  # without a terminal
    events = EventAccumulator(str(out / "tracks" / "pivotpatch")).Reload()
    assert [event.step for event in events.Scalars("val_mAP_tde")] == [6, 12]
    losses = [entry["loss"] for entry in read_log(out) if "loss" in entry]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses)
    assert "exists already and is not empty" in read_refusal(capsys, "train", *words)


def test_early_stopping_counts_evaluations_without_a_gain(here: Path) -> None:
    # So small a rate changes no weight, and there is no batch norm: the first evaluation stays the best.
    unmoved = ("train.epochs=30", "optimiser.lr=1e-30", "model.backbone=test_vit")
    metrics = train(*SCENES, *unmoved, "evaluation.patience=2", "evaluation.every=2", "--out", "run")
    assert (metrics["finished"], metrics["best_step"], metrics["steps"]) == (True, 12, 36)
    assert [entry["step"] for entry in read_log(here / "run") if "val_mAP_tde" in entry] == [12, 24, 36]


def test_a_dry_run_tells_and_writes_nothing(here: Path, capsys: Errors) -> None:
    assert main(["train", *SCENES, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"images +22 to train on, 2 to validate", shown)
    assert max(map(len, shown.splitlines())) <= 80
    assert list(here.iterdir()) == []
