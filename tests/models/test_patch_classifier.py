"""A closer look against its definition: one feature map of the larger image, patches cut from it."""

from pathlib import Path

import pytest
import torch
from made_networks import HEADS, LABELS, make_network
from torch import Tensor

from pivotpatch import CounterfactualLogits, PatchClassifier, save_checkpoint
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import Architecture, Embeddings
from pivotpatch.runtime.values import Adaptive, Calibration, Patching

LAM, TEMPERATURE = 0.5, 0.25
Spans = list[tuple[int, int]]


def make_closer(*, head: str = "linear", grid: int = 2, overlap: float = 0.0) -> PatchClassifier:
    model = make_network(head=head, grid=grid, overlap=overlap)
    model.set_mixing(lam=LAM, temperature=TEMPERATURE)
    return model.double()


def look(model: PatchClassifier, images: Tensor, closer: Tensor) -> CounterfactualLogits:
    """What is said of images that are seen twice."""
    return model.combine_closer(model.head.project(model.embed_images(images)), *model.embed_regions(closer))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


@pytest.mark.parametrize(
    ("head", "size", "grid", "overlap", "spans"),
    [
        *((head, 96, 2, 0.0, [(0, 2), (1, 3)]) for head in HEADS),  # three places a side: the middle is in both
        ("linear", 112, 2, 0.5, [(0, 3), (1, 4)]),
        ("linear", 144, 3, 0.0, [(0, 2), (1, 3), (3, 5)]),
    ],
)
def test_a_closer_look_is_the_definition(head: str, size: int, grid: int, overlap: float, spans: Spans) -> None:
    model, images = make_closer(head=head, grid=grid, overlap=overlap), draw(2, 3, 32, 32)
    closer = draw(2, 3, size, size)
    seen: list[torch.Size] = []
    with torch.inference_mode():
        views = model.embed_views(images, draw(2, 4, 3, 32, 32), closer)
        later = model.project_closer(Embeddings(*(part[1:] for part in views if part is not None)))  # any rows of them
        features = model.backbone(closer)
        model.backbone.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
        found, first = look(model, images, closer), model.head(model.backbone(images))
        alone = model.project_embeddings(Embeddings(*model.embed_regions(closer)))
        parts = [
            model.head.embed(features[..., top:bottom, left:right]) for top, bottom in spans for left, right in spans
        ]
        image = model.head(features)
        patch, heat = (
            torch.stack([layer(part) for part in parts], dim=1)
            for layer in (model.patch_projection, model.weight_projection)
        )
        weights = (heat / TEMPERATURE).exp() / (heat / TEMPERATURE).exp().sum(dim=1, keepdim=True)
    q, p = (weights * patch).sum(dim=1), (first + image) / 2
    tde = p + LAM * q
    torch.testing.assert_close(tuple(found), (p, patch, weights, q, tde, torch.sigmoid(tde / (1 + LAM))))
    torch.testing.assert_close((alone.image_logits, alone.pooled_logits), (image, q))
    torch.testing.assert_close(tuple(later), tuple(value[1:] for value in found))
    assert seen == [images.shape, closer.shape, images.shape, closer.shape]  # one pass stands for all patches
    assert weights.std(dim=1).mean() > 0.02  # so that a wrong order or temperature would be seen


def test_a_model_of_regions_sees_the_image_alone_in_one_pass(tmp_path: Path) -> None:
    model = make_closer()
    model.regions = True
    images = draw(2, 3, 96, 96)
    seen: list[torch.Size] = []
    model.backbone.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    with torch.no_grad():
        found = model(images)
        assert seen == [images.shape]
        again = model.forward_views(images, images[:, None, :, :0])
        expected = model.project_embeddings(Embeddings(*model.embed_regions(images)))
    torch.testing.assert_close((tuple(found), tuple(again)), (tuple(expected),) * 2)
    save_checkpoint(model, tmp_path / "model")
    loaded = PatchClassifier.from_pretrained(tmp_path / "model")
    assert (loaded.regions, loaded.patch_cost, loaded.patching) == (True, 0.0, model.patching)


def test_looks_that_cannot_be_are_refused() -> None:
    for size in (64, 63, 0, -96):
        with pytest.raises(InputError, match=f"a closer look at {size} pixels is no closer than the 64 of the first"):
            PatchClassifier("test_resnet", LABELS, image_size=64, patching=Patching(closer_size=size))
    for cut, patch_only in ((Patching(source_size=128), False), (Patching(patch_size=32), False), (Patching(), True)):
        with pytest.raises(InputError, match="regions of the feature map have no source_size or patch_size"):
            PatchClassifier("test_resnet", LABELS, image_size=64, patching=cut, patch_only=patch_only, regions=True)
    with pytest.raises(InputError, match="the backbone takes images of one size only; look at patches instead"):
        PatchClassifier("test_vit", LABELS, image_size=64, patching=Patching(closer_size=96))
    flexible = Architecture("test_vit", image_size=64, backbone_options={"dynamic_img_size": True})
    model = PatchClassifier(flexible, LABELS, patching=Patching(closer_size=96)).eval().double()
    assert look(model, draw(2, 3, 64, 64), draw(2, 3, 96, 96)).patch_logits.shape == (2, 4, 3)
    with pytest.raises(InputError, match="grid 3 is larger than the image, 2 x 2"):
        make_closer(grid=3).embed_regions(draw(2, 3, 48, 48))


def test_a_closer_look_has_its_own_calibration_at_the_size_that_it_was_fitted_to() -> None:
    model = PatchClassifier("test_resnet", LABELS, image_size=32, patching=Patching(closer_size=48))
    image, patches, again = (Calibration(kind, "platt", (1.0,) * 3, (0.0,) * 3) for kind in ("image", "tde", "tde"))
    assert model.find_calibration(closer_size=48) is None
    model.calibration = patches
    assert model.find_calibration(closer_size=48) is patches
    model.adaptive = Adaptive(image, (0.0, 1.0), again)
    found = [model.find_calibration(closer_size=size) for size in (None, 48, 64)]
    assert [each is again for each in found] == [False, True, False]
    assert found[0] is found[2] is patches
    model.patching = Patching()  # then a second look is at the patches, whatever else is still held
    assert model.find_calibration(closer_size=None) is patches
    model.patching, model.adaptive = Patching(closer_size=48), Adaptive(image, (0.0, 1.0))
    assert model.find_calibration(closer_size=48) is patches
