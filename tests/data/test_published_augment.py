"""The published RandAugment, operation by operation, beside Pillow's."""

import numpy as np
import pytest
import torch
from reference import randaugment

from pivotpatch.data.augment import OPERATIONS, PUBLISHED, STEPS, Augmentation, AugmentPolicy, draw_augmentation
from pivotpatch.data.scenes import read_scenes

FEW = 0.02  # of the pixels, whose place is rounded the other way where it lies between two


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_operation_is_pillows_at_every_magnitude(name: str) -> None:
    image = np.asarray(read_scenes("", "val", count=1, size=64).images.source(0))[:, :52]
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


def test_a_quarter_of_the_views_is_left_as_it_is() -> None:
    policy = AugmentPolicy(cutout=0, randaugment="published")
    drawn = draw_augmentation(4000, policy=policy, generator=torch.Generator().manual_seed(0))
    untouched = (drawn.operation == list(OPERATIONS).index("identity")).all(1)
    assert untouched.float().mean().item() == pytest.approx(0.25, abs=0.03)
    steps = (
        STEPS
        * drawn.strength
        / torch.tensor([0.0] * len(OPERATIONS) + [k.full or 1 for k in PUBLISHED.values()])[drawn.operation]
    )
    applied = drawn.operation >= len(OPERATIONS)
    assert set(drawn.operation[applied].tolist()) == set(range(len(OPERATIONS), len(OPERATIONS) + len(PUBLISHED)))
    assert set(steps[applied].abs().round(decimals=3).tolist()) == {0.0, *map(float, range(1, STEPS + 1))}


def test_views_are_augmented_as_their_operations_say() -> None:
    views = torch.randint(256, (300, 3, 24, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    policy = AugmentPolicy(cutout=0, randaugment="published")
    drawn = draw_augmentation(300, policy=policy, generator=torch.Generator().manual_seed(2))
    found, kinds = drawn.apply(views), (*OPERATIONS.values(), *PUBLISHED.values())
    for row in range(0, 300, 7):
        one = Augmentation(*(part[row : row + 1] for part in drawn))
        expected = views[row : row + 1]
        for slot in range(2):
            kind = kinds[int(one.operation[0, slot])]
            given = (one.strength[:, slot].reshape(1, 1, 1, 1), *([one.place[:, slot]] if kind.placed else []))
            expected = kind.apply(expected, *given)
        assert torch.equal(found[row : row + 1], expected)
