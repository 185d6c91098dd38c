"""Drawing and applying augmentation, and the views that come of it."""

from functools import cache, partial

import pytest
import torch
from torch import Tensor

from pivotpatch.accel.device import choose_compiled
from pivotpatch.core.patches import cut_patches, resize_images
from pivotpatch.data import augment
from pivotpatch.data.augment import OPERATIONS, Augmentation, AugmentPolicy, draw_augmentation
from pivotpatch.models import views as view_making
from pivotpatch.models.backbone import Preprocessing
from pivotpatch.models.views import make_views
from pivotpatch.runtime.values import Patching

SIZE = (32, 32)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PREPARE = Preprocessing(32, MEAN, STD)
PLAIN = Preprocessing(16, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photographs(count: int, size: tuple[int, int] = SIZE) -> Tensor:
    coarse = torch.randint(256, (count, 3, 5, 6), generator=generator(1), dtype=torch.uint8)
    grain = torch.randint(20, (count, 3, *size), generator=generator(2), dtype=torch.uint8)
    return resize_images(coarse, size) // 20 * 19 + grain // 2


def draw(count: int, policy: AugmentPolicy | None = None, seed: int = 0) -> Augmentation:
    return draw_augmentation(count, policy=policy or AugmentPolicy(flip=0.5), generator=generator(seed))


def test_drawing_depends_on_the_generator_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draw(50, seed=4)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, draw(50, seed=4), strict=True))
    assert not torch.equal(first.operation, draw(50, seed=5).operation)


def test_draws_are_uniform_and_signed() -> None:
    drawn = draw(28_000, AugmentPolicy(flip=0.25))
    assert drawn.flip.float().mean().item() == pytest.approx(0.25, abs=0.015)
    share = drawn.operation.flatten().bincount() / drawn.operation.numel()
    assert share.tolist() == pytest.approx([1 / 14] * 14, abs=0.006)
    for index, kind in enumerate(OPERATIONS.values()):
        strength = drawn.strength[drawn.operation == index]
        torch.testing.assert_close(strength.abs(), torch.full_like(strength, kind.full * 9 / 30))
        assert (strength < 0).float().mean().item() == pytest.approx(0.5 * kind.signed, abs=0.04)
    centre = (drawn.cutout[:, :2] + drawn.cutout[:, 2:]) / 2
    assert centre.mean(0).tolist() == pytest.approx([0.5, 0.5], abs=0.01)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("grid", "overlap"), [(1, 0.0), (2, 0.0), (3, 0.5)])
def test_views_are_resized_cut_from_the_image_or_the_source_and_normalised(
    native: bool, grid: int, overlap: float
) -> None:
    images = photographs(2, (64, 80))
    views = make_views(images, PREPARE, patching=Patching(grid, overlap, 64 if native else None))
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    resized = resize_images(images, SIZE)
    patches = cut_patches(images if native else resized, grid=grid, overlap=overlap, size=SIZE)
    torch.testing.assert_close(views.patches, (patches / 255 - mean) / std)
    torch.testing.assert_close(views.image, (resized / 255 - mean) / std)


@pytest.mark.parametrize("small", [None, 8])
def test_each_view_takes_its_own_augmentation(small: int | None) -> None:
    images, drawn = photographs(3, (24, 24)), draw(15)
    size = (16, 16)
    resized = resize_images(images, size)
    views = make_views(images, PLAIN, patching=Patching(patch_size=small), augmentation=drawn)
    patches = cut_patches(resized, grid=2, size=(small, small) if small else size)
    first, _ = drawn.split(3)
    torch.testing.assert_close(views.image, first.apply(resized) / 255)
    for index in range(3):
        own = drawn.select(torch.arange(3 + 4 * index, 7 + 4 * index))
        torch.testing.assert_close(views.patches[index], own.apply(patches[index]) / 255)
    alone = make_views(images, PLAIN, augmentation=first)
    assert torch.equal(alone.image, views.image)
    assert alone.patches.shape == (3, 0, 3, *size)


def test_mixed_precision_and_memory_layout_change_nothing() -> None:
    images, drawn = photographs(12), draw(60)
    expected = make_views(images, PREPARE, patching=Patching(), augmentation=drawn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        last = images.to(memory_format=torch.channels_last)
        views = make_views(last, PREPARE, patching=Patching(), augmentation=drawn)
    assert torch.equal(views.image, expected.image)
    assert torch.equal(views.patches, expected.patches)


@pytest.mark.slow
def test_compiled_views_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced whole, but run without the code generator, which takes a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    choose = cache(choose_compiled.__wrapped__)
    for module in (augment, view_making):
        monkeypatch.setattr(module, "choose_compiled", choose)
    for count in (12, 7):
        images, drawn = photographs(count, (48, 64)), draw(5 * count)
        make = partial(make_views, images, PREPARE, patching=Patching(source_size=64), augmentation=drawn)
        for plain, compiled in zip(make()[:2], make(compiled=True)[:2], strict=True):
            assert torch.equal(plain, compiled)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_gpu_makes_the_same_views() -> None:
    # Cut whole: resizing differs by a grey level between the devices, which equalising would spread out.
    images, drawn = photographs(20), draw(40)
    expected = make_views(images, PREPARE, patching=Patching(1), augmentation=drawn)
    sent = images.cuda()
    make = partial(make_views, sent, PREPARE, patching=Patching(1), augmentation=drawn)
    make(compiled=True)
    torch.cuda.set_sync_debug_mode("error")  # nothing may wait for the device
    try:
        views, compiled = make(), make(compiled=True)
        plain = make_views(sent, PREPARE, patching=Patching())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for found in (views, compiled):
        for here, there in zip(expected[:2], found[:2], strict=True):
            close = (here - there.cpu()).abs() < 2.01 / 255 / min(STD)
            assert close.float().mean() > 0.995
    cut = make_views(images, PREPARE, patching=Patching()).patches
    assert (cut - plain.patches.cpu()).abs().max() < 1.01 / 255 / min(STD)


def test_a_crop_is_the_part_that_was_drawn_enlarged_to_the_view() -> None:
    policy = AugmentPolicy(cutout=0, operations=0, crop=0.5)
    drawn = draw(4000, policy)
    first, last = drawn.crop.unbind(2)
    sides = last - first
    assert first.min() >= 0
    assert last.max() <= 1 + 1e-6
    assert sides.min() >= 0.5
    assert sides.mean().item() == pytest.approx(0.75, abs=0.01)
    assert (first / (1 - sides)).mean().item() == pytest.approx(0.5, abs=0.02)
    views = torch.randint(256, (1, 3, 8, 12), dtype=torch.uint8, generator=generator(0))
    middle = drawn.select(torch.tensor([0]))._replace(crop=torch.tensor([[[0.25, 0.75], [0.0, 1.0]]]))
    expected = torch.nn.functional.interpolate(views.float(), size=(8, 24), mode="bilinear")[..., 6:18]
    assert (middle.apply(views).float() - expected).abs().max() <= 0.5 + 1e-3
    plain = draw(50, AugmentPolicy(flip=0.5))
    cropped = draw(50, AugmentPolicy(flip=0.5, crop=0.7))
    assert all(torch.equal(one, other) for one, other in zip(plain[1:], cropped[1:], strict=True))
