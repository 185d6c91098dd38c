"""MCAR, one image, label and pixel at a time."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pivotpatch import PatchInference, load_checkpoint, save_checkpoint
from pivotpatch.core.patches import crop_images
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.peers.mcar import MCARClassifier, find_interval
from pivotpatch.training.config import load_config
from pivotpatch.training.task import CropTask, make_task

LABELS = [f"label {number}" for number in range(6)]


def make() -> MCARClassifier:
    torch.manual_seed(0)
    model = MCARClassifier("test_resnet", LABELS, image_size=96).eval()
    with torch.no_grad():
        model.head.project.weight.mul_(20)  # type: ignore[operator]
    return model


def slow_interval(profile: list[float]) -> tuple[float, float]:
    """Walk from the peak to both sides while the profile stays in the upper half of its range."""
    size, low, high = len(profile), min(profile), max(profile)
    if high == low:
        return 0.125, 0.875
    inside = [(value - low) / (high - low) >= 0.5 for value in profile]
    begin = end = profile.index(high)
    while begin > 0 and inside[begin - 1]:
        begin -= 1
    while end < size - 1 and inside[end + 1]:
        end += 1
    left, right = begin / size, (end + 1) / size
    if right - left < 0.125:
        middle = min(max((left + right) / 2, 0.0625), 0.9375)
        left, right = middle - 0.0625, middle + 0.0625
    return left, right


def test_an_interval_is_the_stretch_around_the_peak() -> None:
    torch.manual_seed(1)
    profiles = torch.rand(200, 32, dtype=torch.float64).cumsum(dim=1).sin() + torch.rand(200, 32, dtype=torch.float64)
    profiles = torch.cat([profiles, torch.ones(1, 32), torch.eye(32)[:1], torch.eye(32)[-1:]])
    for profile, found in zip(profiles, find_interval(profiles), strict=True):
        assert found.tolist() == pytest.approx(slow_interval(profile.tolist()), abs=1e-6)


def test_a_crop_of_everything_is_the_image_and_one_of_a_quarter_is_that_quarter() -> None:
    images = torch.rand(2, 3, 8, 12)
    across = torch.tensor([[0.0, 1.0], [0.5, 1.0]]).expand(2, -1, -1)
    down = torch.tensor([[0.0, 1.0], [0.0, 0.5]]).expand(2, -1, -1)
    found = crop_images(images, across, down)
    assert found.shape == (2, 2, 3, 8, 12)
    torch.testing.assert_close(found[:, 0], images)
    enlarged = torch.nn.functional.interpolate(images, scale_factor=2, mode="bilinear", align_corners=False)
    torch.testing.assert_close(found[:, 1], enlarged[..., :8, 12:])


def slow(model: MCARClassifier, image: Tensor) -> tuple[list[float], list[float]]:
    """Logits of one image (C,H,W), and the largest of those of its crops."""
    plain = MultiLabelClassifier.forward
    whole = plain(model, image[None])[0]
    features, local = model.backbone(image[None]), []
    for label in sorted(range(len(LABELS)), key=lambda k: -whole[k].item())[:4]:
        weight, bias = model.head.project.weight[label], model.head.project.bias[label]  # type: ignore[index]
        heat = (sum(weight[c] * features[:, c : c + 1] for c in range(features.shape[1])) + bias).sigmoid()
        large = torch.nn.functional.interpolate(heat, size=image.shape[1:], mode="bilinear", align_corners=False)[0, 0]
        left, right = slow_interval([column.max().item() for column in large.t()])
        top, bottom = slow_interval([row.max().item() for row in large])
        crop = crop_images(image[None], torch.tensor([[[left, right]]]), torch.tensor([[[top, bottom]]]))
        local.append(plain(model, crop[0])[0])
    return whole.tolist(), torch.stack(local).amax(dim=0).tolist()


def test_a_logit_is_the_larger_of_the_images_and_its_crops() -> None:
    model, images = make(), torch.randn(3, 3, 96, 96)
    with torch.no_grad():
        whole, local = model.forward_both(images)
        logits = model(images)
        for row, image in enumerate(images):
            expected = slow(model, image)
            assert whole[row].tolist() == pytest.approx(expected[0], rel=1e-3, abs=1e-4)
            assert local[row].tolist() == pytest.approx(expected[1], rel=1e-3, abs=1e-4)
            torch.testing.assert_close(logits[row], torch.tensor(expected).amax(dim=0), rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(model(image[None])[0], logits[row], rtol=1e-3, atol=1e-4)  # no row knows another
    assert (whole - local).abs().mean() > 1e-3


def test_both_looks_are_trained_and_saved(tmp_path: Path) -> None:
    model, images = make(), torch.randn(2, 3, 96, 96)
    task = make_task(model, load_config(None, ["task.kind=crops"]))
    assert isinstance(task, CropTask)
    assert task.parts == ("image", "crop")
    views = task.make_views(torch.randint(256, (2, 3, 96, 96), dtype=torch.uint8))
    target = torch.randint(2, (2, len(LABELS))).float()
    expected = [task.loss(logits, target) for logits in model.forward_both(views.image)]
    torch.testing.assert_close(task(views, target), torch.stack(expected))
    save_checkpoint(model, tmp_path / "model")
    loaded = load_checkpoint(tmp_path / "model")
    assert isinstance(loaded, MCARClassifier)
    torch.testing.assert_close(loaded(images), model(images))
    assert PatchInference(model)(images).tde_logits.shape == (2, len(LABELS))
    with pytest.raises(InputError, match="MCAR: the head is ml_decoder, which has no activation maps"):
        MCARClassifier("test_resnet", LABELS, head="ml_decoder")
