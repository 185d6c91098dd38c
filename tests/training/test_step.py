from collections.abc import Iterable, Iterator
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from together import find_gradients, run_together, score_counts, train_epoch
from torch import Tensor, nn

from pivotpatch.core.losses import binary_cross_entropy
from pivotpatch.data.loading import Batch
from pivotpatch.training.build import Run, build_run
from pivotpatch.training.config import RunConfig, load_config
from pivotpatch.training.processes import make_accelerator
from pivotpatch.training.step import compile_run, compute_gradients, take_step, time_step

SMALL = (
    "data.val_fraction=0",
    "data.workers=0",
    "data.on_error=skip",
    "model.backbone=test_vit",  # layer norms: an image does not feel its neighbours
    "model.pretrained=false",
    "model.image_size=32",
    "train.epochs=1",
    "train.batch_size=4",
    "evaluation.batch_size=4",
    "output.trackers=[]",
    "augment.flip=0.5",
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Nine images of two labels, some unknown; one is no image at all."""
    root = tmp_path_factory.mktemp("images")
    labels = ["cat", "dog", "cat|dog", "", "cat|?dog", "?cat|?dog", "dog|?cat", "cat", "dog"]
    for place in range(9):
        pixels = np.random.default_rng(place).integers(0, 256, (40, 36, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{place}.png")
    (root / "4.png").write_bytes(b"no image")
    rows = "".join(f"{place}.png,{text}\n" for place, text in enumerate(labels))
    (root / "photos.csv").write_text(f"image,labels\n{rows}")
    return f"table:{root / 'photos.csv'}"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order, as in the other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_config(images: str, *changes: str) -> RunConfig:
    return load_config(None, [f"data.train={images}", *SMALL, *changes])


def make_run(images: str, *changes: str) -> Run:
    config = make_config(images, *changes)
    return build_run(config, make_accelerator(config))


def take_first(run: Run, count: int = 4) -> Batch:
    """A batch that does not depend on the order of the run."""
    images = torch.randint(256, (count, 32, 32, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    target = torch.tensor([[1.0, 0.0], [0.0, torch.nan], [torch.nan, torch.nan], [1.0, 1.0]])[:count]
    return Batch(images.permute(0, 3, 1, 2), target, torch.arange(count), ())


def find_gradient(run: Run, batch: Batch, *, step: int = 0, rows: list[int] | None = None) -> dict[str, Tensor]:
    rows = list(range(len(batch.indices))) if rows is None else rows
    compute_gradients(run, batch, step=step, rows=np.array(rows, dtype=np.int64))
    gradients = {name: w.grad.clone() for name, w in run.task.model.named_parameters() if w.grad is not None}
    run.task.zero_grad()
    return gradients


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    scale = max(value.abs().max().item() for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance * scale, msg=name)


CLOSER = ("task.closer_size=48", "model.backbone_options={dynamic_img_size = true}")
MEAN = "loss.reduction=mean"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [("task.kind=independent", MEAN), ("train.accumulate=2", *CLOSER), ("train.batch_size=1", MEAN)],  # one is empty
    ids=" ".join,
)
def test_two_processes_give_the_gradients_of_one(changes: tuple[str, ...], images: str) -> None:
    """Nine images in batches of 4, 4 and 1, of which one cannot be read: shares are uneven, and one is empty."""
    config = make_config(images, *changes)
    alone, (first, second) = find_gradients(config), run_together(find_gradients, config)
    shares = [(len(mine["images"]), len(theirs["images"])) for mine, theirs in zip(first, second, strict=True)]
    assert (1, 0) in shares
    assert config.train.batch_size > 1 or (0, 0) in shares
    for one, mine, theirs in zip(alone, first, second, strict=True):
        assert sorted(one["images"]) == sorted([*mine["images"], *theirs["images"]])
        np.testing.assert_allclose(mine["parts"] + theirs["parts"], one["parts"], rtol=1e-5)
        names = one.keys() - {"parts", "images"}
        largest = max(np.abs(one[name]).max() for name in names)
        assert (largest > 0) == (one["parts"].sum() > 0)
        for name in names:
            np.testing.assert_array_equal(mine[name], theirs[name])
            np.testing.assert_allclose(mine[name], one[name], rtol=1e-4, atol=1e-5 * largest, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["test_vit", "test_resnet"])
def test_two_processes_train_the_model_of_one(backbone: str, images: str) -> None:
    """But for batch norms, which see the images of their own process, and then agree on what they have seen."""
    changes = (f"model.backbone={backbone}", "optimiser.clip_norm=1", "optimiser.lr=0.01", "ema.decay=0.5")
    config = make_config(images, *changes)
    alone, (first, second) = train_epoch(config), run_together(train_epoch, config)
    start = make_run(images, *changes).task.model.state_dict()
    for one, mine, theirs in zip(alone, first, second, strict=True):
        assert np.abs(one["head.project.weight"] - start["head.project.weight"].numpy()).max() > 1e-3
        for name, value in one.items():
            np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
            # Adam divides by the size of a gradient, also where it is mere rounding, as for what a softmax ignores.
            near = np.isclose(mine[name], value, rtol=0, atol=1e-5)
            ignored = name.endswith(("qkv.bias", "weight_projection.bias"))
            assert near.mean() > 0.9 or ignored or backbone == "test_resnet", name


@pytest.mark.slow
def test_two_processes_score_every_image_once(images: str) -> None:
    counts = [1, 2, 5, 7]
    config = make_config(images)
    alone, both = score_counts(config, counts), run_together(score_counts, config, counts)
    for one, *found in zip(alone, *both, strict=True):
        for part in found:
            assert part["indices"].tolist() == one["indices"].tolist()
            for name in ("target", "image", "patch", "tde", "each"):
                np.testing.assert_allclose(part[name], one[name], rtol=1e-5, atol=1e-6)
    assert [len(one["indices"]) for one in alone] == [1, 2, 4, 6]  # one of five cannot be read


@pytest.mark.parametrize("changes", [("task.kind=patch_only",), (MEAN, *CLOSER)])
def test_accumulation_gives_the_gradient_of_one_pass(changes: tuple[str, ...], images: str) -> None:
    whole, parts = make_run(images, *changes), make_run(images, *changes, "train.accumulate=3")
    assert_same(find_gradient(parts, take_first(parts)), find_gradient(whole, take_first(whole)))


def test_a_mean_is_over_the_labels_that_are_known(images: str) -> None:
    plain = ("augment.flip=0", "augment.cutout=0", "augment.operations=0")  # the views are the images
    run = make_run(images, "loss.reduction=mean", "loss.name=binary_cross_entropy", "task.kind=image", *plain)
    batch = take_first(run)
    found = find_gradient(run, batch)
    logits = run.task.model(run.task.make_views(batch.images).image)
    binary_cross_entropy(logits, batch.target, reduction="mean").backward()
    expected = {name: weight.grad for name, weight in run.task.model.named_parameters() if weight.grad is not None}
    assert_same(found, expected)


def test_what_is_drawn_depends_on_seed_and_step_alone(images: str) -> None:
    dropout = "model.backbone_options={drop_path_rate = 0.5, proj_drop_rate = 0.5}"
    run, again, other = (make_run(images, dropout, f"train.seed={seed}") for seed in (1, 1, 2))
    first = find_gradient(run, take_first(run), step=3)
    find_gradient(run, take_first(run), step=2)
    torch.manual_seed(12345)
    assert_same(find_gradient(again, take_first(again), step=3), first, tolerance=0)
    assert_different(find_gradient(run, take_first(run), step=4), first)
    other.task.load_state_dict(run.task.state_dict())
    assert_different(find_gradient(other, take_first(other), step=3), first)


def assert_different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert any(not torch.allclose(found[name], value, rtol=1e-2) for name, value in expected.items())


@pytest.mark.parametrize("changes", [(), CLOSER])
def test_an_image_has_the_augmentation_of_its_row(changes: tuple[str, ...], images: str) -> None:
    """So that the share of a process, and a batch with a gap, see what the whole batch would have seen."""
    run = make_run(images, *changes)
    batch = take_first(run)
    whole = find_gradient(run, batch)
    summed: dict[str, Tensor] = {}
    for rows in ([0, 2], [1], [3]):
        share = Batch(batch.images[rows], batch.target[rows], batch.indices[rows], ())
        for name, value in find_gradient(run, share, rows=rows).items():
            summed[name] = summed[name] + value if name in summed else value
    assert_same(summed, whole)
    assert_different(find_gradient(run, batch, rows=[3, 2, 1, 0]), whole)


@pytest.mark.parametrize("kind", ["image", "patch"])
def test_autocast_keeps_losses_and_weights_in_float32(kind: str, images: str) -> None:
    run, exact = (
        make_run(images, f"precision.dtype={dtype}", f"task.kind={kind}") for dtype in ("bfloat16", "float32")
    )
    batch = take_first(run)
    numbers, expected = (take_step(each, batch, step=0, rows=np.arange(4)) for each in (run, exact))
    assert numbers.dtype == torch.float32
    assert not torch.equal(numbers, expected)
    torch.testing.assert_close(numbers[:-1], expected[:-1], rtol=0.05, atol=0.05)
    assert all(weight.dtype == torch.float32 for weight in run.task.parameters())


def test_the_order_in_memory_changes_no_number(images: str) -> None:
    changes = ("model.backbone=test_resnet", "model.image_size=64")
    last, first = make_run(images, *changes), make_run(images, *changes, "precision.channels_last=false")
    filters = [weight for weight in last.task.parameters() if weight.ndim == 4 and min(weight.shape[1:3]) > 1]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in filters)
    assert last.average is not None
    assert_same(find_gradient(last, take_first(last)), find_gradient(first, take_first(first)), tolerance=1e-3)
    for run in (last, first):  # a fused optimiser walks through weights, gradients and moments as they lie in memory
        for name, weight in run.task.named_parameters():
            weight.grad = torch.empty_like(weight).copy_(
                torch.sin(torch.arange(weight.numel()) + len(name)).view(weight.shape)
            )
        run.optimiser.step()
    assert_same(dict(last.task.named_parameters()), dict(first.task.named_parameters()), tolerance=1e-6)


@pytest.mark.slow
def test_a_compiled_model_is_the_same(images: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced whole, but run without the code generator, which takes a minute; a smaller batch is not compiled for."""
    traced = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=count, fullgraph=True))
    plain, compiled = make_run(images, *CLOSER), make_run(images, *CLOSER, "precision.compile=true")
    compile_run(compiled, steps_left=1)
    assert compiled.compiled
    assert compiled.task.state_dict().keys() == plain.task.state_dict().keys()
    for number in (4, 3):
        batch = take_first(plain, number)
        assert_same(find_gradient(compiled, batch), find_gradient(plain, batch))
        assert len(traced) == 1


@pytest.mark.slow
def test_many_runs_of_a_process_are_compiled(images: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the teachers of CPSD and their student are, one after the other."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    # monkeypatch would delete the settings at the end, and whatever compiles later in this process would fail.
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for head in ("linear", "max", "csra", "linear"):
            run = make_run(images, f"model.head={head}", "precision.compile=true")
            compile_run(run, steps_left=1)
            find_gradient(run, take_first(run))


def test_timing_a_step_changes_nothing(images: str) -> None:
    run = make_run(images, "model.backbone=test_resnet", "model.image_size=64")
    before = {name: value.clone() for name, value in run.task.state_dict().items()}
    assert time_step(run) > 0
    assert any(name.endswith("running_var") for name in before)
    assert all(torch.equal(value, before[name]) for name, value in run.task.state_dict().items())
    assert all(weight.grad is None for weight in run.task.parameters())


def test_a_step_clips_and_returns_losses_images_and_norm(images: str) -> None:
    run, again = make_run(images, "optimiser.clip_norm=0.1", "train.epochs=100"), make_run(images)
    batch = take_first(run)
    gradients = find_gradient(again, batch)
    *parts, count, measured = take_step(run, batch, step=0, rows=np.arange(4)).tolist()
    assert len(parts) == len(run.task.parts) == 2
    assert count == 4
    assert measured == pytest.approx(find_norm(gradients.values()), rel=1e-5)  # before it is clipped
    assert all(weight.grad is None for weight in run.task.parameters())
    moments = [state["exp_avg"] for state in run.optimiser.state.values()]
    assert find_norm(moments) == pytest.approx(0.1 * (1 - 0.95), rel=1e-4)  # the first moment after one step


def find_norm(values: Iterable[Tensor]) -> float:
    return torch.stack([value.square().sum() for value in values]).sum().sqrt().item()


@pytest.mark.parametrize(("warmup", "decay"), [("true", 1 - (1 + 5) ** (-2 / 3)), ("false", 0.9997)])
def test_a_step_follows_the_cycle_and_moves_the_average(warmup: str, decay: float, images: str) -> None:
    """Of weights and buffers."""
    changes = ("model.backbone=test_resnet", "model.image_size=64", "optimiser.lr=0.01", f"ema.warmup={warmup}")
    run = make_run(images, "train.epochs=10", *changes)
    assert run.total_steps == 30
    assert run.average is not None
    before = {name: value.clone() for name, value in run.task.model.state_dict().items()}
    take_step(run, take_first(run), step=5, rows=np.arange(4))
    places = {(group["lr"], group["betas"]) for group in run.optimiser.param_groups}
    assert places == {(0.01, (0.85, 0.999))}  # the peak
    now, kept = run.task.model.state_dict(), run.average.module.state_dict()
    for name, value in now.items():
        mixed = decay * before[name] + (1 - decay) * value if value.is_floating_point() else value
        torch.testing.assert_close(kept[name], mixed, rtol=1e-5, atol=1e-7)
    moved = [name for name, value in now.items() if not torch.equal(before[name], value)]
    assert "head.project.weight" in moved
    assert any(name.endswith("running_var") for name in moved)
