"""What a run begins with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from run_process import make_config, write_images

from pivotpatch.errors import InputError
from pivotpatch.models import load_checkpoint, save_checkpoint
from pivotpatch.models.classifier import Classifier, IndependentClassifier, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.values import Adaptive, Calibration, Patching
from pivotpatch.training.config import dump_config, load_config
from pivotpatch.training.images import open_data, open_training_records
from pivotpatch.training.loop import fit
from pivotpatch.training.model import make_model, settle_model

LABELS = ("cat", "dog")
NEW_LABELS = ("lamp", "dog", "sofa")


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        (MultiLabelClassifier, "image"),
        (MultiLabelClassifier, "patch"),
        (PatchClassifier, "patch_only"),
        (IndependentClassifier, "independent"),
    ],
)
def test_what_was_fitted_to_other_weights_does_not_go_on(kind: type[Classifier], task: str, tmp_path: Path) -> None:
    model = kind("test_vit", LABELS, image_size=32)
    if isinstance(model, PatchClassifier):
        model.set_mixing(lam=2.0, temperature=0.25)
    model.thresholds = (0.3, 0.4)
    model.calibration = Calibration("image", "platt", (2.0, 2.0), (1.0, 1.0))
    model.adaptive = Adaptive(model.calibration, (0.0, 0.5))
    save_checkpoint(model, tmp_path / "first")
    stored = load_checkpoint(tmp_path / "first")
    assert (stored.calibration, stored.adaptive) == (model.calibration, model.adaptive)
    config = load_config(None, [f"model.start_from={tmp_path / 'first'}", f"task.kind={task}", "task.lam=0.7"])
    again = make_model(config, LABELS)
    assert (again.thresholds, again.calibration, again.adaptive) == (None, None, None)
    assert torch.equal(next(again.parameters()), next(model.parameters()))
    if isinstance(again, PatchClassifier):
        assert (again.patching.lam, again.patching.temperature) == (0.7, 1.0)
        assert again.patch_only == (task == "patch_only")


def test_only_pat_looks_closer() -> None:
    for kind in ("image", "patch_only"):
        with pytest.raises(InputError, match=f"task.closer_size: task.kind is {kind}; leave it out, or train"):
            make_model(load_config(None, ["task.closer_size=48", f"task.kind={kind}"]), LABELS)


@pytest.mark.parametrize("task", ["image", "patch"])
def test_an_ordinary_model_may_go_on_with_other_labels(task: str, tmp_path: Path) -> None:
    first = MultiLabelClassifier("test_vit", LABELS, image_size=32)
    save_checkpoint(first, tmp_path / "first")
    config, told = load_config(None, [f"model.start_from={tmp_path / 'first'}", f"task.kind={task}"]), list[str]()
    again = make_model(config, NEW_LABELS, tell=told.append)
    assert told == ["starting from a model that knows 1 of 3 labels: dog; new: lamp, sofa"]
    assert isinstance(again, PatchClassifier if task == "patch" else MultiLabelClassifier)
    assert again.labels == NEW_LABELS
    shared = [model.state_dict()["head.project.weight"][model.labels.index("dog")] for model in (again, first)]
    torch.testing.assert_close(*shared)
    assert torch.equal(next(again.parameters()), next(first.parameters()))
    make_model(config, LABELS[::-1], tell=told.append)
    assert len(told) == 1  # all are known
    save_checkpoint(IndependentClassifier("test_vit", LABELS, image_size=32), tmp_path / "first", overwrite=True)
    with pytest.raises(InputError, match=f"IndependentClassifier, which task.kind={task} cannot train"):
        make_model(config, NEW_LABELS)


def test_all_faults_of_the_data_are_told_together_before_any_work(tmp_path: Path) -> None:
    train, other = write_images(tmp_path / "a", broken=[3, 4]), write_images(tmp_path / "b", broken=[0])
    (tmp_path / "a" / "0007.png").unlink()
    whole = (tmp_path / "a" / "0008.png").read_bytes()
    (tmp_path / "a" / "0008.png").write_bytes(whole[:-24])
    table = tmp_path / "a" / "all.csv"
    table.write_text(table.read_text() + "0039.png,blue\n" * 2 + "x.png,Blue\n")
    table.write_text(table.read_text().replace("0039.png,red", "0039.png,blue"))
    changes = [f"data.train={train}", f"data.test=['{other}', '{other}?labels=tags', 'table:none.csv']"]
    told = list[str]()
    with pytest.raises(InputError, match=r"b/all\.csv: there is no column 'tags' \(the first of 8 faults that"):
        open_data(load_config(None, changes), tell=told.append)
    assert len(told) == 5 + 4
    assert "b/all.csv: there is no column 'tags'; " in told[0]
    assert "none.csv: there is no such table" in told[1]
    assert all(line.endswith("with data.on_error=skip") for line in told[2:5])
    assert told[5].endswith("a/all.csv: 2 of 43 rows repeat an earlier one and were dropped")
    assert told[6].endswith("b/all.csv: without Blue, so not judged by it")
    assert told[7].startswith("1 label is seen in one image alone, too few to learn and to split")
    assert told[8].startswith("labels that differ by capitals or blanks alone are learned as different ones (write")
    # Image faults alone: which images, whatever part of the data they fell into.
    told.clear()
    with pytest.raises(InputError, match=r"found\); replace it, take its row out, or skip .* data.on_error=skip"):
        open_data(load_config(None, changes[:1]), tell=told.append)
    assert {Path(line.split(":")[0]).name for line in told[:5]} == {
        "0003.png", "0004.png", "0007.png", "0008.png", "x.png"
    }  # fmt: skip
    read: Any = open_data(load_config(None, [changes[0], "data.on_error=skip"]))
    assert len(read.train) + len(read.val) == 41
    assert open_data(load_config(None, changes[:1]), look=False).train.labels == read.train.labels


def test_images_that_choose_or_judge_may_lack_labels_and_are_told_where_it_learns_from_them(tmp_path: Path) -> None:
    train, val = tmp_path / "train.csv", tmp_path / "val.csv"
    train.write_text("image,labels\na,cat|dog\nb,cow\nc,dog\n")
    val.write_text("image,labels\nc,dog\nd,cat|eel\n./a,\n")
    told = list[str]()
    changes = [f"data.train={train}", f"data.val={val}", f"data.test=['{val}']"]
    for name in "abcd":
        Image.new("RGB", (4, 4)).save(tmp_path / name, "png")
    read: Any = open_data(load_config(None, changes), tell=told.append)
    expected = [[0.0, float("nan"), 1.0], [1.0, float("nan"), 0.0], [0.0, float("nan"), 0.0]]  # cat, cow, dog
    for records in (read.val, *read.tests.values()):
        assert records.labels == read.train.labels
        torch.testing.assert_close(records.target(), torch.tensor(expected), equal_nan=True)
    lines = [
        f"table:{val}: without cow, so not judged by it; eel not among the labels that are learned",
        f"table:{val}: 2 of its 3 images are training images too, so its metrics are too high; take them out of one",
    ]
    assert [line for line in told if "val.csv" in line] == lines
    chosen = list[str]()
    open_data(load_config(None, [*changes, "data.labels=['cat', 'dog']"]), look=False, tell=chosen.append)
    assert [line for line in chosen if "eel" in line or "cow" in line] == []
    val.write_text("image,labels\nc,eel\n")
    with pytest.raises(InputError, match="unknown label 'cat'"):
        open_data(load_config(None, changes), look=False)


def test_teachers_of_some_labels_hold_out_the_images_of_their_student() -> None:
    scenes = "data.train=scenes:@train?count=60&size=32"
    whole = open_training_records(load_config(None, [scenes]))
    some = open_training_records(load_config(None, [scenes, "data.labels=['seven', 'one']"]))
    assert some.train.labels.names == ("seven", "one")
    for part in ("train", "val"):
        all_labels, two = (getattr(each, part) for each in (whole, some))
        assert torch.equal(two.target(), all_labels.keep_labels(["seven", "one"]).target())
        assert [record.name for record in two] == [record.name for record in all_labels]


def test_some_labels_may_be_nowhere_to_be_judged(tmp_path: Path) -> None:
    """As for a teacher of a rare one: the last model is kept, and corrections of other labels are none of its own."""
    train, other = write_images(tmp_path / "a"), write_images(tmp_path / "b")
    table = tmp_path / "a" / "all.csv"
    table.write_text(table.read_text().replace("0039.png,blue", "0039.png,rare"))
    corrections = tmp_path / "a" / "reviewed.csv"
    corrections.write_text("image,red\n0000.png,1\n../b/0000.png,1\n")
    named = [f"data.train={train}", f"data.corrections=table:{corrections}?allow_escape=true"]
    told = list[str]()
    rare: Any = open_data(load_config(None, [*named, f"data.test={other}", "data.labels=['rare']"]), tell=told.append)
    assert (len(rare.train), rare.val, rare.tests) == (36, None, {})
    assert [line for line in told if line.endswith("any of the labels, so the last model is kept")]
    assert [line for line in told if line.startswith(other) and line.endswith("so it is not scored")]
    red: Any = open_data(load_config(None, [*named, f"data.test={other}", "data.labels=['red']"]), look=False)
    assert (len(red.train), len(red.val), [*red.tests]) == (36, 4, [other])
    corrections.write_text("image,green\n0000.png,1\n")
    with pytest.raises(InputError, match="knows none of the labels"):
        open_data(load_config(None, [*named, "data.labels=['rare']"]), look=False)


def test_a_checkpoint_decides_how_patches_are_cut_where_nothing_is_said(tmp_path: Path) -> None:
    cut = Patching(3, 0.25, source_size=48, closer_size=40, lam=0.5)
    save_checkpoint(PatchClassifier("test_resnet", LABELS, image_size=32, patching=cut), tmp_path / "first")
    start, told = f"model.start_from={tmp_path / 'first'}", list[str]()
    config = settle_model(load_config(None, [start, "task.overlap=0"]), tell=told.append)
    model: Any = make_model(config, LABELS)
    assert model.patching == Patching(3, source_size=48, lam=0.5)  # closer looks cost as much again
    assert (config.model.backbone, config.model.image_size) == ("test_resnet", 32)
    assert told == [
        f"patches are those of {tmp_path / 'first'}, task.grid=3 task.source_size=48 task.lam=0.5; give others to "
        "change that"
    ]
    for asked in (["task.regions=true"], ["task.kind=patch_only", "task.grid=2"]):  # which no source_size, no regions
        make_model(settle_model(load_config(None, [start, *asked])), LABELS)
    save_checkpoint(PatchClassifier("test_resnet", LABELS, image_size=32, regions=True), tmp_path / "regions")
    regions, told[1:] = f"model.start_from={tmp_path / 'regions'}", []
    for asked, kept in (([], True), (["task.source_size=48"], False), (["task.kind=patch_only"], False)):
        built: Any = make_model(settle_model(load_config(None, [regions, *asked])), LABELS)
        assert built.regions == kept
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config))
    assert settle_model(load_config(path)) == config  # as a run that is resumed
    with pytest.raises(
        InputError, match=r"model.head: is 'max', but .*first decides it; leave it out, or write model.head=linear"
    ):
        settle_model(load_config(None, [start, "model.head=max"]))


def test_more_regions_than_places_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = make_config("task.regions=true", "task.grid=3")
    with pytest.raises(InputError, match="task.grid: is 3, and the feature map of 32 pixels has 1 x 1 places"):
        fit(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
