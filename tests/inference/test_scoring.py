from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from pivotpatch.data.address import open_records
from pivotpatch.data.loading import Loader, make_loader
from pivotpatch.errors import InputError
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.scores import Scores
from pivotpatch.inference.scoring import score_pictures
from pivotpatch.models.classifier import Classifier, IndependentClassifier, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.values import Patching, patch_boxes

LABELS = ["cat", "dog"]
SIZE, SOURCE = 32, 64


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven pictures, one of which is none."""
    root = tmp_path_factory.mktemp("pictures")
    labels = ["cat", "dog", "cat|dog", "?dog", "", "dog", "cat|?dog"]
    for place in range(7):
        pixels = np.random.default_rng(place).integers(0, 256, (90, 70, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{place}.png")
    (root / "4.png").write_bytes(b"no picture")
    rows = "".join(f"{place}.png,{text}\n" for place, text in enumerate(labels))
    (root / "photos.csv").write_text(f"image,labels\n{rows}")
    return root / "photos.csv"


def open_loader(table: Path, size: int) -> Loader:
    """In batches of 3, 3 and 1, the fifth left out."""
    records = open_records(f"table:{table}")
    return make_loader(records, size=(size, size), batch_size=3, on_error="skip", every_batch=True)


def read_pictures(table: Path, size: int) -> Tensor:
    """Bytes (6,1,3,size,size), as the loader ships them."""
    return torch.cat([batch.images for batch in open_loader(table, size)])[:, None]


def resize(image: Tensor) -> Tensor:
    # Not torchvision's: its version and the CPU decide whether that rounds once, or rows and columns each as this does.
    return F.interpolate(image, size=(SIZE, SIZE), mode="bilinear", antialias=True)


def cut(image: Tensor, *, grid: int, overlap: float) -> Tensor:
    """Patches (P,3,SIZE,SIZE) of a picture (1,3,H,W), row by row."""
    boxes = patch_boxes(*image.shape[-2:], grid=grid, overlap=overlap)
    return torch.cat([resize(image[..., box.top : box.bottom, box.left : box.right]) for box in boxes])


def score(model: Classifier | PatchInference, table: Path, size: int, **options: Any) -> Any:
    return score_pictures(model, open_loader(table, size), accelerator=Accelerator(cpu=True), **options)


def assert_row(scores: Scores, row: int, image: Tensor, patch: Tensor) -> None:
    expected = {"image": image, "patch": patch, "tde": image + 0.5 * patch}
    for kind, logits in scores.logits.items():
        torch.testing.assert_close(logits[row], expected[kind], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", [MultiLabelClassifier, IndependentClassifier])
def test_ordinary_networks_see_the_resized_picture(kind: type[Classifier], table: Path) -> None:
    torch.manual_seed(0)
    model = kind("test_vit", LABELS, image_size=SIZE).eval()
    scores = score(model, table, SIZE)
    assert scores.indices.tolist() == [0, 1, 2, 3, 5, 6]
    assert scores.pictures == ("0.png", "1.png", "2.png", "3.png", "5.png", "6.png")
    target = torch.tensor([[1, 0], [0, 1], [1, 1], [0, torch.nan], [0, 1], [1, torch.nan]])
    torch.testing.assert_close(scores.target, target, equal_nan=True)
    assert list(scores.logits) == ["image"]
    for row, picture in enumerate(read_pictures(table, SIZE)):
        expected = model(model.preprocessing(picture))[0]
        assert_row(scores, row, expected, expected)


@torch.no_grad()
@pytest.mark.parametrize(("source_size", "overlap", "grid"), [(None, 0.0, 2), (SOURCE, 0.5, 3)])
def test_patch_networks_see_patches_as_trained(source_size: int | None, overlap: float, grid: int, table: Path) -> None:
    torch.manual_seed(0)
    patching = Patching(grid, overlap, source_size, lam=0.5, temperature=0.7)
    model = PatchClassifier("test_vit", LABELS, image_size=SIZE, patching=patching).eval()
    size = model.picture_size
    scores = score(model, table, size, keep_patches=True)
    assert size == (source_size or SIZE)
    assert (scores.overlap, scores.lam, scores.temperature) == (overlap, 0.5, 0.7)
    for row, picture in enumerate(read_pictures(table, size)):
        embedded = model.head.embed(model.backbone(model.preprocessing(cut(picture, grid=grid, overlap=overlap))))
        q, w = model.patch_projection(embedded), torch.softmax(model.weight_projection(embedded) / 0.7, dim=0)
        torch.testing.assert_close(scores.patch_logits[row], q, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scores.weights[row], w, rtol=1e-4, atol=1e-4)
        p = model.head(model.backbone(model.preprocessing(resize(picture))))
        assert_row(scores, row, p[0], (w * q).sum(0))


def test_a_network_that_was_trained_on_patches_alone_is_ranked_by_them(table: Path) -> None:
    model = PatchClassifier("test_vit", LABELS, image_size=SIZE)
    both = score(model, table, SIZE)
    model.patch_only = True
    alone = score(model, table, SIZE)
    assert (both.ranking, alone.ranking, list(alone.logits)) == ("tde", "patch", ["patch"])
    assert torch.equal(alone.get("patch"), both.get("patch"))


def test_records_of_fewer_labels_get_the_scores_of_these(table: Path) -> None:
    model = PatchClassifier(
        "test_vit", ["dog", "cow", "cat"], image_size=SIZE, patching=Patching(lam=0.5, temperature=2.0)
    )
    (table.parent / "all.csv").write_text(table.read_text().replace("0.png,cat", "0.png,cat|cow"))
    records = open_records(f"table:{table.parent / 'all.csv'}")

    def score_labels(*names: str) -> Scores:
        loader = make_loader(records.keep_labels(names), size=(SIZE, SIZE), batch_size=3, on_error="skip")
        return score_pictures(model, loader, accelerator=Accelerator(cpu=True), keep_patches=True)

    few, whole = score_labels("cat", "dog"), score_labels("dog", "cow", "cat")
    assert few.labels == ("cat", "dog")
    for name in ("target", "patch_logits", "weights"):
        torch.testing.assert_close(getattr(few, name), getattr(whole, name)[..., [2, 0]], equal_nan=True)
    for kind, logits in whole.logits.items():
        assert torch.equal(few.get(kind), logits[:, [2, 0]])
    torch.testing.assert_close(few.remix(lam=few.lam, temperature=few.temperature).get("tde"), few.get("tde"))
    with pytest.raises(InputError, match="unknown label 'dog'; did you mean 'dogs'"):
        score(MultiLabelClassifier("test_vit", ["dogs", "cat"], image_size=SIZE), table, SIZE)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_logits_that_are_not_finite_blame_the_network(value: float, table: Path) -> None:
    plain, patched = (kind("test_resnet", LABELS, image_size=SIZE) for kind in (MultiLabelClassifier, PatchClassifier))
    plain.get_parameter("head.project.bias").data[1] = value
    patched.get_parameter("patch_projection.bias").data[0] = value
    plain.origin = patched.origin = "runs/mine"
    for model, where in ((PatchInference(plain), "image logit of 'dog'"), (patched, "patch logit of 'cat'")):
        with pytest.raises(InputError, match=rf"^runs/mine: its {where} is {value:g} for .*0.png; its weights or"):
            score(model, table, SIZE)
