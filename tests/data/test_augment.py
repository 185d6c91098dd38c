"""Drawing and applying augmentation, each operation beside Pillow's or torchvision's, and the views that come of it."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from reference import randaugment
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import RandAugment
from torchvision.transforms.v2 import functional as TF

from pivotpatch.accel import device
from pivotpatch.accel.device import choose_compiled
from pivotpatch.core.patches import cut_patches, resize_images
from pivotpatch.data import augment
from pivotpatch.data.augment import OPERATIONS, PUBLISHED, STEPS, Augmentation, AugmentPolicy, draw_augmentation
from pivotpatch.data.scenes import SceneStore
from pivotpatch.models import views as view_making
from pivotpatch.models.backbone import Preprocessing
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.views import make_views
from pivotpatch.runtime.values import Patching

SIZE = (32, 32)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_model(prepare: Preprocessing = Preprocessing(32, MEAN, STD), **cut: Any) -> PatchClassifier:  # noqa: B008
    model = PatchClassifier("test_resnet", ["any"], image_size=prepare.image_size, patching=Patching(**cut))
    model.preprocessing = prepare
    return model


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
def test_views_are_resized_cut_from_image_or_source_and_normalised(native: bool, grid: int, overlap: float) -> None:
    images = photographs(2, (64, 80))
    model = make_model(grid=grid, overlap=overlap, source_size=64 if native else None)
    views = make_views(model, images)
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    resized = resize_images(images, SIZE)
    patches = cut_patches(images if native else resized, grid=grid, overlap=overlap, size=SIZE)
    torch.testing.assert_close(views.patches, (patches / 255 - mean) / std)
    torch.testing.assert_close(views.image, (resized / 255 - mean) / std)


def test_patches_of_another_size_take_their_own_augmentation() -> None:
    """As those of the image's size do, which tests of training compare view by view."""
    images, drawn, plain = photographs(3, (24, 24)), draw(15), Preprocessing(16, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    resized = resize_images(images, (16, 16))
    model = make_model(plain, patch_size=8)
    views = make_views(model, images, augmentation=drawn)
    patches = cut_patches(resized, grid=2, size=(8, 8))
    first, _ = drawn.split(3)
    torch.testing.assert_close(views.image, first.apply(resized) / 255)
    for index in range(3):
        own = drawn.select(torch.arange(3 + 4 * index, 7 + 4 * index))
        torch.testing.assert_close(views.patches[index], own.apply(patches[index]) / 255)
    assert torch.equal(make_views(model, images, augmentation=first, patches=False).image, views.image)


@pytest.mark.slow
def test_compiled_views_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced whole, but run without the code generator, which takes a minute."""
    choose, _ = watch_compiler(monkeypatch)
    for module in (augment, view_making):
        monkeypatch.setattr(module, "choose_compiled", choose)
    for count in (12, 7):
        images, drawn = photographs(count, (48, 64)), draw(5 * count)
        make = partial(make_views, make_model(source_size=64), images, augmentation=drawn)
        for plain, compiled in zip(make()[:2], make(compiled=True)[:2], strict=True):
            assert torch.equal(plain, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("randaugment", ["torchvision", "published"])
def test_an_operation_is_compiled_once_for_any_number_of_views(
    randaugment: Literal["torchvision", "published"], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, traced = watch_compiler(monkeypatch)
    for count in (1, 60, 9, 23):
        views, drawn = photographs(count), draw(count, AugmentPolicy(cutout=0, randaugment=randaugment), seed=count)
        assert torch.equal(drawn.apply(views, compiled=True), drawn.apply(views))
    assert len(traced) == choose.cache_info().currsize >= len(OPERATIONS)


def watch_compiler(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[torch.fx.GraphModule]]:
    """Compile without the code generator: what compiles, anew, and what it has traced."""
    traced: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count, fullgraph=True))
    choose = cache(choose_compiled.__wrapped__)
    monkeypatch.setattr(device, "choose_compiled", choose)
    return choose, traced


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_gpu_makes_the_same_views() -> None:
    # Cut whole: resizing differs by a grey level between the devices, which equalising would spread out.
    images, drawn = photographs(20), draw(40)
    whole, parted = make_model(grid=1), make_model()
    expected = make_views(whole, images, augmentation=drawn)
    sent = images.cuda()
    make = partial(make_views, whole, sent, augmentation=drawn)
    make(compiled=True)
    torch.cuda.set_sync_debug_mode("error")  # nothing may wait for the device
    try:
        views, compiled = make(), make(compiled=True)
        plain = make_views(parted, sent)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for found in (views, compiled):
        for here, there in zip(expected[:2], found[:2], strict=True):
            close = (here - there.cpu()).abs() < 2.01 / 255 / min(STD)
            assert close.float().mean() > 0.995
    cut = make_views(parted, images).patches
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


FEW = 0.02  # of the pixels, whose place is rounded the other way where it lies between two
HEIGHT, WIDTH = 64, 52
STORE = SceneStore(split="val", count=8, size=64)
SCENES = np.stack([STORE.source(index) for index in range(8)])[:, :, :WIDTH]


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_published_operation_is_pillows_at_every_magnitude(name: str) -> None:
    image = SCENES[0]
    kind, place = PUBLISHED[name], (0.93, 0.4)
    views = torch.from_numpy(image.copy()).permute(2, 0, 1)[None]
    changed = False
    for magnitude in range(1, STEPS + 1):
        for sign in (1, -1) if kind.signed else (1,):
            strength = torch.tensor(sign * kind.full * magnitude / STEPS).reshape(1, 1, 1, 1)
            given = (views, strength, torch.tensor([place])) if kind.placed else (views, strength)
            found = kind.apply(*given)[0].permute(1, 2, 0).numpy()
            expected = randaugment.operate(name, image, magnitude, sign, place)
            wrong = (np.abs(found.astype(int) - expected) > 1).any(2)
            assert wrong.mean() <= FEW, (magnitude, sign)
            changed |= bool((expected != image).any())
    assert changed


def affine(image: Image.Image, **changes: object) -> Image.Image:
    settings = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]} | changes
    result: Image.Image = TF.affine(image, interpolation=InterpolationMode.NEAREST, **settings)
    return result


def lean(force: float) -> float:
    return math.degrees(math.atan(force))


# As torchvision's RandAugment calls them, where the published ones are others.
TORCHVISION: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, _: image,
    "shear_x": lambda image, force: affine(image, shear=[lean(force), 0.0], center=[0, 0]),
    "shear_y": lambda image, force: affine(image, shear=[0.0, lean(force)], center=[0, 0]),
    "translate_x": lambda image, force: affine(image, translate=[int(force * WIDTH), 0]),
    "translate_y": lambda image, force: affine(image, translate=[0, int(force * HEIGHT)]),
    "rotate": lambda image, force: TF.rotate(image, force, interpolation=InterpolationMode.NEAREST),
    "solarize": lambda image, force: ImageOps.solarize(image, math.ceil(255 - force)),
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_other_operations_are_torchvisions(name: str) -> None:
    kind = OPERATIONS[name]
    strength = torch.tensor([0.2, -1.0, -0.7, -0.3, 0.0, 0.1, 0.3, 1.0]) * kind.full
    strength = strength if kind.signed else strength.abs()
    views = torch.from_numpy(SCENES.copy()).permute(0, 3, 1, 2)
    found = kind.apply(views, strength.reshape(-1, 1, 1, 1)).permute(0, 2, 3, 1).numpy()
    expected = [TORCHVISION[name](Image.fromarray(each), float(by)) for each, by in zip(SCENES, strength, strict=True)]
    moved = (found != np.stack([np.asarray(each) for each in expected])).any(axis=-1)
    # The nearest pixel is a tie here and there, which rounding decides.
    assert moved.mean() <= (0.005 if name in ("rotate", "shear_x", "shear_y") else 0)
    assert (found != SCENES).any() == (name != "identity")


def test_ranges_are_torchvisions() -> None:
    assert all(OPERATIONS[name] is PUBLISHED[name] for name in OPERATIONS.keys() - TORCHVISION.keys())
    space = {name.lower(): held for name, held in RandAugment._AUGMENTATION_SPACE.items()}
    assert [name.replace("_", "") for name in OPERATIONS] == list(space)
    for (name, kind), (list_magnitudes, signed) in zip(OPERATIONS.items(), space.values(), strict=True):
        assert kind.signed == signed
        magnitudes = list_magnitudes(31, HEIGHT, WIDTH)
        if magnitudes is not None:
            unit = {"translate_x": WIDTH, "translate_y": HEIGHT, "solarize": 1 / 255}.get(name, 1)
            expected = torch.arange(31) / 30 * kind.full * unit
            expected = expected.round() if name == "posterize" else expected
            torch.testing.assert_close((magnitudes - magnitudes[0]).abs().float(), expected)


def test_a_quarter_of_the_views_is_left_as_it_is() -> None:
    policy = AugmentPolicy(cutout=0, randaugment="published")
    drawn = draw(4000, policy)
    untouched = (drawn.operation == list(OPERATIONS).index("identity")).all(1)
    assert untouched.float().mean().item() == pytest.approx(0.25, abs=0.03)
    full = torch.tensor([0.0] * len(OPERATIONS) + [kind.full or 1 for kind in PUBLISHED.values()])
    steps, applied = STEPS * drawn.strength / full[drawn.operation], drawn.operation >= len(OPERATIONS)
    assert set(drawn.operation[applied].tolist()) == set(range(len(OPERATIONS), len(OPERATIONS) + len(PUBLISHED)))
    assert set(steps[applied].abs().round(decimals=3).tolist()) == {0.0, *map(float, range(1, STEPS + 1))}


@pytest.mark.parametrize("kind", ["torchvision", "published"])
def test_views_are_flipped_then_covered_then_operated_on(kind: Literal["torchvision", "published"]) -> None:
    views = torch.randint(256, (300, 3, 24, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    policy = AugmentPolicy(flip=0.5, randaugment=kind)
    drawn = draw_augmentation(300, policy=policy, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(drawn.cutout[:, 2:] - drawn.cutout[:, :2], torch.full((300, 2), 0.5))
    before, found = views.clone(), drawn.apply(views)
    assert torch.equal(views, before)
    kinds = (*OPERATIONS.values(), *PUBLISHED.values())
    y, x = ((torch.arange(side) + 0.5) / side for side in (24, 16))
    for row in range(0, 300, 3):
        _, flip, (top, left, bottom, right), colour, operation, strength, place = (part[row] for part in drawn)
        inside = ((top <= y) & (y < bottom))[:, None] & ((left <= x) & (x < right))  # the pixels whose centre is
        expected = torch.where(inside, colour[:, None, None], views[row].flip(-1) if flip else views[row])[None]
        for slot in range(2):
            chosen = kinds[int(operation[slot])]
            given = (strength[slot].reshape(1, 1, 1, 1), *([place[slot : slot + 1]] if chosen.placed else []))
            expected = chosen.apply(expected, *given)
        assert torch.equal(found[row], expected[0])
