"""What a model wants done to an image before it looks at it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from timm.data import resolve_data_config
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from pivotpatch.errors import InputError, quote
from pivotpatch.models.limits import SIDE

_LARGE = 1e30  # of a mean or standard deviation: torch could not compute with more


@dataclass(frozen=True)
class Preprocessing:
    """Resize to a square, scale to [0, 1], subtract the mean, divide by the standard deviation.

    Multi-label work squashes images to the square: a crop could lose the object a label is about.

    Attributes:
        image_size: rows and columns the model sees.
        mean: one value per channel.
        std: one value per channel.
        interpolation: "bilinear" or "bicubic", always anti-aliased.
    """

    image_size: int
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"

    def check(self, where: str) -> None:
        """Refuse what was read from a file and cannot be done to images; `where` is that file."""
        size, numbers = self.image_size, (*self.mean, *self.std)
        if not isinstance(size, int) or not 1 <= size <= SIDE:
            todo = f"give a whole number of pixels a side, {SIDE:,} at most"
            raise InputError(where, f"preprocessing.image_size is {quote(size)}", todo)
        sound = all(isinstance(number, int | float) and abs(number) < _LARGE for number in numbers)
        if not sound or not len(self.mean) == len(self.std) == 3 or min(self.std) <= 0:
            wrong = f"preprocessing.mean is {quote(self.mean)} and std {quote(self.std)}"
            raise InputError(where, wrong, f"give three numbers below {_LARGE:g} each, those of std above 0")

    def __call__(self, picture: Image.Image | Tensor) -> Tensor:
        """Prepare an image.

        Args:
            picture: a PIL image of any mode, or pixels (C,H,W) or (B,C,H,W), uint8 or floats in [0, 1].

        Returns:
            Floats (C,S,S) or (B,C,S,S) with S = image_size.
        """
        pixels: Tensor = (
            transforms.pil_to_tensor(picture.convert("RGB")) if isinstance(picture, Image.Image) else picture
        )
        known = pixels.dtype == torch.uint8 or pixels.is_floating_point()
        if pixels.ndim not in (3, 4) or pixels.shape[-3] != len(self.mean) or not known:
            wrong = f"pixels are {pixels.dtype} of shape {tuple(pixels.shape)}"
            raise InputError("Preprocessing", wrong, "give (3, H, W) or a batch of such, uint8 or floats in [0, 1]")
        size = [self.image_size, self.image_size]
        resized = transforms.resize(pixels, size, InterpolationMode(self.interpolation), antialias=True)
        scaled = transforms.to_dtype(resized, torch.float32, scale=True)
        normalised: Tensor = transforms.normalize(scaled, list(self.mean), list(self.std))
        return normalised


def read_preprocessing(config: Mapping[str, Any], *, image_size: int | None = None) -> Preprocessing:
    """The preprocessing that timm states in a model's `pretrained_cfg`, at its own size or another."""
    stated = resolve_data_config(pretrained_cfg=dict(config))
    return Preprocessing(
        image_size=image_size or stated["input_size"][-1],
        mean=tuple(stated["mean"]),
        std=tuple(stated["std"]),
        interpolation=stated["interpolation"] if stated["interpolation"] in ("bilinear", "bicubic") else "bicubic",
    )
