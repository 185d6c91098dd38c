"""CPSD: how labels are divided, what a student learns from teachers, and that all are trained by one command."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_networks import TINY
from run_process import write_images

from pivotpatch import load_checkpoint, save_checkpoint
from pivotpatch.cli.main import main
from pivotpatch.data.address import open_records
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import Architecture, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.views import Views
from pivotpatch.peers.cpsd import Teachers, divide_labels, find_similarity
from pivotpatch.training.config import load_config
from pivotpatch.training.folder import RunFolder
from pivotpatch.training.loop import fit
from pivotpatch.training.step import take_step
from pivotpatch.training.task import StudentTask, make_task

SCENES = "scenes:@train?count=32&size=64"
PLAIN = ["augment.cutout=0", "augment.operations=0", "ema.decay=0", "data.val_fraction=0"]


def make(*labels: str, seed: int = 0) -> MultiLabelClassifier:
    torch.manual_seed(seed)
    return MultiLabelClassifier("test_resnet", labels, image_size=64).eval()


def test_similarity_is_one_entry_at_a_time_that_of_the_published_code() -> None:
    counts = np.array([[9, 6, 0], [6, 8, 1], [0, 1, 0]])  # of the last there is no image
    found = find_similarity(counts)
    for i in range(3):
        for j in range(3):
            shares = [counts[i, j] / max(counts[k, k], 1) for k in (i, j)]
            assert found[i, j] == pytest.approx(0.0 if i == j else (shares[0] ** 0.5 + shares[1] ** 0.5) / 2)


def test_labels_are_divided_by_what_they_occur_with() -> None:
    """Things that occur in one of three rooms only: a group each. The same if a thing never meets those of its room."""
    rooms = np.arange(9) % 3
    alike, names = rooms[:, None] == rooms, [f"{thing}{room}" for thing, room in zip("abcdefghi", rooms, strict=True)]
    expected = {frozenset(name for name in names if name.endswith(str(room))) for room in range(3)}
    for kind, meet in (("together", alike), ("apart", ~alike)):
        counts = np.where(meet, 40, 1)
        np.fill_diagonal(counts, 60)
        groups = divide_labels(names, counts, 3)
        assert {frozenset(group) for name, group in groups.items() if name.startswith(kind)} == expected
        for each in ("together", "apart"):
            held = [label for name, group in groups.items() if name.startswith(each) for label in group]
            assert sorted(held) == sorted(names)
    assert divide_labels(["x", "y"], counts[:2, :2], 5).keys() == {"together-1", "together-2", "apart-1", "apart-2"}
    assert divide_labels(names, counts, 1).keys() == {"together-1", "apart-1"}


def test_a_student_is_judged_by_labels_and_by_the_teachers_of_each(tmp_path: Path) -> None:
    student, teachers = make("a", "b", "c"), [make("c", "a", seed=1), make("a", seed=2)]
    for number, teacher in enumerate(teachers):
        save_checkpoint(teacher, tmp_path / str(number))
    names = ", ".join(f"'{tmp_path / str(number)}'" for number in range(2))
    config = load_config(None, ["task.kind=image", f"distil.teachers=[{names}]", "distil.share=0.3"])
    task = make_task(student, config)
    assert isinstance(task, StudentTask)
    assert task.state_dict().keys() == {f"model.{key}" for key in student.state_dict()}
    nan = float("nan")  # the last image is one that only fills a batch
    images = torch.randn(4, 3, 64, 64)
    target = torch.tensor([[1.0, 0, 0], [0, nan, 1], [0, 1, 1], [nan, nan, nan]])
    with torch.no_grad():
        found = task(Views(images, torch.empty(4, 0, 3, 64, 64)), target)
        told = [teacher(images) for teacher in teachers]
        logits, total = student(images), 0.0
        for row in range(3):
            total += (logits[row, 0] - told[0][row, 1]).item() ** 2 / 2  # "a" has two teachers
            total += (logits[row, 0] - told[1][row, 0]).item() ** 2 / 2
            total += (logits[row, 2] - told[0][row, 0]).item() ** 2  # "c" has one, "b" none
    assert found.tolist() == pytest.approx([0.7 * task.loss(logits, target).item(), 0.3 * total], rel=1e-4)
    before = {key: value.clone() for key, value in teachers[0].state_dict().items()}
    task.train()(Views(images, torch.empty(4, 0, 3, 64, 64)), target).sum().backward()
    held = task.teachers.models[0]
    assert all(torch.equal(value, before[key]) for key, value in held.state_dict().items())  # norms have seen nothing
    assert all(weight.grad is None for weight in held.parameters())


def test_teachers_that_cannot_teach_are_refused() -> None:
    with pytest.raises(InputError, match="labels that the student lacks, such as 'z'"):
        Teachers([make("a", "z")], make("a", "b"))
    other = MultiLabelClassifier("test_resnet", ["a"], image_size=32)
    with pytest.raises(InputError, match="does not see images as the student does"):
        Teachers([other], make("a", "b"))
    with pytest.raises(InputError, match="distil.groups: task.kind is patch"):
        make_task(PatchClassifier("test_resnet", ["a"], image_size=64), load_config(None, ["distil.groups=2"]))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ((), "distil.groups: task.kind is patch"),
        (("task.kind=image", "mix.share=0.5"), "mix.share: is 0.5, and teachers see no grids"),
        (("task.kind=image", "mix.consistent=true"), "mix.consistent: there are no grids, mix.share is 0"),
        (("task.kind=image", "model.head=c_tran"), "model.head: c_tran is trained in a way of its own"),
        (("task.kind=image", "model.start_from=start"), "model.head: rarl is trained in a way of its own"),
        (("task.kind=windows", "distil.groups=0", "model.head=c_tran"), "which task.kind=windows would replace"),
        (
            ("task.kind=image", "distil.groups=0", "mix.share=0.25", "train.accumulate=2"),
            "train.accumulate: is 2, and grids would be made of the images of a part of a batch",
        ),
        (("task.kind=image", "model.frozen=true"), "model.frozen: is true, and mix and distil look at images"),
    ],
)
def test_what_no_student_can_learn_is_refused_before_teachers_are_trained(
    changes: tuple[str, ...], why: str, here: Path
) -> None:
    rarl = Architecture("test_resnet", "rarl", 64, head_options={"hidden": 20})
    save_checkpoint(MultiLabelClassifier(rarl, ["one"]), here / "start")
    config = load_config(None, [f"data.train={SCENES}", *TINY, *PLAIN, "train.epochs=1", "distil.groups=1", *changes])
    with pytest.raises(InputError, match=why):
        fit(config, here / "run")
    assert not list(here.glob("run*"))


def test_a_command_that_was_stopped_in_a_teacher_goes_on_when_it_is_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [SCENES, *TINY, *PLAIN, "train.epochs=1", "train.batch_size=16", "task.kind=image", "distil.groups=1"]
    command = ["train", *words, "--out", str(tmp_path / "run"), "--json"]

    def stop_and_step(*given: Any, **named: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return take_step(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr("pivotpatch.training.loop.take_step", stop_and_step)
        assert main(command) == 128 + signal.SIGINT
    assert "stopped by SIGINT; the same command, given again, goes on" in capsys.readouterr().err
    assert main(command) == 0
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["steps"] == 2


@pytest.mark.slow
def test_one_command_trains_teachers_and_then_the_student(tmp_path: Path) -> None:
    paced = ["train.epochs=40", "train.batch_size=16", "optimiser.lr=2e-3", "task.kind=image", "distil.groups=2"]
    paced.append("model.image_size=32")  # six trainings
    config = load_config(None, [f"data.train={SCENES}", f"data.test={SCENES}", *TINY, *PLAIN, *paced])
    lines: list[str] = []
    result = fit(config, tmp_path / "run", tell=lines.append)
    assert result.metrics["test"][SCENES]["image"]["mean"] > 0.95
    homes = sorted((tmp_path / "run-teachers").iterdir())
    taught = [load_checkpoint(home / "best").labels for home in homes]
    names = open_records(SCENES).labels.names
    assert sorted(label for group in taught for label in group) == sorted([*names, *names])
    assert sum(line.startswith("teacher ") for line in lines) == len(homes) == 4
    (tmp_path / "run").rename(tmp_path / "first")
    again = fit(config, tmp_path / "run", tell=lines.append)  # the same teachers: none is trained twice
    assert again.metrics["test"] == result.metrics["test"]
    (tmp_path / "run").rename(tmp_path / "second")
    changed = config.model_copy(update={"train": config.train.model_copy(update={"seed": 2})})
    with pytest.raises(InputError, match="is a teacher that was trained with other settings"):
        fit(changed, tmp_path / "run")


def test_no_teacher_learns_test_images_that_corrections_name(tmp_path: Path) -> None:
    train, test = write_images(tmp_path / "a"), write_images(tmp_path / "b")
    (tmp_path / "seen.csv").write_text("image,red\na/0000.png,1\nb/0000.png,1\n")
    data = [f"data.train={train}", f"data.test={test}", f"data.corrections=table:{tmp_path / 'seen.csv'}"]
    config = load_config(None, [*data, *TINY, *PLAIN, "train.epochs=1", "task.kind=image", "distil.groups=1"])
    fit(config, tmp_path / "run")
    homes = [tmp_path / "run", *(tmp_path / "run-teachers").iterdir()]
    assert [RunFolder(home, config).load_state().records for home in homes] == [40] * 3
