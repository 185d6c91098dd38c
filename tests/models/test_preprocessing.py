import numpy as np
import pytest
import torch
from PIL import Image

from pivotpatch.errors import InputError
from pivotpatch.models.preprocessing import Preprocessing

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8))


def test_a_picture_is_squashed_scaled_and_normalised() -> None:
    ready = Preprocessing(16, mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3))(PICTURE)
    resized = np.asarray(PICTURE.resize((16, 16), Image.Resampling.BILINEAR), dtype=np.float32) / 255
    expected = torch.from_numpy((resized - [0.5, 0.4, 0.3]) / [0.1, 0.2, 0.3]).permute(2, 0, 1).float()
    assert (ready - expected).abs().max() <= 1 / 255 / 0.1 + 1e-5


def test_tensor_batch_and_picture_agree() -> None:
    prepare = Preprocessing(16, interpolation="bicubic")
    pixels = torch.from_numpy(np.asarray(PICTURE).copy()).permute(2, 0, 1)
    torch.testing.assert_close(prepare(pixels), prepare(PICTURE))
    torch.testing.assert_close(prepare(torch.stack([pixels, pixels]))[1], prepare(PICTURE))


def test_wrong_channels_are_named() -> None:
    for pixels in (torch.zeros(30, 50, 3), torch.zeros(3, 30, 50, dtype=torch.int64)):
        with pytest.raises(InputError, match=r"Preprocessing: pixels are torch.\w+ of shape .*; give \(3, H, W\)"):
            Preprocessing(8)(pixels)
