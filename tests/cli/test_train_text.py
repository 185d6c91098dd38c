import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from together import run_together, run_verb
from train_command import SCENES, SMALL, Errors, train, write_pictures

from pivotpatch.cli.main import main
from pivotpatch.data.loading import EpochSampler


def test_the_result_as_json(here: Path, capsys: Errors) -> None:
    address = "scenes:@test-same?count=20&size=32"
    metrics = train(*SCENES, f"data.test={address}", "--out", "run", "--json")
    printed = json.loads(capsys.readouterr().out)
    assert printed == metrics
    assert printed["finished"] is True
    assert (printed["steps"], printed["epochs"], printed["ranking"]) == (12, 2, "tde")
    assert set(printed["test"][address]) == {"image", "patch", "tde"}
    assert printed["test"][address]["tde"]["definition"] == "step"
    assert printed["pictures_per_second"] > 0


def test_a_dry_run_tells_and_writes_nothing(here: Path, capsys: Errors) -> None:
    assert main(["train", *SCENES, "data.hold=memory", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"pictures +22 to train on, 2 to validate", shown)
    assert re.search(r"steps +12, \d", shown)
    assert re.search(r"memory +\d+\.\d\d GB at most", shown)
    assert re.search(r"held pictures +0\.00 GB besides", shown)
    assert main(["train", *SCENES, "--dry-run", "--json"]) == 0
    tried = json.loads(capsys.readouterr().out)
    assert (tried["pictures"], tried["val_pictures"], tried["steps"], tried["labels"]) == (22, 2, 12, 10)
    assert list(here.iterdir()) == []


def test_pictures_that_cannot_be_read_are_told(here: Path, capsys: Errors) -> None:
    photos = write_pictures(here / "pictures")
    (here / "pictures" / "3.png").write_bytes(b"no picture")
    assert main(["train", str(photos), *SMALL, "data.val_fraction=0", "--out", "stops"]) == 1
    assert re.match(r"pivotpatch: .*3\.png: ", capsys.readouterr().err.splitlines()[-1])
    metrics = train(str(photos), *SMALL, "data.on_error=skip", "data.val_fraction=0.3", "--out", "skips")
    assert [Path(name).name for name in metrics["not_read"]] == ["3.png"]
    assert "not read: " in capsys.readouterr().err
    words = [str(photos), *SMALL, "data.on_error=skip", "data.val_fraction=0", "train.batch_size=12", "--dry-run"]
    assert main(["train", *words, "--json"]) == 0
    captured = capsys.readouterr()
    ((name, wrong),) = json.loads(captured.out)["not_read"].items()
    assert Path(name).name == "3.png"
    assert captured.err.splitlines() == [f"not read: {wrong}"]


def test_a_process_that_can_read_nothing_takes_part_in_a_dry_run(here: Path) -> None:
    photos = write_pictures(here / "pictures")
    theirs = [
        place for share in EpochSampler(12, batch_size=4, shuffle=True, seed=3, rank=1, world=2) for place in share
    ]
    for place in theirs:
        (here / "pictures" / f"{place}.png").write_bytes(b"no picture")
    words = [str(photos), *SMALL, "data.on_error=skip", "data.val_fraction=0", "model.image_size=64", "train.seed=3"]
    first, second = run_together(run_verb, ["train", *words, "--dry-run", "--json"])
    assert (first.status, second.status, second.err) == (0, 0, "")
    assert {Path(name).stem for name in json.loads(first.out)["not_read"]} == set(map(str, theirs))


def test_lines_without_a_terminal_tell_time_losses_and_speed(here: Path, capsys: Errors) -> None:
    train(*SCENES, "--out", "run")
    lines = capsys.readouterr().err.splitlines()
    assert "train: 1 of 12" in lines
    number = r"[\d.e+-]+"
    train_line = (
        rf"train: 7 of 12, \d:\d\d:\d\d left, loss {number} \(image {number}, patch {number}\), {number} pictures/s"
    )
    assert any(re.fullmatch(train_line, line) for line in lines), lines
    assert any(
        re.fullmatch(r"epoch 2: validation mAP image \d+\.\d\d, patch \d+\.\d\d, tde \d+\.\d\d", line) for line in lines
    )
    assert not any("\x1b" in line for line in lines)


def test_bars_on_a_terminal_tell_time_losses_and_speed(here: Path) -> None:
    test = "data.test=scenes:@test-same?count=20&size=32"
    shown = show_on_terminal(
        [sys.executable, "-m", "pivotpatch", "train", *SCENES, test, "train.epochs=3", "--out", "run"]
    )
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    number = r"[\d.e+-]+"  # whole, with the time left before it
    assert re.search(
        rf"train .* 18/18 \d:\d\d:\d\d loss {number} \({number} \+ {number}\), {number} pictures/s", plain
    ), shown
    assert "epoch 3: validation mAP image" in plain
    assert re.search(r"test scenes:@test-same\?count=20&size=32 .*1/1", plain)
    assert "best validation mAP" in plain


def show_on_terminal(command: list[str]) -> str:
    """What a program writes where all that it writes to is a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
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
