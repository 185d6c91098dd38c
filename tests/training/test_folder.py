import json
import resource
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from run_process import IMAGE, SHORT, crash, make_config, read_run, read_step, when

from pivotpatch.errors import InputError
from pivotpatch.models.checkpoint import load_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.training.build import build_run
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import RunFolder, RunState
from pivotpatch.training.loop import fit, resume
from pivotpatch.training.processes import make_accelerator
from pivotpatch.training.step import restore_training

MOMENTS = ("exp_avg", "exp_avg_sq")


def limit_files(size: int) -> None:
    """Let no file grow beyond some bytes, as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A run that never stopped."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    fit(SHORT, folder)
    return read_run(folder)


def test_a_folder_tells_all_of_its_run(reference: dict[str, object], crashed: Path) -> None:
    assert set(reference) == {
        ".lock",
        "config.toml",
        "environment.json",
        "log.jsonl",
        "metrics.json",
        "best",
        "best/model.json",
        "best/model.safetensors",
        "last",
        "last/model.json",
        "last/model.safetensors",
        "last/state.json",
        "last/training.safetensors",
    }
    assert load_config(crashed / "config.toml") == SHORT
    environment = json.loads((crashed / "environment.json").read_text())
    assert torch.__version__.startswith(environment["libraries"]["torch"])
    log: Any = reference["log.jsonl"]
    assert [entry["step"] for entry in log] == [5, 7, 7, 10, 14, 14]
    assert [entry["step"] for entry in log if "val_mAP_image" in entry] == [7, 14]
    held: Any = reference["metrics.json"]
    metrics = held[0]
    assert metrics["finished"]
    assert metrics["best_val_mAP"] == max(entry.get("val_mAP_image", 0) for entry in log)


def test_a_crashed_run_goes_on_to_the_same_end(crashed: Path, reference: dict[str, object]) -> None:
    assert read_step(crashed) == 8
    assert not resume(crashed).stopped_by
    assert read_run(crashed) == reference


def test_moments_return_in_the_memory_order_of_their_weights(crashed: Path) -> None:
    """Fused optimisers, those of GPUs, refuse any other."""
    folder = RunFolder.open(crashed)
    run = build_run(SHORT, make_accelerator(SHORT), saved=folder.last)
    restore_training(run, folder.load_tensors(torch.device("cpu")))
    held = [(weight, moments[name]) for weight, moments in run.optimiser.state.items() for name in MOMENTS]
    assert any(not weight.is_contiguous() for weight, _ in held)
    assert all(moment.stride() == weight.stride() for weight, moment in held)


def test_a_run_that_crashed_before_its_first_save_begins_again(tmp_path: Path, reference: dict[str, object]) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(SHORT, tmp_path / "run", progress=when("train", 3, crash))
    assert not (tmp_path / "run" / "last").exists()
    resume(tmp_path / "run")
    assert read_run(tmp_path / "run") == reference


def test_each_epoch_is_saved_though_it_is_not_evaluated(tmp_path: Path) -> None:
    config = make_config(*IMAGE, "output.save_every=500", "evaluation.every=3")
    with pytest.raises(ZeroDivisionError):
        fit(config, tmp_path / "run", progress=when("train", 15, crash))
    assert read_step(tmp_path / "run") == 14


def test_without_validation_the_last_network_is_the_best(tmp_path: Path) -> None:
    config = make_config(*IMAGE, "data.val_fraction=0", "train.epochs=1")
    metrics = fit(config, tmp_path / "run").metrics
    assert (metrics["best_step"], metrics["best_val_mAP"]) == (8, None)
    best, last = (tmp_path / "run" / name / "model.safetensors" for name in ("best", "last"))
    assert best.read_bytes() == last.read_bytes()


def test_nothing_is_overwritten(crashed: Path, tmp_path: Path) -> None:
    before = read_run(crashed)
    with pytest.raises(InputError, match="run: exists already and is not empty; choose another folder, or --resume it"):
        fit(SHORT, crashed)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    with pytest.raises(InputError, match="photos: exists already and is not empty; choose another folder$"):
        fit(SHORT, tmp_path / "photos")
    assert read_run(crashed) == before


@pytest.mark.parametrize("change", ["model.backbone=resnet1", "data.train=scenes:@nowhere", "output.trackers=wand"])
def test_what_cannot_be_built_leaves_nothing_behind(change: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        fit(make_config(change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["file", "file/run", "file/deep/run"])
def test_a_folder_that_cannot_be_made_is_found_out_before_pictures_are_decoded(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"{name}: .*/file is no folder that can be written to; choose another one"):
        fit(SHORT, tmp_path / name, progress=when("decode pictures", 1, crash))


def test_a_run_that_could_not_write_its_configuration_leaves_the_place_free(tmp_path: Path) -> None:
    out, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    try:
        with pytest.raises(InputError, match=f"{out}: File too large; free some space or choose another folder"):
            fit(SHORT, out, progress=when("decode pictures", 1, lambda: limit_files(10)))
    finally:
        limit_files(before)
    assert not (out / "config.toml").exists()
    RunFolder(out, SHORT).create()


@pytest.mark.parametrize("tail", ["", '{"step": 8, "epo', "\0" * 100, '{"step": 9, "loss": 1.0}\n{"step'])
def test_the_log_is_cut_where_the_run_goes_on(tail: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, SHORT)
    entries = [{"step": step} for step in (5, 7, 7)]
    for entry in entries:
        folder.add_to_log(dict(entry))
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(tail)
    folder.cut_log(3)
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == entries
    folder.cut_log(1)
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 5}\n'


def test_what_a_crash_left_half_done_is_cleared_away(crashed: Path, reference: dict[str, object]) -> None:
    """A save that stopped between its renames is taken back; one that stopped before them or after is forgotten."""
    (crashed / "last").rename(crashed / "last.old")
    shutil.copytree(crashed / "best", crashed / "best.old")
    (crashed / "best.old" / "model.json").write_text("older")
    for name in (".last.1f", ".best.2e"):
        (crashed / name).mkdir()
        (crashed / name / "half").touch()
    for name in ("log.jsonl", "metrics.json"):
        (crashed / f"{name}.tmp").touch()
    (crashed / "notes.txt").write_text("mine")
    heard: list[tuple[str, int]] = []
    resume(crashed, progress=lambda what, done, _total: heard.append((what, done)))
    assert next(done for what, done in heard if what == "train") == 9
    assert (crashed / "notes.txt").read_text() == "mine"
    (crashed / "notes.txt").unlink()
    assert read_run(crashed) == reference


def test_a_state_comes_back_exactly(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", SHORT)
    folder.create()
    state = RunState(step=3, best=0.1 + 0.2, pending=[[1 / 3, 2.0, 1e-45]], not_read={"ä\n.jpg": "no"})
    tensors = {"a": torch.rand(3, 4).T, "b": torch.tensor(7)}
    folder.save_last(MultiLabelClassifier("test_resnet", ["cat"]), tensors, state)
    assert folder.load_state() == state.model_copy(update={"config": SHORT.model_dump(mode="json")})
    loaded = folder.load_tensors(torch.device("cpu"))
    assert all(torch.equal(loaded[name], value) for name, value in tensors.items())
    rights = {path.name: path.stat().st_mode for path in folder.last.iterdir()}
    assert len(set(rights.values())) == 1, rights


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
@pytest.mark.parametrize(
    ("step", "room", "file", "saved"),
    [
        (2, lambda _: 100_000, "last", 0),
        (6, lambda _: 100_000, "last", 4),
        (7, lambda _: 100_000, "best", 7),
        (12, lambda _: 2_000_000, "last", 8),  # the checkpoint fits, what training needs besides does not
        (9, lambda out: (out / "log.jsonl").stat().st_size + 20, "log.jsonl", 8),  # within a line
    ],
)
def test_a_full_disk_ends_a_run_and_leaves_its_last_good_state(
    step: int, room: Callable[[Path], int], file: str, saved: int, tmp_path: Path, reference: dict[str, object]
) -> None:
    out, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    moment = ("validate", 1) if file == "best" else ("train", step)
    safe = f"last/ holds step {saved}, --resume goes on there" if saved else "nothing was saved yet"
    try:
        with pytest.raises(InputError) as caught:
            fit(SHORT, out, progress=when(*moment, lambda: limit_files(room(out))))
    finally:
        limit_files(before)
    assert str(caught.value) == f"{out / file}: File too large; free some space or choose another folder; {safe}"
    whole = {"config.toml", "environment.json", "log.jsonl", "last", "best", ".lock"}
    assert {path.name for path in out.iterdir()} <= whole  # nothing half-written
    folder = RunFolder.open(out)
    assert folder.load_state().step == saved
    if saved:
        load_checkpoint(folder.last)
    resume(out)
    assert read_run(out) == reference


def write_pictures(folder: Path, *, broken: Iterable[int] = ()) -> str:
    """A table of 40 pictures, some of which are none."""
    folder.mkdir(exist_ok=True)
    lines = ["image,labels"]
    for number in range(40):
        Image.new("RGB", (32, 32), (5 * number, 99, 200 - number)).save(folder / f"{number}.png")
        if number in broken:
            (folder / f"{number}.png").write_bytes(b"no picture")
        lines.append(f"{number}.png,{'red' if number % 3 else 'blue'}")
    (folder / "all.csv").write_text("\n".join(lines) + "\n")
    return f"data.train=table:{folder / 'all.csv'}"


@pytest.mark.parametrize("hold", ["memory", "nothing"])
def test_pictures_that_cannot_be_read_are_listed_at_the_end(hold: str, tmp_path: Path) -> None:
    """Those of validation too; a crash does not make it forget those that it met before."""
    broken = [3, 11, 12, 30, 31, 32]
    pictures = write_pictures(tmp_path / "pictures", broken=broken)
    changes = (f"data.hold={hold}", "data.workers=0", "data.on_error=skip", *IMAGE, "output.save_every=1")
    config = make_config(pictures, "train.epochs=1", *changes)
    metrics = fit(config, tmp_path / "whole").metrics
    assert list(metrics["not_read"]) == sorted(f"{number}.png" for number in broken)
    assert all("is in none of the known formats" in wrong for wrong in metrics["not_read"].values())
    with pytest.raises(ZeroDivisionError):
        fit(config, tmp_path / "run", progress=when("train", 4, crash))
    assert read_step(tmp_path / "run") == 3
    resume(tmp_path / "run")
    assert read_run(tmp_path / "run") == read_run(tmp_path / "whole")


def test_a_picture_that_cannot_be_read_ends_a_run_that_can_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    config = make_config(write_pictures(folder), "data.hold=nothing", "data.workers=0", *IMAGE)
    fit(config, tmp_path / "whole")
    with pytest.raises(InputError, match=r"png: is in none of .*; last/ holds step 8, --resume goes on there$"):
        fit(config, tmp_path / "run", progress=when("train", 9, lambda: write_pictures(folder, broken=range(40))))
    write_pictures(folder)
    resume(tmp_path / "run")
    assert read_run(tmp_path / "run") == read_run(tmp_path / "whole")


def test_pictures_of_which_none_can_be_read_are_an_error(tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path / "pictures", broken=range(40))
    with pytest.raises(InputError, match="all.csv: none of the pictures could be read; see pivotpatch data check"):
        fit(make_config(pictures, "data.on_error=skip", *IMAGE), tmp_path / "run")


@pytest.mark.parametrize("kind", ["val", "test"])
def test_pictures_to_judge_by_of_which_none_can_be_read_are_an_error(kind: str, tmp_path: Path) -> None:
    """What was trained until then is kept."""
    judged = write_pictures(tmp_path / "broken", broken=range(40)).removeprefix("data.train=")
    given = f"data.val={judged}" if kind == "val" else f'data.test=["{judged}"]'
    changes = ("data.val_fraction=0", given, "data.on_error=skip", "train.epochs=1", *IMAGE)
    with pytest.raises(InputError, match=r"broken/all.csv: none of the pictures could be read; .*; last/ holds step"):
        fit(make_config(write_pictures(tmp_path / "pictures"), *changes), tmp_path / "run")
    assert read_step(tmp_path / "run") > 0
