import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from train_command import SCENES, SMALL, Errors, train, write_pictures

from pivotpatch.cli.main import main
from pivotpatch.cli.train import read_words
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.checkpoint import load_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training.config import load_config
from pivotpatch.training.recipes import find_recipe


def fail(capsys: Errors, *words: str) -> str:
    """The one line that a mistake is told in."""
    assert main(["train", *words]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    return line.removeprefix("pivotpatch: ")


def test_words_come_in_any_order(here: Path) -> None:
    words = ["coco-resnet101-pat", "coco:elsewhere@train2017", "train.epochs=3", "model.head=ml_decoder"]
    name, config = read_words(words)
    expected = load_config(find_recipe(words[0]), ["data.train=coco:elsewhere@train2017", "data.test=[]", *words[2:]])
    assert (name, config) == ("coco-resnet101-pat", expected)
    assert config.model.image_size == 448
    assert read_words(words[::-1]) == (name, config)
    assert read_words([*words[2:], *words[:2]]) == (name, config)


def test_the_last_word_wins_and_options_may_stand_between(here: Path, capsys: Errors) -> None:
    assert main(["train", "train.epochs=3", "--show-config", "coco-resnet101-pat", "train.epochs=5"]) == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert (shown["train"]["epochs"], shown["model"]["image_size"]) == (5, 448)


@pytest.mark.parametrize(
    "name", ["photos.csv", "deep/photos.tsv", "photos.JSONL", "a@b.parquet", "why?.csv", "50%.csv"]
)
def test_a_table_becomes_its_address(name: str, here: Path) -> None:
    from pivotpatch.data.address import parse_address

    _, config = read_words([name])
    address = parse_address(config.data.train or "")
    assert (address.scheme, address.location, address.split, address.options) == ("table", name, None, {})


def test_a_folder_becomes_its_address_but_never_hides_a_recipe(here: Path) -> None:
    (here / "my photos").mkdir()
    (here / "coco-resnet101-pat").mkdir()
    assert read_words(["my photos"])[1].data.train == "folder:my photos"
    assert read_words(["coco-resnet101-pat"])[1].data.train == "coco:data/coco@train2014"


def test_pictures_of_ones_own_take_the_place_of_all_that_a_recipe_names(here: Path) -> None:
    recipe = "[data]\ntrain = 'theirs@train'\nval = 'theirs@val'\ntest = ['theirs@test']\n"
    (here / "theirs.toml").write_text(recipe, "utf-8")
    data = read_words(["theirs.toml", "photos.csv"])[1].data
    assert (data.train, data.val, data.test) == ("table:photos.csv", None, ())
    assert read_words(["theirs.toml", "photos.csv", "data.test=['other']"])[1].data.test == ("other",)
    assert read_words(["theirs.toml", "data.train=mine"])[1].data.test == ("theirs@test",)


def test_a_recipe_of_ones_own(here: Path) -> None:
    (here / "mine.toml").write_text("[train]\nepochs = 5\n")
    name, config = read_words(["mine.toml", "photos.csv"])
    assert (name, config.train.epochs, config.data.train) == ("mine", 5, "table:photos.csv")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["coco-resnet101-pta"], "'coco-resnet101-pta': is neither a recipe nor a table or folder that is there; did"),
        (["photos"], "'photos': is neither a recipe nor a table or folder that is there; known: coco-"),
        (["nowhere.toml"], "nowhere.toml: there is no such recipe; see pivotpatch recipes, or give a TOML file"),
        (["nowhere.csv"], "nowhere.csv: there is no such file or folder; check the location"),
        (["train.epohcs=3"], "train.epohcs=3: unknown key 'train.epohcs'; did you mean 'epochs'?"),
        (["train.epochs=none"], "train.epochs=none: train.epochs is 'none'; input should be a valid integer"),
        (["epochs=3"], "override 'epochs=3': is not like section.key=value; write for example train.epochs=3"),
        (["task.kind=pat"], "task.kind=pat: task.kind is 'pat'; did you mean 'patch'?"),
        (["coco-resnet101-pat", "coco-resnet101-asl"], "'coco-resnet101-asl': a second recipe besides 'coco-resnet"),
        (["a.csv", "b.csv"], "'table:b.csv': a second set of pictures; give one, and others by data.val= or data.t"),
        (["cooc:data"], "address 'cooc:data': unknown scheme 'cooc'; did you mean 'coco'?"),
        ([], "pivotpatch train: no pictures are named; give an address such as table:photos.csv, or data.train=..."),
        (["train.epochs=3", "--dry-run"], "pivotpatch train: no pictures are named"),
        (["--resume", "nowhere"], "nowhere: is no run, config.toml is missing; check the path"),
        (["--resume", "nowhere", "train.epochs=3"], "--resume: a run goes on with the configuration it has; give the"),
        ([*SCENES, "data.labels=tow"], f"{SCENES[0]}: unknown label 'tow'; did you mean 'two'?"),
        ([*SCENES, "model.backbone=resnet11"], "backbone: timm has no model 'resnet11'; did you mean 'resnet101'?"),
        ([*SCENES, "output.trackers=wnadb"], "output.trackers: unknown tracker 'wnadb'; did you mean 'wandb'?"),
        ([*SCENES, "data.test=scenes:@tset-same"], "scenes: unknown split 'tset-same'; did you mean 'test-same'?"),
        ([*SCENES, "data.val=photos"], "address 'photos': no scheme before a colon; write for example table:"),
        ([*SCENES, "data.val=scenes:@val?count=1", "data.labels=zero"], "scenes:@val?count=1: no picture has any of"),
        ([*SCENES, "data.val_fraction=1"], "data.val_fraction=1: data.val_fraction is 1; input should be less than 1"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_leaves_nothing(words: list[str], message: str, here: Path, capsys: Errors) -> None:
    assert fail(capsys, *words).startswith(message)
    assert list(here.iterdir()) == []


def test_unknown_options_are_wrong_usage(here: Path, capsys: Errors) -> None:
    for words in (["--epochs", "3"], ["--out", "a", "--resume", "b"], ["--dry-run", "--show-config"]):
        with pytest.raises(SystemExit) as caught:
            main(["train", *words])
        assert caught.value.code == 2
        assert "usage: pivotpatch" in capsys.readouterr().err


def test_the_shown_configuration_is_the_one_that_trains(here: Path, capsys: Errors) -> None:
    words = ["coco-tresnet_l-q2l-pat", "optimiser.clip_norm=1", "data.labels=['car', 'dog']", "train.epochs=3"]
    assert main(["train", *words, "--show-config"]) == 0
    (here / "shown.toml").write_text(capsys.readouterr().out)
    assert load_config(here / "shown.toml") == read_words(words)[1]
    assert read_words(["shown.toml"])[1] == read_words(words)[1]


def test_showing_a_configuration_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from pivotpatch.cli.main import main\n"
        "main(['train', 'coco-resnet101-pat', 'train.epochs=3', '--show-config'])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_run_leaves_its_folder_and_tells_its_result(here: Path, capsys: Errors) -> None:
    assert main(["train", *SCENES, "task.kind=image"]) == 0
    out = here / "runs" / "image-test_resnet"
    held = {path.name for path in out.iterdir()}
    assert {"config.toml", "environment.json", "log.jsonl", "metrics.json", "last", "best"} <= held
    captured = capsys.readouterr()
    assert re.search(r"best validation mAP \d+\.\d\d \(image logits, step \d+\)", captured.out)
    assert "12 steps in 0:00:" in captured.out
    assert captured.out.splitlines()[-1].endswith("the network is in runs/image-test_resnet/best")
    assert isinstance(load_checkpoint(out / "best"), MultiLabelClassifier)
    assert load_config(out / "config.toml") == read_words([*SCENES, "task.kind=image"])[1]
    assert fail(capsys, *SCENES, "task.kind=image") == (
        "runs/image-test_resnet: exists already and is not empty; choose another folder, or --resume it"
    )
    assert "the run has come to its end; start another" in fail(capsys, "--resume", str(out))


def test_test_sets_are_looked_at_only_where_they_are_named(here: Path, capsys: Errors) -> None:
    assert train(*SCENES, "--out", "without")["test"] == {}
    address = "scenes:@test-same?count=20&size=32"
    found = train(*SCENES, f"data.test=['{address}', 'scenes:@test-broken?count=20&size=32']", "--out", "with")["test"]
    assert list(found) == [address, "scenes:@test-broken?count=20&size=32"]
    shown = capsys.readouterr().out
    assert f"{100 * found[address]['tde']['mean']:.2f}" in shown
    weights = [Path(run, "last", "model.safetensors").read_bytes() for run in ("without", "with")]
    assert weights[0] == weights[1]


def test_a_given_validation_set_chooses_the_network(here: Path) -> None:
    metrics = train(*SCENES, "data.val=scenes:@val?count=20&size=32", "train.batch_size=8", "--out", "run")
    assert metrics["steps"] == 2 * 3  # none of the 24 is held out
    entries = read_log(here / "run")
    best = max((entry["val_mAP_tde"], -entry["step"]) for entry in entries if "val_mAP_tde" in entry)
    assert (metrics["best_val_mAP"], metrics["best_step"]) == (best[0], -best[1])


def test_without_validation_the_last_network_is_kept(here: Path, capsys: Errors) -> None:
    metrics = train(*SCENES, "data.val_fraction=0", "--out", "run")
    assert metrics["chosen_by"] == "nothing, the last step"
    assert (metrics["best_val_mAP"], metrics["best_step"], metrics["steps"]) == (None, 12, 12)
    folders = [here / "run" / name / "model.safetensors" for name in ("last", "best")]
    assert folders[0].read_bytes() == folders[1].read_bytes()
    assert not any("val_mAP_tde" in entry for entry in read_log(here / "run"))
    assert "the network is in run/best" in capsys.readouterr().out


def read_log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


# So small a rate changes no weight, and there is no batch norm: the first evaluation stays the best.
UNMOVED = ("train.epochs=30", "optimiser.lr=1e-30", "model.backbone=test_vit")


def test_early_stopping_ends_after_evaluations_without_a_gain(here: Path) -> None:
    metrics = train(*SCENES, *UNMOVED, "evaluation.patience=2", "--out", "run")
    assert metrics["finished"] is True
    assert (metrics["best_step"], metrics["steps"]) == (6, 18)
    assert [entry["step"] for entry in read_log(here / "run") if "val_mAP_tde" in entry] == [6, 12, 18]


def test_patience_needs_something_to_judge_by(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SCENES, "evaluation.patience=2", "data.val_fraction=0", "--out", "run"]) == 1
    message = "evaluation.patience: there are no validation pictures to judge by; give data.val or data.val_fraction"
    assert message in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_patience_counts_evaluations_not_epochs(here: Path) -> None:
    assert train(*SCENES, *UNMOVED, "evaluation.patience=1", "evaluation.every=2", "--out", "run")["steps"] == 24


def test_labels_may_be_chosen(here: Path) -> None:
    photos = write_pictures(here / "pictures")
    train(str(photos), *SMALL, "data.labels=['dog']", "--out", "run")
    assert load_checkpoint(here / "run" / "best").labels == ("dog",)


def test_a_folder_of_pictures_is_enough(here: Path) -> None:
    for label, shade in (("dark", 20), ("light", 220)):
        (here / "photos" / label).mkdir(parents=True)
        for place in range(6):
            Image.fromarray(np.full((40, 40, 3), shade + place, dtype=np.uint8)).save(
                here / f"photos/{label}/{place}.png"
            )
    train("photos", *SMALL, "--out", "run")
    assert load_checkpoint(here / "run" / "best").labels == ("dark", "light")


def test_pat_starts_from_a_baseline_as_pat_i_of_it(here: Path) -> None:
    train(*SCENES, "task.kind=image", "--out", "baseline")
    start = [SCENES[0], *SMALL[3:], "model.start_from=baseline/best", "optimiser.lr=1e-30", "task.lam=0.5"]
    train(*start, "train.epochs=1", "ema.decay=0", "--out", "pat")
    baseline, pat = load_checkpoint(here / "baseline/best"), load_checkpoint(here / "pat/best")
    assert isinstance(baseline, MultiLabelClassifier)
    assert isinstance(pat, PatchClassifier)
    assert pat.lam == 0.5
    assert all(torch.equal(value, pat.state_dict()[name]) for name, value in baseline.named_parameters())
    # What batch norms have seen goes on; with the baseline's own, PAT-T is PAT-I before it has learned anything.
    pat.load_state_dict(dict(baseline.named_buffers()), strict=False)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        expected = PatchInference(baseline, lam=0.5)(images)
        torch.testing.assert_close(pat(images).tde_logits, expected.tde_logits)
        torch.testing.assert_close(pat(images).probs, expected.probs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.backbone=test_vit"], "model.backbone: is 'test_vit', but baseline/best decides it; leave it out"),
        (
            ["model.image_size=64"],
            "model.image_size: is 64, but baseline/best decides it; leave it out, or write model.im",
        ),
        (["task.kind=independent"], "baseline/best: it is a MultiLabelClassifier, which the task 'independent' cannot"),
        (["task.source_size=16"], "PatchClassifier: source_size is 16; give a side of 32 pixels"),
    ],
)
def test_what_a_checkpoint_decides_is_not_said_twice(
    changes: list[str], message: str, here: Path, capsys: Errors
) -> None:
    train(*SCENES, "train.epochs=1", "task.kind=image", "--out", "baseline")
    capsys.readouterr()
    start = [SCENES[0], *SMALL[3:], "model.start_from=baseline/best"]
    assert fail(capsys, *start, *changes, "--out", "more").startswith(message)
    assert main(["train", *start, *SMALL[:3], "task.kind=image", "--dry-run"]) == 0  # the same said again does no harm


def test_a_patch_network_is_cut_as_the_configuration_says(here: Path) -> None:
    train(*SCENES, "train.epochs=1", "task.grid=3", "task.lam=0.3", "--out", "first")
    start = [SCENES[0], *SMALL[3:], "model.start_from=first/best", "train.epochs=1"]
    train(*start, "task.source_size=48", "--out", "second")
    model = load_checkpoint(here / "second" / "best")
    assert isinstance(model, PatchClassifier)
    assert (model.grid, model.lam, model.source_size) == (2, 1.0, 48)


def test_tensorboard_holds_losses_and_validation(here: Path) -> None:
    train(*SCENES, "output.trackers=tensorboard", "output.log_every=3", "--out", "run")
    events = EventAccumulator(str(here / "run" / "tracks" / "pivotpatch")).Reload()
    assert [event.step for event in events.Scalars("val_mAP_tde")] == [6, 12]
    assert [event.step for event in events.Scalars("loss_patch")] == [3, 6, 9, 12]
    entries = [entry["loss"] for entry in read_log(here / "run") if "loss" in entry]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(entries)
