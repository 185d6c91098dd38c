"""Each operation on a batch, against torchvision's and Pillow's on one image at a time."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from pivotpatch.data.augment import OPERATIONS

HEIGHT, WIDTH = 45, 64

Oracle = Callable[[Image.Image, float], Image.Image]


def make_views(count: int) -> Tensor:
    """Smooth images with some grain, of differing contrast; the first of one colour alone."""
    rng = np.random.default_rng(3)
    views = []
    for index in range(count):
        low = 10 * index
        coarse = rng.integers(low, 256 - low, (4, 5, 3), dtype=np.uint8) if index else np.full((4, 5, 3), 77, np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), dtype=float)
        grain = rng.normal(0, 6, smooth.shape) if index else 0
        views.append(np.clip(smooth + grain, 0, 255).astype(np.uint8))
    return torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2)


def run_oracle(oracle: Oracle, views: Tensor, strength: Tensor) -> NDArray[np.int64]:
    results = [
        np.asarray(oracle(Image.fromarray(view.permute(1, 2, 0).numpy()), float(force)), dtype=np.int64)
        for view, force in zip(views, strength, strict=True)
    ]
    return np.stack(results)


def run_operation(name: str, views: Tensor, strength: Tensor) -> NDArray[np.int64]:
    before = views.clone()
    result = OPERATIONS[name].apply(views, strength.reshape(-1, 1, 1, 1))
    assert torch.equal(views, before)
    assert result.dtype == torch.uint8
    return result.permute(0, 2, 3, 1).numpy().astype(np.int64)


COLOUR: dict[str, Oracle] = {
    "identity": lambda image, _: image,
    "brightness": lambda image, force: ImageEnhance.Brightness(image).enhance(1 + force),
    "color": lambda image, force: ImageEnhance.Color(image).enhance(1 + force),
    "contrast": lambda image, force: ImageEnhance.Contrast(image).enhance(1 + force),
    "sharpness": lambda image, force: ImageEnhance.Sharpness(image).enhance(1 + force),
    "posterize": lambda image, force: ImageOps.posterize(image, 8 - round(force)),
    "solarize": lambda image, force: ImageOps.solarize(image, math.ceil(255 - force)),
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
}


@pytest.mark.parametrize("name", COLOUR)
def test_colour_operations_are_pillows(name: str) -> None:
    views = make_views(8)
    full = OPERATIONS[name].full
    strength = torch.tensor([0.3, -1.0, -0.7, -0.3, 0.0, 0.1, 0.3, 1.0]) * full
    if not OPERATIONS[name].signed:
        strength = strength.abs()
    difference = run_operation(name, views, strength) - run_oracle(COLOUR[name], views, strength)
    exact = name in ("identity", "posterize", "solarize", "equalize")
    assert np.abs(difference).max() <= (0 if exact else 1)
    changed = run_operation(name, views, strength) != views.permute(0, 2, 3, 1).numpy()
    assert changed.any() == (name != "identity")


def affine(image: Image.Image, **changes: object) -> Image.Image:
    settings = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]} | changes
    result: Image.Image = TF.affine(image, interpolation=InterpolationMode.NEAREST, **settings)
    return result


def lean(force: float) -> float:
    return math.degrees(math.atan(force))


# As torchvision's RandAugment calls them.
GEOMETRY: dict[str, Oracle] = {
    "shear_x": lambda image, force: affine(image, shear=[lean(force), 0.0], center=[0, 0]),
    "shear_y": lambda image, force: affine(image, shear=[0.0, lean(force)], center=[0, 0]),
    "translate_x": lambda image, force: affine(image, translate=[int(force * WIDTH), 0]),
    "translate_y": lambda image, force: affine(image, translate=[0, int(force * HEIGHT)]),
    "rotate": lambda image, force: TF.rotate(image, force, interpolation=InterpolationMode.NEAREST),
}


@pytest.mark.parametrize("name", GEOMETRY)
def test_geometric_operations_are_torchvisions(name: str) -> None:
    views = make_views(8).clamp(min=1)  # so that black marks what came from outside
    strength = torch.tensor([0.2, -1.0, -0.7, -0.3, 0.0, 0.1, 0.3, 1.0]) * OPERATIONS[name].full
    result, expected = run_operation(name, views, strength), run_oracle(GEOMETRY[name], views, strength)
    moved = np.abs(result - expected).max(axis=-1) > 0
    # The nearest pixel is a tie here and there, which rounding decides.
    assert moved.mean() < 0.005
    assert (expected == 0).any()
    if name.startswith("translate"):
        assert not moved.any()


def test_strengths_at_the_default_magnitude_are_torchvisions() -> None:
    ninth = {name: kind.full * 9 / 30 for name, kind in OPERATIONS.items()}
    for name in ("shear_x", "shear_y"):
        assert ninth[name] == pytest.approx(0.09)
    for name, side in (("translate_x", 448), ("translate_y", 448)):
        assert int(ninth[name] * side) == 60
    assert ninth["rotate"] == pytest.approx(9)
    for name in ("brightness", "color", "contrast", "sharpness"):
        assert ninth[name] == pytest.approx(0.27)
    assert 8 - round(ninth["posterize"]) == 7
    assert 255 - ninth["solarize"] == pytest.approx(178.5)
    unsigned = {name for name, kind in OPERATIONS.items() if not kind.signed}
    assert unsigned == {"identity", "posterize", "solarize", "autocontrast", "equalize"}
    assert set(COLOUR) | set(GEOMETRY) == set(OPERATIONS)
