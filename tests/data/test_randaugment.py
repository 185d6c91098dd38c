"""Each operation of both RandAugments beside Pillow's or torchvision's, one image at a time."""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from reference import randaugment
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import RandAugment
from torchvision.transforms.v2 import functional as TF

from pivotpatch.data.augment import OPERATIONS, PUBLISHED, STEPS, AugmentPolicy, draw_augmentation
from pivotpatch.data.scenes import SceneStore

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
    drawn = draw_augmentation(4000, policy=policy, generator=torch.Generator().manual_seed(0))
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
