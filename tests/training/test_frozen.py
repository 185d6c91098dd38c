"""A frozen backbone: features are computed once and never stale, heads alone learn, and nothing is lost on the way."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from run_process import TrainingProcess, crash, make_config, read_run, when, write_images, write_pictures

from pivotpatch.data.address import open_records
from pivotpatch.data.loading import hold_images
from pivotpatch.data.scenes import SCENE_LABELS
from pivotpatch.errors import InputError
from pivotpatch.inference.scoring import evaluating
from pivotpatch.models import Architecture, Embeddings, IndependentClassifier, MultiLabelClassifier, PatchClassifier
from pivotpatch.models.open import load_checkpoint, open_model
from pivotpatch.process import ignore
from pivotpatch.runtime.values import Patching
from pivotpatch.training import fit, load_config, resume
from pivotpatch.training.build import Run, build_run
from pivotpatch.training.config import RunConfig, settle_config
from pivotpatch.training.dry_run import try_run
from pivotpatch.training.features import FOLDER, Embedder, Features, Ordinary, find_ordinary, read_features
from pivotpatch.training.model import choose_frozen
from pivotpatch.training.processes import make_accelerator
from pivotpatch.training.task import Kept, PatchTask, make_loss, make_task

IMAGES = "data.train=scenes:@train?count=72&size=32"
KNOWN = SCENE_LABELS.names[:5]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that was trained for a moment, on images of another seed, and knows half of the labels."""
    folder = tmp_path_factory.mktemp("start")
    fit(make_config("train.epochs=1", "task.closer_size=48", f"data.labels={list(KNOWN)}"), folder / "run")
    return str(folder / "run" / "best")


def freeze(start: str, *changes: str) -> RunConfig:
    """40 steps on features of 58 images, 14 are held out."""
    own = ("model.backbone=resnet101.tv_in1k", "model.image_size=", "task.closer_size=48", "train.epochs=5")
    return make_config(IMAGES, f"model.start_from={start}", *own, *changes)


def build(config: RunConfig, keep: Path | None = None) -> Run:
    return build_run(config, make_accelerator(config), keep=keep)


@pytest.fixture(scope="session")
def whole(start: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A frozen run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fit(freeze(start), folder)
    return folder


def test_only_heads_learn_and_all_that_other_verbs_need_is_there(start: str, whole: Path) -> None:
    before, after = load_checkpoint(start), load_checkpoint(whole / "best")
    learned = {name for name, value in after.state_dict().items() if not torch.equal(value, before.state_dict()[name])}
    last = ("head.project", "patch_projection", "weight_projection")
    assert learned == {f"{place}.{part}" for place in last for part in ("weight", "bias")}
    assert None not in (after.thresholds, after.calibration, after.adaptive)
    assert len(list((whole.parent / FOLDER).iterdir())) == 72
    metrics = load_metrics(whole)
    gain = metrics["gain"]
    assert (metrics["frozen"], metrics["tuned"]["images"], gain["images"]) == (True, 58, 72)
    assert gain["gained"] == pytest.approx(gain["after"] - gain["before"])
    assert gain["interval"][0] <= gain["gained"] <= gain["interval"][1]


def load_metrics(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "metrics.json").read_text()))


def test_what_is_kept_gives_the_same_run_and_nothing_is_computed_again(
    start: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole.parent / FOLDER, tmp_path / FOLDER)
    monkeypatch.setattr(Embedder, "_compute", lambda *_: crash())
    fit(freeze(start), tmp_path / "again")
    assert read_run(tmp_path / "again") == read_run(whole)


def test_a_dry_run_tells_what_heads_alone_take_and_what_all_of_it_would(start: str, here: Path) -> None:
    tried = try_run(freeze(start), make_accelerator(freeze(start)))
    assert (tried.pictures, tried.val_pictures, tried.steps, tried.held_bytes) == (58, 14, 40, 0)
    assert tried.seconds > 40 * tried.seconds_per_step + tried.seconds_per_validation > 0
    told = r"the backbone of .* is trained already; --full would train everything, in about \d+ (s|minutes)$"
    assert re.search(told, tried.choices["model.frozen"])
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(("stage", "done"), [("features", 40), ("features", 66), ("train", 22)])
def test_a_run_that_stops_among_features_or_heads_goes_on_to_the_same_end(
    stage: str, done: int, start: str, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        fit(freeze(start), out, progress=when(stage, done, crash))
    kept = sorted((tmp_path / FOLDER).iterdir())
    assert bool(kept) and not list((tmp_path / FOLDER).glob("*.tmp"))  # noqa: PT018
    kept[0].write_bytes(kept[0].read_bytes()[:-100])  # as a power cut may leave it
    assert not resume(out).stopped_by
    assert read_run(out) == read_run(whole)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_end(start: str, whole: Path, tmp_path: Path) -> None:
    process = TrainingProcess(tmp_path / "run", freeze(start))
    while process.hear() != ("features", 24):
        pass
    process.kill()
    resume(tmp_path / "run")
    assert read_run(tmp_path / "run") == read_run(whole)


def test_what_the_same_weights_see_in_another_way_is_kept_apart() -> None:
    names = set()
    for regions, options in ((False, {}), (True, {}), (False, {"output_stride": 8}), (False, {"act_layer": "silu"})):
        torch.manual_seed(0)
        architecture = Architecture("test_resnet", image_size=32, backbone_options=options)
        task = make_task(PatchClassifier(architecture, ["cat"], regions=regions), make_config())
        embedder = Embedder(task, None, make_accelerator(make_config()), torch.float32)
        names.add(embedder._own)
    assert len(names) == 4


def test_two_runs_may_compute_the_same_features_at_once(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, save = build(freeze(start)), np.save
    embedder = Embedder(run.task, tmp_path, run.accelerator, run.dtype)

    def save_twice(*args: Any, **options: Any) -> None:
        """In the moment in which the other writes its own, whole."""
        save(*args, **options)
        monkeypatch.setattr(np, "save", save)
        embedder.fill([Features(run.records[:1])], ignore)

    monkeypatch.setattr(np, "save", save_twice)
    embedder.fill([Features(run.records[:1])], ignore)
    assert [path.suffix for path in tmp_path.iterdir()] == [".npy"]


def test_features_are_what_the_model_makes_of_views_whatever_images_are_beside(start: str) -> None:
    run = build(freeze(start))
    embedder, model = run.embedder, run.task.model
    assert embedder is not None
    some, other = Features(run.records[:12]), Features(run.records[8:11])
    for features in (some, other):
        embedder.fill([features], ignore)
    torch.testing.assert_close(some.kept[8:11], other.kept, rtol=1e-3, atol=1e-3)
    assert isinstance(model, PatchClassifier)
    pixels = hold_images(run.records[:12], size=(32, 32)).images
    with evaluating(model), torch.inference_mode():
        expected = model.embed_views(*run.task.make_views(pixels)[:3])
    found = read_features(some.kept, model)
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=2e-3, atol=2e-3)


def change_image(_: Run, folder: Path) -> None:
    ImageOps.invert(Image.open(folder / "0003.png").convert("RGB")).save(folder / "0003.png")


def change_backbone(run: Run, _: Path) -> None:
    with torch.no_grad():
        next(run.task.model.parameters()).mul_(1.01)


def change_overlap(run: Run, _: Path) -> None:
    assert isinstance(run.task.model, PatchClassifier)
    run.task.model.patching = Patching(overlap=0.5)


@pytest.mark.parametrize(
    ("change", "computed"), [(change_image, 1), (change_backbone, 40), (change_overlap, 40), (lambda *_: None, 0)]
)
def test_stale_has_another_name(change: Callable[[Run, Path], None], computed: int, start: str, tmp_path: Path) -> None:
    table = write_images(tmp_path / "images")
    run = build(freeze(start), keep=None)

    def fill() -> int:
        embedder = Embedder(run.task, tmp_path / FOLDER, run.accelerator, run.dtype)
        before = len(list((tmp_path / FOLDER).glob("*.npy")))
        embedder.fill([Features(open_records(table))], ignore)
        return len(list((tmp_path / FOLDER).glob("*.npy"))) - before

    assert fill() == 40
    (image,) = (tmp_path / "images").rglob("0003.png")
    change(run, image.parent)
    assert fill() == computed


def test_heads_of_a_fold_learn_from_all_others_and_the_model_from_all() -> None:
    torch.manual_seed(0)
    task = PatchTask(PatchClassifier("test_resnet", ["a", "b"], image_size=32), make_loss(load_config(None).loss))
    task.freeze(folds=2)
    width, target = task.model.backbone.features, torch.tensor([[1.0, 0.0], [0.0, torch.nan], [1.0, 1.0]])
    seen = Embeddings(torch.randn(3, width), torch.randn(3, 4, width))
    parts = task(Kept(seen, torch.tensor([0, 1, 0])), target)
    torch.testing.assert_close(parts, task.judge(task.model, seen, target))  # what folds cost is not told
    parts.sum().backward()
    for number, rows in enumerate(([1], [0, 2])):
        alone = PatchTask(task.model, task.loss)
        weights = list(task.model.head.project.parameters())
        expected = torch.autograd.grad(
            alone.judge(task.model, Embeddings(*(part[rows] for part in seen if part is not None)), target[rows]).sum(),
            weights,
        )
        heads = task.folds[number]
        found = [weight.grad for weight in heads.head.project.parameters()]  # type: ignore[union-attr]
        torch.testing.assert_close(found, list(expected))
    assert all(weight.grad is None for weight in task.model.backbone.parameters())


def test_labels_that_were_known_keep_what_ranks_best(start: str, tmp_path: Path) -> None:
    """Nothing where too large a rate has spoiled them; labels that are new keep all."""
    rates, found = ("0.5", "2e-3"), []
    first = load_checkpoint(start).state_dict()
    for rate in rates:
        out = tmp_path / rate
        fit(freeze(start, f"frozen.lr={rate}"), out)
        found.append(load_metrics(out)["tuned"]["kept"])
        learned, last = (load_checkpoint(out / name).state_dict() for name in ("last", "best"))
        for name in ("head.project.weight", "patch_projection.bias", "weight_projection.weight"):
            known = torch.lerp(first[name], learned[name][: len(KNOWN)], found[-1])
            torch.testing.assert_close(last[name], torch.cat([known, learned[name][len(KNOWN) :]]))
    assert found[0] == 0


def test_a_known_label_that_no_image_shows_stays_as_it_was(start: str, tmp_path: Path) -> None:
    write_pictures(tmp_path / "images", 72)
    rows = "".join(f"{number:04d}.png,0,{number % 2}\n" for number in range(72))
    (tmp_path / "images" / "all.csv").write_text(f"image,{KNOWN[0]},blue\n{rows}")
    fit(freeze(start, f"data.train=table:{tmp_path / 'images' / 'all.csv'}"), tmp_path / "run")
    assert load_metrics(tmp_path / "run")["tuned"]["kept"] == 0
    before, after = (
        load_checkpoint(each).state_dict()["head.project.weight"] for each in (start, tmp_path / "run/best")
    )
    assert torch.equal(before[0], after[0])


def test_folds_do_not_change_what_the_model_learns(start: str, tmp_path: Path) -> None:
    """Nor do clipped gradients: each head's own are clipped."""
    learned = []
    for folds in (0, 2, 100):  # of the last there are as many as images allow
        out = tmp_path / str(folds)
        fit(freeze(start, f"frozen.folds={folds}", "optimiser.clip_norm=0.5", "train.epochs=2"), out)
        learned.append(load_checkpoint(out / "last").state_dict()["head.project.weight"])
    assert torch.equal(learned[0], learned[1])
    assert torch.equal(learned[0], learned[2])


def test_ordinary_images_teach_all_heads_as_images_without_the_new_labels_would() -> None:
    torch.manual_seed(0)
    model = PatchClassifier("test_resnet", ["known", "new"], image_size=32, patching=Patching(closer_size=48))
    task = PatchTask(model, make_loss(load_config(None).loss))
    task.freeze(folds=2)
    width = model.backbone.features
    seen, other = (
        Embeddings(torch.randn(count, width), torch.randn(count, 4, width), *closer)
        for count, closer in ((3, (torch.randn(3, width), torch.randn(3, 4, width))), (5, ()))
    )
    target, fold, absent = (
        torch.tensor([[1.0, 0], [0, 1], [1, 1]]),
        torch.tensor([0, 1, 0]),
        torch.tensor([torch.nan, 0]),
    )
    weights = [weight for weight in task.parameters() if weight.requires_grad]
    plain = task(Kept(seen, fold), target)
    both = task(Kept(seen, fold, other, absent), target)
    torch.testing.assert_close(both, plain)  # what ordinary images cost is not told
    costs = [task.judge(heads, other, absent.expand(5, 2)).sum() for heads in (model, *task.folds)]
    found = torch.autograd.grad(both.sum(), weights)
    expected = torch.autograd.grad(plain.sum() + sum(costs), weights)
    torch.testing.assert_close(found, expected)
    without = torch.autograd.grad(task(Kept(seen, fold), target).sum(), weights)
    for one, two in zip(found, without, strict=True):  # a row of a label that is known learns nothing from them
        torch.testing.assert_close(one[0], two[0])
        assert not torch.equal(one[1], two[1])


def test_processes_share_the_ordinary_images_of_a_batch() -> None:
    seen, numbers = Embeddings(torch.arange(50.0)[:, None]), torch.arange(100, 164)
    ordinary = Ordinary(seen, torch.zeros(1), 0.3)
    whole = ordinary.draw(torch.arange(64), numbers)
    parts = [ordinary.draw(torch.arange(start, 64, 3), numbers) for start in range(3)]
    assert whole is not None
    assert len(whole.image) == 19  # of 64 images, 0.3 each
    found = torch.cat([part.image for part in parts if part is not None])
    assert sorted(found.flatten().tolist()) == sorted(whole.image.flatten().tolist())
    assert ordinary.draw(torch.arange(0), numbers) is None


def test_ordinary_images_are_the_taggers_and_fill_up_for_labels_that_are_new_to_it() -> None:
    records = open_records(IMAGES.removeprefix("data.train="))
    records = records.keep_labels(records.labels.names[:2])
    tagger = open_model("tagger")
    assert isinstance(tagger, PatchClassifier)
    assert find_ordinary(tagger, records, share=1.0) is None  # all its labels are its own
    tagger.labels = ("my mug", *tagger.labels[1:])
    bare = (records.target() == 0).all(dim=1).float().mean().item()
    assert 0 < bare < 1
    found = find_ordinary(tagger, records, share=1.0)
    assert found is not None
    assert found.share == pytest.approx(1 - bare)
    assert found.absent.isfinite().tolist() == [True] + [False] * (len(tagger.labels) - 1)
    assert found.seen.image.shape == (1000, tagger.backbone.features)
    assert find_ordinary(tagger, records, share=bare) is None
    assert find_ordinary(PatchClassifier("test_resnet", ["a"], image_size=32), records, share=1.0) is None


def test_unknown_labels_and_images_that_cannot_be_read_are_left_out(start: str, tmp_path: Path) -> None:
    table = write_images(tmp_path / "images", broken=(3, 7))
    changes = (f"data.train={table}", "data.on_error=skip", "data.val_fraction=0.25", "train.epochs=2")
    result = fit(freeze(start, *changes), tmp_path / "run")
    assert sorted(Path(name).name for name in result.metrics["not_read"]) == ["0003.png", "0007.png"]
    assert result.metrics["gain"]["images"] in (8, 9, 10)  # too few for folds: what is held out alone


def test_training_everything_tells_its_gain_too(start: str, tmp_path: Path) -> None:
    told: list[str] = []
    result = fit(freeze(start, "model.frozen=false", "train.epochs=1"), tmp_path / "run", tell=told.append)
    gain = result.metrics["gain"]
    assert (result.metrics["frozen"], gain["images"], gain["trained_on"]) == (False, 14, 0)
    assert any(line == "model.frozen is false, as asked for" for line in told)
    assert any(line.startswith("before any step: mAP ") for line in told)
    assert not (tmp_path / FOLDER).exists()


def test_validation_images_that_are_trained_on_are_counted(start: str, tmp_path: Path) -> None:
    same = IMAGES.replace("data.train", "data.val")
    gain = fit(freeze(start, same, "train.epochs=1"), tmp_path / "run").metrics["gain"]
    assert (gain["images"], gain["trained_on"]) == (144, 72)  # once by heads of folds, once by those that learned


def test_what_is_chosen(start: str) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    given, new = freeze(start), make_config()
    plain = MultiLabelClassifier("test_resnet", ["a"])
    decoder = MultiLabelClassifier(Architecture("test_resnet", "ml_decoder", 32, {}, {"width": 16}), ["a"])
    found = [choose_frozen(*each)[0] for each in ((given, plain, cpu), (given, plain, gpu), (new, plain, cpu))]
    assert found == [True, False, False]
    without = (decoder, IndependentClassifier("test_resnet", ["a"]))
    assert not any(choose_frozen(given, each, cpu)[0] for each in without)
    with pytest.raises(InputError, match="model.frozen: is true, and the ml_decoder head is more than a last step"):
        choose_frozen(settle_config(given, frozen=True), decoder, cpu)


def test_numbers_of_a_user_are_those_of_the_heads_too_and_of_a_recipe_are_not(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[train]\nepochs = 7\n[optimiser]\nlr = 0.5\n")
    config = load_config(tmp_path / "mine.toml", ["train.batch_size=9"])
    frozen, full = settle_config(config, frozen=True), settle_config(config, frozen=False)
    assert (full.train.epochs, full.train.batch_size, full.optimiser.lr) == (7, 9, 0.5)
    assert (frozen.train.batch_size, frozen.train.epochs) == (9, config.frozen.epochs)
    assert frozen.optimiser.lr == config.frozen.lr
    assert np.isclose(frozen.ema.decay, 0)
