import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import losses, pat
from torch import Tensor, nn

from pivotpatch.core.counterfactual import combine_logits
from pivotpatch.core.patches import cut_patches, resize_images
from pivotpatch.data.augment import AugmentPolicy, draw_augmentation
from pivotpatch.errors import InputError
from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.models.classifier import Architecture, Classifier, IndependentClassifier, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.views import Views
from pivotpatch.runtime.values import Patching
from pivotpatch.training.config import LossSection, OptimiserSection, load_config
from pivotpatch.training.optimiser import make_optimiser
from pivotpatch.training.task import PatchOnlyTask, PatchTask, Task, TaughtTask, WholeImageTask, make_loss, make_task

LABELS = ["cat", "dog", "car"]
NAN = math.nan
TARGET = torch.tensor([[1.0, 0.0, NAN], [0.0, NAN, 0.3], [1.0, 1.0, 0.0]], dtype=torch.float64)
ASYMMETRIC = LossSection(gamma_neg=3, gamma_pos=1, clip=0.1, detach_focus=False)
CROSS_ENTROPY = LossSection(name="binary_cross_entropy")
SECTIONS = pytest.mark.parametrize("section", [ASYMMETRIC, CROSS_ENTROPY], ids=lambda section: section.name)


def make_views(count: int = 3) -> Views:
    generator = torch.Generator().manual_seed(5)
    image = torch.randn(count, 3, 32, 32, generator=generator, dtype=torch.float64)
    return Views(image, torch.randn(count, 4, 3, 32, 32, generator=generator, dtype=torch.float64))


def make_patch_model() -> PatchClassifier:
    torch.manual_seed(0)
    model = PatchClassifier("test_vit", LABELS, image_size=32, patching=Patching(lam=0.7, temperature=0.5))
    return model.double()


def cost(logits: list[float], target: list[float], section: LossSection) -> float:
    """The loss of one image over the labels that are known."""
    powers = (section.gamma_neg, section.gamma_pos, section.clip) if section.name == "asymmetric" else (0, 0, 0)
    return sum(
        losses.asymmetric(logit, present, gamma_neg=powers[0], gamma_pos=powers[1], clip=powers[2])
        for logit, present in zip(logits, target, strict=True)
        if not math.isnan(present)
    )


def pool_slowly(model: PatchClassifier, embeddings: list[Tensor]) -> list[float]:
    """Equation 2 of the embeddings (1,D) of patches, one label at a time."""
    logits = [model.patch_projection(each)[0].tolist() for each in embeddings]
    weighing = [model.weight_projection(each)[0].tolist() for each in embeddings]
    pooled = []
    for label in range(len(LABELS)):
        shares = pat.weights([row[label] for row in weighing], model.patching.temperature)
        pooled.append(sum(share * row[label] for share, row in zip(shares, logits, strict=True)))
    return pooled


def patch_costs(model: PatchClassifier, views: Views, section: LossSection) -> list[float]:
    """loss(p, y) and loss(q, y), one view and one label at a time."""
    image = patch = 0.0
    with torch.no_grad():
        for whole, parts, known in zip(views.image, views.patches, TARGET.tolist(), strict=True):
            image += cost(model.head(model.backbone(whole[None]))[0].tolist(), known, section)
            pooled = pool_slowly(model, [model.head.embed(model.backbone(part[None])) for part in parts])
            patch += cost(pooled, known, section)
    return [image, patch]


def check_task(task: Task, views: Views, slow: Callable[[], list[float]]) -> None:
    """Compare the parts of a loss, and the gradient of their sum, with those of a slow one.

    Of each tensor outside the blocks the largest gradient is compared with a difference quotient.
    """
    parts = task(views, TARGET)
    assert parts.tolist() == pytest.approx(slow(), rel=1e-9)
    parts.sum().backward()
    step = 1e-5
    for name, weight in trained(task.model).items():
        assert weight.grad is not None
        assert weight.grad.abs().sum() > 0, name
        if not name.endswith(("weight", "bias", "pos_embed")) or ".blocks." in name:
            continue
        flat, gradient = weight.data.view(-1), weight.grad.view(-1)
        place = int(gradient.abs().argmax())
        before = flat[place].item()
        flat[place] = before + step
        above = sum(slow())
        flat[place] = before - step
        below = sum(slow())
        flat[place] = before
        assert gradient[place].item() == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-7), name


@SECTIONS
def test_the_baseline_is_the_loss_of_the_image_logits(section: LossSection) -> None:
    torch.manual_seed(0)
    model, views = MultiLabelClassifier("test_vit", LABELS, image_size=32).double(), make_views()

    def slow() -> list[float]:
        with torch.no_grad():
            logits = [model(image[None])[0].tolist() for image in views.image]
        return [sum(cost(row, known, section) for row, known in zip(logits, TARGET.tolist(), strict=True))]

    check_task(WholeImageTask(model, make_loss(section)), views, slow)


def test_pat_is_equation_5() -> None:
    model, views = make_patch_model(), make_views()
    check_task(PatchTask(model, make_loss(ASYMMETRIC)), views, lambda: patch_costs(model, views, ASYMMETRIC))


def test_regions_are_trained_by_both_losses_of_one_view() -> None:
    model = make_patch_model()
    model.regions = True
    task, views = PatchTask(model, make_loss(ASYMMETRIC)), make_views()
    assert task.views_per_image == 1
    made = task.make_views(torch.zeros(3, 3, 40, 40, dtype=torch.uint8))
    assert (made.image.shape, made.patches.shape[1]) == ((3, 3, 32, 32), 0)

    def slow() -> list[float]:
        image = region = 0.0
        with torch.no_grad():
            for whole, known in zip(views.image, TARGET.tolist(), strict=True):
                features = model.backbone(whole[None])  # two places a side, so that each is a region
                image += cost(model.head(features)[0].tolist(), known, ASYMMETRIC)
                parts = [features[..., r, c] for r in (0, 1) for c in (0, 1)]
                region += cost(pool_slowly(model, parts), known, ASYMMETRIC)
        return [image, region]

    check_task(task, views, slow)


def make_taught(tmp_path: Path, *, grid: int = 2) -> TaughtTask:
    """A student of regions, four places a side, and a teacher that cuts native patches of images of 80 pixels."""
    torch.manual_seed(1)
    teacher = PatchClassifier("test_resnet", LABELS, image_size=64, patching=Patching(2, 0.25, 80))
    save_checkpoint(teacher, tmp_path / "teacher")
    student = PatchClassifier("test_resnet", LABELS, image_size=64, regions=True, patching=Patching(grid))
    task = make_task(student, load_config(None, [f'distil.teachers=["{tmp_path / "teacher"}"]']))
    assert isinstance(task, TaughtTask)
    return task


def test_a_teacher_sees_the_same_augmented_image_and_its_native_patches(tmp_path: Path) -> None:
    task = make_taught(tmp_path)
    images = torch.randint(256, (2, 3, 80, 80), dtype=torch.uint8)
    assert (task.picture_size, task.views_per_image, task.parts) == (80, 1, ("image", "patch", "teacher"))
    policy = AugmentPolicy(flip=1.0, cutout=0.0, operations=0)
    views: Any = task.make_views(images, augmentation=draw_augmentation(2, policy=policy, generator=torch.Generator()))
    mean, std = (torch.tensor(getattr(task.model.preprocessing, name)).reshape(3, 1, 1) for name in ("mean", "std"))
    flipped = images.flip(-1)
    small = (resize_images(flipped, (64, 64)) / 255 - mean) / std
    patches = (cut_patches(flipped, grid=2, overlap=0.25, size=(64, 64)) / 255 - mean) / std
    torch.testing.assert_close((views.image, *views.shown), (small, small, patches), rtol=1e-4, atol=1e-4)


def test_what_a_teacher_costs_is_the_definition(tmp_path: Path) -> None:
    torch.manual_seed(2)
    task = make_taught(tmp_path, grid=4)
    out = combine_logits(torch.randn(2, 3), torch.randn(2, 16, 3), weight_logits=torch.randn(2, 16, 3))
    wanted = combine_logits(torch.randn(2, 3), torch.randn(2, 4, 3), weight_logits=torch.randn(2, 4, 3))

    def diverge(logit: Tensor, other: Tensor) -> float:
        s, t = (1 / (1 + math.exp(-float(value))) for value in (logit, other))
        return t * math.log(t / s) + (1 - t) * math.log((1 - t) / (1 - s))

    side, spans = 1 / (2 - 0.25), ((0.0, 4 / 7), (3 / 7, 1.0))  # patches overlap by a quarter of their side
    assert spans[0][1] == pytest.approx(side)

    def share(place: int, span: tuple[float, float]) -> float:  # of a quarter of the side
        return max(0.0, min((place + 1) / 4, span[1]) - max(place / 4, span[0])) * 4

    for image, total in enumerate(task.compare(out, wanted).tolist()):
        expected = 0.0
        for label in range(3):
            expected += diverge(out.image_logits[image, label], wanted.image_logits[image, label])
            masses = []
            for patch, (rows, columns) in enumerate((rows, columns) for rows in spans for columns in spans):
                inside = [share(place // 4, rows) * share(place % 4, columns) for place in range(16)]
                held = torch.tensor(inside) * out.weights[image, :, label]
                masses.append(float(held.sum()))
                logit = (held * out.patch_logits[image, :, label]).sum() / held.sum()
                expected += diverge(logit, wanted.patch_logits[image, patch, label]) / 4
            pairs = zip(wanted.weights[image, :, label].tolist(), masses, strict=True)
            apart = sum(t * math.log(t / (mass / sum(masses))) for t, mass in pairs)
            expected += apart * float(wanted.pooled_logits[image, label].sigmoid())
        assert total == pytest.approx(expected, rel=1e-3)
    assert task.compare(out, out._replace(patch_logits=wanted.patch_logits, weights=wanted.weights)).min() > 0


def test_a_student_that_says_the_same_costs_nothing_and_only_the_student_learns(tmp_path: Path) -> None:
    task = make_taught(tmp_path)
    task.shares = torch.eye(4)
    same = combine_logits(torch.randn(2, 3), torch.randn(2, 4, 3))
    torch.testing.assert_close(task.compare(same, same), torch.zeros(2))
    views = task.make_views(torch.randint(256, (3, 3, 80, 80), dtype=torch.uint8))
    parts = task(views, TARGET.float())
    parts.sum().backward()
    assert all(weight.grad is not None for weight in task.parameters())
    assert not any("teacher" in name for name in (*task.state_dict(), *dict(task.named_parameters())))
    (teacher,) = task._teacher
    assert not teacher.training
    assert all(weight.grad is None for weight in teacher.parameters())
    unknown = task(views, torch.full_like(TARGET, NAN).float())  # as of an image that only fills a batch
    torch.testing.assert_close(unknown, torch.zeros(3))


@pytest.mark.parametrize(
    ("labels", "changes", "message"),
    [
        (LABELS, {}, "with patches one teaches a model of regions of the feature map"),
        (LABELS[::-1], {"regions": True}, "has other labels, or in another order"),
    ],
)
def test_an_unfit_teacher_is_refused(labels: list[str], changes: dict[str, bool], message: str, tmp_path: Path) -> None:
    save_checkpoint(PatchClassifier("test_resnet", LABELS, image_size=32), tmp_path / "teacher")
    student = PatchClassifier("test_resnet", labels, image_size=32, **changes)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        make_task(student, load_config(None, [f'distil.teachers=["{tmp_path / "teacher"}"]']))


@pytest.mark.parametrize(
    "student",
    [
        PatchClassifier("test_resnet", LABELS, image_size=32, regions=True),
        MultiLabelClassifier("test_resnet", LABELS, image_size=32),
    ],
    ids=["regions", "image"],
)
def test_a_teacher_that_is_not_there_is_told_by_its_setting(student: PatchClassifier | MultiLabelClassifier) -> None:
    kind = "patch" if isinstance(student, PatchClassifier) else "image"
    with pytest.raises(InputError, match=r"distil.teachers: runs/nobody: .*; train the teacher first"):
        make_task(student, load_config(None, [f"task.kind={kind}", 'distil.teachers=["runs/nobody"]']))


def make_closer_model() -> PatchClassifier:
    """A model without batch norms that takes images of 32 and, on a closer look, of 48 pixels."""
    torch.manual_seed(0)
    flexible = Architecture("test_vit", image_size=32, backbone_options={"dynamic_img_size": True})
    return PatchClassifier(flexible, LABELS, patching=Patching(closer_size=48, lam=0.7, temperature=0.5))


def closer_cost(model: PatchClassifier, closer: Tensor, section: LossSection) -> float:
    """Both losses of the larger image, whose map has three places a side: one image and one label at a time."""
    total = 0.0
    with torch.no_grad():
        for features, known in zip(model.backbone(closer), TARGET.tolist(), strict=True):
            total += cost(model.head(features[None])[0].tolist(), known, section)
            parts = [features[None, :, r : r + 2, c : c + 2].mean(dim=(2, 3)) for r in (0, 1) for c in (0, 1)]
            total += cost(pool_slowly(model, parts), known, section)
    return total


def test_a_closer_look_is_a_part_of_its_own() -> None:
    model, views = make_closer_model().double(), make_views()
    closer = torch.randn(3, 3, 48, 48, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    task = PatchTask(model, make_loss(ASYMMETRIC))
    assert task.parts == ("image", "patch", "closer")

    def slow() -> list[float]:
        return [*patch_costs(model, views, ASYMMETRIC), closer_cost(model, closer, ASYMMETRIC)]

    check_task(task, views._replace(closer=closer), slow)


def test_each_view_has_an_augmentation_of_its_own_and_the_larger_image_is_the_last() -> None:
    model, grid = make_closer_model(), 2
    task = PatchTask(model, make_loss(ASYMMETRIC))
    assert task.views_per_image == 1 + grid**2 + 1
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(256, (3, 3, 40, 40), generator=generator, dtype=torch.uint8)
    drawn = draw_augmentation(3 * task.views_per_image, policy=AugmentPolicy(flip=0.5), generator=generator)
    mean, std = (torch.tensor(values)[:, None, None] for values in (model.preprocessing.mean, model.preprocessing.std))

    def make_one(view: Tensor, row: int) -> Tensor:
        return (drawn.select(torch.tensor([row])).apply(view[None])[0] / 255 - mean) / std

    views: Any = task.make_views(images, augmentation=drawn)
    plain: Any = task.make_views(images)
    whole, larger = resize_images(images, (32, 32)), resize_images(images, (48, 48))
    patches = cut_patches(whole, grid=grid, size=(32, 32))
    for place in range(3):
        others = range(3 + 5 * place, 3 + 5 * (place + 1))  # after all images, image by image
        torch.testing.assert_close(views.image[place], make_one(whole[place], place))
        for patch in range(4):
            expected = make_one(patches[place, patch], others[patch])
            torch.testing.assert_close(views.patches[place, patch], expected)
        torch.testing.assert_close(views.closer[place], make_one(larger[place], others[4]))
        torch.testing.assert_close(plain.closer[place], (larger[place] / 255 - mean) / std)
    for name in ("image", "patches", "closer"):
        value = getattr(views, name)
        assert (value - getattr(plain, name)).abs().mean() > 0.1, name  # something was drawn


def test_patch_only_is_the_loss_of_the_pooled_logits_and_never_sees_the_whole_image() -> None:
    model, views = make_patch_model(), make_views()
    task = PatchOnlyTask(model, make_loss(ASYMMETRIC))
    hidden = Views(torch.full_like(views.image, NAN), views.patches)  # which nothing would be finite with
    check_task(task, hidden, lambda: patch_costs(model, views, ASYMMETRIC)[1:])
    assert set(dict(model.named_parameters())) - set(trained(model)) == {"head.project.weight", "head.project.bias"}


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def make_independent(seed: int = 0) -> IndependentClassifier:
    torch.manual_seed(seed)
    return IndependentClassifier("test_vit", LABELS, image_size=32).double()


def take_steps(model: Classifier, target: Tensor) -> None:
    task = WholeImageTask(model, make_loss(ASYMMETRIC))
    optimiser = make_optimiser(model, OptimiserSection(lr=1e-2, weight_decay=0.1))
    for _ in range(2):
        task(make_views(), target).sum().backward()
        optimiser.step()
        optimiser.zero_grad()


def test_models_trained_together_are_those_trained_alone() -> None:
    together, start = make_independent(), make_independent()
    take_steps(together, TARGET)
    for place, (member, alone) in enumerate(zip(together.members, start.members, strict=True)):
        assert isinstance(alone, MultiLabelClassifier)
        take_steps(alone, TARGET[:, place : place + 1])
        for name, weight in member.state_dict().items():
            torch.testing.assert_close(weight, alone.state_dict()[name], rtol=1e-9, atol=1e-12, msg=name)
