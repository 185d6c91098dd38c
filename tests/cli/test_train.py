"""`pivotpatch train`: its words, its mistakes, what it leaves and what it tells."""

import json
import os
import pty
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
from together import run_together, run_verb
from train_command import SCENES, SMALL, Errors, train, write_pictures
from verb import read_json, read_refusal

from pivotpatch.cli.main import main
from pivotpatch.cli.train import read_words
from pivotpatch.data.loading import EpochSampler
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.checkpoint import load_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.training import find_recipe, load_config
from pivotpatch.training.folder import read_log

ADDRESS = "scenes:@test-same?count=20&size=32"


def test_words_come_in_any_order(here: Path) -> None:
    words = ["coco-resnet101-pat", "coco:elsewhere@train2017", "train.epochs=3", "model.head=ml_decoder"]
    name, config = read_words(words)
    expected = load_config(find_recipe(words[0]), ["data.train=coco:elsewhere@train2017", "data.test=[]", *words[2:]])
    assert (name, config) == ("coco-resnet101-pat", expected)
    assert read_words(words[::-1]) == (name, config)
    assert read_words([*words, "train.epochs=5"])[1].train.epochs == 5  # the last wins


@pytest.mark.parametrize("name", ["photos.csv", "deep/photos.tsv", "a@b.parquet", "50%.csv"])
def test_a_table_becomes_its_address(name: str, here: Path) -> None:
    from pivotpatch.data.address import parse_address

    address = parse_address(read_words([name])[1].data.train or "")
    assert (address.scheme, address.location, address.split, address.options) == ("table", name, None, {})


def test_a_folder_becomes_its_address_but_never_hides_a_recipe(here: Path) -> None:
    (here / "my photos").mkdir()
    (here / "coco-resnet101-pat").mkdir()
    assert read_words(["my photos"])[1].data.train == "folder:my photos"
    assert read_words(["coco-resnet101-pat"])[1].data.train == "coco:data/coco@train2014"


def test_images_of_ones_own_take_the_place_of_all_that_a_recipe_names(here: Path) -> None:
    recipe = "[data]\ntrain = 'theirs@train'\nval = 'theirs@val'\ntest = ['theirs@test']\n"
    (here / "theirs.toml").write_text(recipe, "utf-8")
    name, config = read_words(["theirs.toml", "photos.csv"])
    assert (name, config.data.train, config.data.val, config.data.test) == ("theirs", "table:photos.csv", None, ())
    assert read_words(["theirs.toml", "photos.csv", "data.test=['other']"])[1].data.test == ("other",)
    assert read_words(["theirs.toml", "data.train=mine"])[1].data.test == ("theirs@test",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["coco-resnet101-pta"], "'coco-resnet101-pta': is neither a recipe nor a table or folder that is there; did"),
        (["nowhere.toml"], "nowhere.toml: there is no such recipe; see pivotpatch recipes, or give a TOML file"),
        (["nowhere.csv"], "nowhere.csv: there is no such file or folder; check the location"),
        (["train.epohcs=3"], "train.epohcs=3: unknown key 'train.epohcs'; did you mean 'epochs'?"),
        (["coco-resnet101-pat", "coco-resnet101-asl"], "'coco-resnet101-asl': a second recipe besides 'coco-resnet"),
        (["a.csv", "b.csv"], "'table:b.csv': a second set of images; give one, and others by data.val= or data.t"),
        (["cooc:data"], "address 'cooc:data': unknown scheme 'cooc'; did you mean 'coco'?"),
        ([], "pivotpatch train: no images are named; give an address such as table:photos.csv, or data.train=..."),
        (
            ["voc2007-tresnet_l-pat"],
            "voc:data/voc2007/VOCdevkit@2007-trainval: there is no folder data/voc2007; "
            "run pivotpatch data prepare voc2007 --root data/voc2007, or give images of your own",
        ),
        (["--resume", "nowhere"], "nowhere: is no run, config.toml is missing; check the path"),
        (["--resume", "nowhere", "train.epochs=3"], "--resume: a run goes on with the configuration it has; give the"),
        ([*SCENES, "model.backbone=resnet11"], "backbone: timm has no model 'resnet11'; did you mean 'resnet101'?"),
        ([*SCENES, "data.val=scenes:@val?count=1", "data.labels=zero"], "scenes:@val?count=1: no image has any of"),
        (
            [*SCENES, "evaluation.patience=2", "data.val_fraction=0"],
            "evaluation.patience: there are no validation images to judge by; give data.val or data.val_fraction",
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(words: list[str], message: str, here: Path, capsys: Errors) -> None:
    assert main(["train", *words]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"pivotpatch: {message}")
    assert captured.out == ""
    assert list(here.iterdir()) == []


def test_unknown_options_are_wrong_usage(capsys: Errors) -> None:
    for words in (["--epochs", "3"], ["--out", "a", "--resume", "b"], ["--dry-run", "--show-config"]):
        with pytest.raises(SystemExit) as caught:
            main(["train", *words])
        assert caught.value.code == 2
        assert "usage: pivotpatch" in capsys.readouterr().err


def test_the_shown_configuration_is_the_one_that_trains_and_does_not_wait_for_torch(here: Path) -> None:
    words = ["coco-tresnet_l-q2l-pat", "optimiser.clip_norm=1", "data.labels=['car', 'dog']", "train.epochs=3"]
    code = (
        "import sys; from pivotpatch.cli.main import main\n"
        f"main(['train', *{words}, '--show-config']); print('# torch', 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "# torch False"
    assert tomllib.loads(done.stdout)["train"]["epochs"] == 3
    (here / "shown.toml").write_text(done.stdout)
    assert read_words(["shown.toml"])[1] == read_words(words)[1]


def test_a_run_leaves_its_folder_and_tells_its_result(here: Path, capsys: Errors) -> None:
    words = [*SCENES, f"data.test=['{ADDRESS}']", "output.trackers=tensorboard", "output.log_every=3"]
    assert main(["train", *words]) == 0
    out = here / "runs" / "patch-test_resnet"
    held = {path.name for path in out.iterdir()}
    assert {"config.toml", "environment.json", "log.jsonl", "metrics.json", "last", "best", "curves.png"} <= held
    captured = capsys.readouterr()
    assert re.search(r"best validation mAP \d+\.\d\d \(tde logits, step \d+\)", captured.out)
    metrics = json.loads((out / "metrics.json").read_text())
    assert f"{100 * metrics['test'][ADDRESS]['tde']['mean']:.2f}" in captured.out
    assert "12 steps in 0:00:" in captured.out
    assert captured.out.splitlines()[-1].endswith("the model is in runs/patch-test_resnet/best")
    assert max(map(len, captured.out.splitlines())) <= 80
    assert isinstance(load_checkpoint(out / "best"), PatchClassifier)
    assert load_config(out / "config.toml") == read_words(words)[1]
    check_lines(captured.err.splitlines())
    events = EventAccumulator(str(out / "tracks" / "pivotpatch")).Reload()
    assert [event.step for event in events.Scalars("val_mAP_tde")] == [6, 12]
    losses = [entry["loss"] for entry in read_log(out) if "loss" in entry]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses)
    message = "runs/patch-test_resnet: exists already and is not empty; choose another folder, or --resume it"
    assert read_refusal(capsys, "train", *words) == message


def check_lines(lines: list[str]) -> None:
    """Lines without a terminal tell what was chosen, the time left, losses, speed and validation."""
    number = r"[\d.e+-]+"
    expected = [
        r"data\.hold is (memory|device): images take .* GB of .* GB .*",
        r"precision\.compile is false: .*",
        r"train: 1 of 12.*",
        rf"train: 7 of 12, \d:\d\d:\d\d left, loss {number} \({number} \+ {number}\), {number} images/s",
        r"epoch 2: validation mAP image \d+\.\d\d, patch \d+\.\d\d, tde \d+\.\d\d",
    ]
    for pattern in expected:
        assert any(re.fullmatch(pattern, line) for line in lines), (pattern, lines)
    assert not any("\x1b" in line for line in lines)


def test_the_result_as_json(here: Path, capsys: Errors) -> None:
    """A given validation set chooses the model, and none of the 24 images is held out."""
    val = "data.val=scenes:@val?count=20&size=32"
    printed = read_json(capsys, "train", *SCENES, val, "train.batch_size=8", "--out", "run")
    assert printed == json.loads((here / "run/metrics.json").read_text())
    assert (printed["finished"], printed["steps"], printed["epochs"], printed["test"]) == (True, 2 * 3, 2, {})
    best = max((entry["val_mAP_tde"], -entry["step"]) for entry in read_log(here / "run") if "val_mAP_tde" in entry)
    assert (printed["best_val_mAP"], printed["best_step"]) == (best[0], -best[1])


def test_without_validation_the_last_model_is_kept(here: Path) -> None:
    metrics = train(*SCENES, "data.val_fraction=0", "--out", "run")
    assert metrics["chosen_by"] == "nothing, the last step"
    assert (metrics["best_val_mAP"], metrics["best_step"], metrics["steps"]) == (None, 12, 12)
    folders = [here / "run" / name / "model.safetensors" for name in ("last", "best")]
    assert folders[0].read_bytes() == folders[1].read_bytes()
    assert not any("val_mAP_tde" in entry for entry in read_log(here / "run"))


@pytest.mark.parametrize(
    ("patience", "every", "steps"), [(2, 1, [6, 12, 18]), (1, 2, [12, 24])], ids=["patience", "every"]
)
def test_early_stopping_counts_evaluations_without_a_gain(
    patience: int, every: int, steps: list[int], here: Path
) -> None:
    # So small a rate changes no weight, and there is no batch norm: the first evaluation stays the best.
    unmoved = ("train.epochs=30", "optimiser.lr=1e-30", "model.backbone=test_vit")
    waits = (f"evaluation.patience={patience}", f"evaluation.every={every}")
    metrics = train(*SCENES, *unmoved, *waits, "--out", "run")
    assert (metrics["finished"], metrics["best_step"], metrics["steps"]) == (True, steps[0], steps[-1])
    assert [entry["step"] for entry in read_log(here / "run") if "val_mAP_tde" in entry] == steps


def test_a_folder_of_images_is_enough_and_labels_may_be_chosen(here: Path) -> None:
    for label, shade in (("dark", 20), ("light", 220), ("odd", 99)):
        (here / "photos" / label).mkdir(parents=True)
        for place in range(6):
            pixels = np.full((40, 40, 3), shade + place, dtype=np.uint8)
            Image.fromarray(pixels).save(here / f"photos/{label}/{place}.png")
    train("photos", *SMALL, "data.labels=['dark', 'light']", "train.epochs=1", "--out", "run")
    assert load_checkpoint(here / "run" / "best").labels == ("dark", "light")


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("baseline") / "run"
    train(*SCENES, "train.epochs=1", "task.kind=image", "--out", str(out))
    return out / "best"


def test_pat_starts_from_a_baseline_as_pat_i_of_it(baseline: Path, here: Path) -> None:
    start = [SCENES[0], *SMALL[3:], f"model.start_from={baseline}", "optimiser.lr=1e-30", "task.lam=0.5"]
    train(*start, "train.epochs=1", "ema.decay=0", "--out", "pat")
    first, pat = load_checkpoint(baseline), load_checkpoint(here / "pat/best")
    assert isinstance(first, MultiLabelClassifier)
    assert isinstance(pat, PatchClassifier)
    assert all(torch.equal(value, pat.state_dict()[name]) for name, value in first.named_parameters())
    # What batch norms have seen goes on; with the baseline's own, PAT-T is PAT-I before it has learned anything.
    pat.load_state_dict(dict(first.named_buffers()), strict=False)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        expected = PatchInference(first, lam=0.5)(images)
        torch.testing.assert_close(pat(images).tde_logits, expected.tde_logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["model.backbone=test_vit"],
            r"model.backbone: is 'test_vit', but .* decides it; leave it out, or write",
        ),
        (["task.kind=independent"], "it is a MultiLabelClassifier, which task.kind=independent cannot train"),
        (["task.source_size=16"], "PatchClassifier: source_size is 16; give a side of 32 pixels"),
    ],
)
def test_what_a_checkpoint_decides_is_not_said_otherwise(
    changes: list[str], message: str, baseline: Path, here: Path, capsys: Errors
) -> None:
    start = [SCENES[0], *SMALL[3:], f"model.start_from={baseline}"]
    assert re.search(message, read_refusal(capsys, "train", *start, *changes, "--out", "more"))


def test_a_dry_run_tells_and_writes_nothing(here: Path, capsys: Errors) -> None:
    assert main(["train", *SCENES, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"images +22 to train on, 2 to validate", shown)
    assert re.search(r"memory +\d+\.\d\d GB, and 0\.00 GB for decoded images", shown)
    assert re.search(r"chosen +data.hold is (memory|device): images take", shown)
    assert max(map(len, shown.splitlines())) <= 80
    tried = read_json(capsys, "train", *SCENES, "--dry-run")
    assert (tried["pictures"], tried["val_pictures"], tried["steps"], tried["labels"]) == (22, 2, 12, 10)
    assert list(here.iterdir()) == []


def test_images_that_cannot_be_read_are_told(here: Path, capsys: Errors) -> None:
    photos = write_pictures(here / "pictures")
    (here / "pictures" / "3.png").write_bytes(b"no image")
    words = [str(photos), *SMALL, "train.epochs=1"]
    assert re.match(r".*3\.png: ", read_refusal(capsys, "train", *words, "--out", "stops"))
    metrics = train(*words, "data.on_error=skip", "data.val_fraction=0.3", "--out", "skips")
    assert [Path(name).name for name in metrics["not_read"]] == ["3.png"]
    assert "not read: " in capsys.readouterr().err
    assert main(["train", *words, "data.on_error=skip", "data.val_fraction=0", "--dry-run", "train.batch_size=12"]) == 0
    assert re.fullmatch(r"not read: .*3.png: .*\n", capsys.readouterr().err)


@pytest.mark.slow
def test_two_processes_tell_once_and_one_that_can_read_nothing_takes_part(here: Path) -> None:
    """The tagger knows one of the two labels."""
    photos = write_pictures(here / "pictures")
    shares = EpochSampler(12, batch_size=4, shuffle=True, seed=3, rank=1, world=2)
    theirs = [place for share in shares for place in share]
    for place in theirs:
        (here / "pictures" / f"{place}.png").write_bytes(b"no image")
    photos.write_text(photos.read_text().replace("dog", "my mug"))
    words = ["tagger", str(photos), *SMALL[3:], "data.on_error=skip", "data.val_fraction=0", "train.seed=3"]
    first, second = run_together(run_verb, ["train", *words, "--dry-run", "--json"])
    assert (first.status, second.status, second.err) == (0, 0, "")
    assert {Path(name).stem for name in json.loads(first.out)["not_read"]} == set(map(str, theirs))
    assert first.err.count("starting from a model that knows 1 of 2 labels: cat; new: my mug") == 1


@pytest.mark.slow
def test_bars_on_a_terminal_tell_time_losses_and_speed(here: Path) -> None:
    words = [*SCENES, f"data.test={ADDRESS}", "train.epochs=3", "--out", "run"]
    plain = re.sub(
        r"\x1b\[[\d;?]*[A-Za-z]", "", show_on_terminal([sys.executable, "-m", "pivotpatch", "train", *words])
    )
    number = r"[\d.e+-]+"
    told = rf"train .* 18 of 18 \d:\d\d:\d\d loss {number} \({number} \+ {number}\), {number} images/s"
    assert re.search(told, plain), plain
    assert "epoch 3: validation mAP image" in plain
    assert "best validation mAP" in plain


def show_on_terminal(command: list[str]) -> str:
    """What a program writes where all that it writes to is a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    environment: dict[str, Any] = {**os.environ, "COLUMNS": "100", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while chunk := read_some(ours):
        shown += chunk
    assert process.wait() == 0, shown.decode()
    return shown.decode()


def read_some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end is closed
        return b""
