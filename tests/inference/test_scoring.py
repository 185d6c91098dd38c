from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as TF

from pivotpatch.core.patches import patch_boxes
from pivotpatch.data.address import open_records
from pivotpatch.data.loading import Loader, make_loader
from pivotpatch.errors import InputError
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.scores import Scores
from pivotpatch.inference.scoring import score_images, score_pictures, split_for_device
from pivotpatch.models.classifier import Classifier, IndependentClassifier, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier

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


def read_picture(table: Path, index: int, size: int) -> Tensor:
    """Bytes (1,3,size,size), as the loader ships them."""
    batches = list(open_loader(table, size))
    images, indices = torch.cat([batch.images for batch in batches]), torch.cat([batch.indices for batch in batches])
    return images[indices == index]


def resize(image: Tensor) -> Tensor:
    resized: Tensor = TF.resize(image, [SIZE, SIZE], antialias=True)
    return resized


def normalise(model: Classifier, image: Tensor) -> Tensor:
    scaled = image.float() / 255
    normalised: Tensor = TF.normalize(scaled, list(model.preprocessing.mean), list(model.preprocessing.std))
    return normalised


def cut(image: Tensor, *, grid: int, overlap: float) -> list[Tensor]:
    """Patches (1,3,h,w) of a picture, row by row."""
    boxes = patch_boxes(*image.shape[-2:], grid=grid, overlap=overlap)
    return [image[..., box.top : box.bottom, box.left : box.right] for box in boxes]


def score(model: Classifier | PatchInference, table: Path, size: int) -> Scores:
    return score_pictures(model, open_loader(table, size), accelerator=Accelerator())


def list_indices(scores: Scores) -> list[int]:
    assert scores.indices is not None
    return [int(index) for index in scores.indices]


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", [MultiLabelClassifier, IndependentClassifier])
def test_ordinary_networks_see_the_resized_picture(kind: type[Classifier], table: Path) -> None:
    torch.manual_seed(0)
    model = kind("test_vit", LABELS, image_size=SIZE).eval()
    scores = score(model, table, SIZE)
    assert list_indices(scores) == [0, 1, 2, 3, 5, 6]
    assert scores.pictures == ("0.png", "1.png", "2.png", "3.png", "5.png", "6.png")
    assert list(scores.logits) == ["image"]
    for row, index in enumerate(list_indices(scores)):
        expected = model(normalise(model, read_picture(table, index, SIZE)))
        assert_near(scores.logits["image"][row], expected[0])


@torch.no_grad()
@pytest.mark.parametrize(("source_size", "overlap", "grid"), [(None, 0.0, 2), (SOURCE, 0.5, 3), (SOURCE, 0.0, 2)])
def test_patch_networks_see_patches_as_they_were_trained(
    source_size: int | None, overlap: float, grid: int, table: Path
) -> None:
    torch.manual_seed(0)
    model = PatchClassifier(
        "test_vit",
        LABELS,
        image_size=SIZE,
        grid=grid,
        overlap=overlap,
        source_size=source_size,
        lam=0.5,
        temperature=0.7,
    ).eval()
    scores = score(model, table, model.picture_size)
    assert model.picture_size == (source_size or SIZE)
    assert scores.overlap == overlap
    for row, index in enumerate(list_indices(scores)):
        picture = read_picture(table, index, model.picture_size)
        patches = [resize(part) for part in cut(picture, grid=grid, overlap=overlap)]
        p = model.head(model.backbone(normalise(model, resize(picture))))
        embedded = [model.head.embed(model.backbone(normalise(model, patch))) for patch in patches]
        q = torch.stack([model.patch_projection(part) for part in embedded])
        w = torch.softmax(torch.stack([model.weight_projection(part) for part in embedded]) / 0.7, dim=0)
        pooled = (w * q).sum(0)
        assert_near(scores.logits["image"][row], p[0])
        assert_near(scores.logits["patch"][row], pooled[0])
        assert_near(scores.logits["tde"][row], (p + 0.5 * pooled)[0])


@torch.no_grad()
@pytest.mark.parametrize("size", [SIZE, SOURCE])
def test_pat_i_cuts_larger_pictures_natively(size: int, table: Path) -> None:
    torch.manual_seed(0)
    model = MultiLabelClassifier("test_vit", LABELS, image_size=SIZE).eval()
    scores = score(PatchInference(model, lam=0.5), table, size)
    for row, index in enumerate(list_indices(scores)):
        picture = read_picture(table, index, size)
        p = model(normalise(model, resize(picture)))
        q = torch.stack([model(resize(part)) for part in cut(normalise(model, picture), grid=2, overlap=0)])
        pooled = (torch.softmax(q, dim=0) * q).sum(0)
        assert_near(scores.logits["image"][row], p[0])
        assert_near(scores.logits["patch"][row], pooled[0])
        assert_near(scores.logits["tde"][row], (p + 0.5 * pooled)[0])


def test_patches_are_kept_where_they_are_wanted(table: Path) -> None:
    torch.manual_seed(0)
    model = PatchClassifier("test_vit", LABELS, image_size=SIZE, grid=3, lam=0.5, temperature=0.7)
    loader = open_loader(table, SIZE)
    scores = score_pictures(model, loader, accelerator=Accelerator(), keep_patches=True)
    assert scores.patch_logits is not None
    assert scores.weights is not None
    assert scores.patch_logits.shape == scores.weights.shape == (6, 9, 2)
    assert (scores.lam, scores.temperature) == (0.5, 0.7)
    torch.testing.assert_close(scores.weights.sum(1), torch.ones(6, 2))
    torch.testing.assert_close((scores.weights * scores.patch_logits).sum(1), scores.logits["patch"])
    assert score(model, table, SIZE).patch_logits is None


def test_targets_come_with_their_pictures(table: Path) -> None:
    scores = score(MultiLabelClassifier("test_vit", LABELS, image_size=SIZE), table, SIZE)
    nan = torch.nan
    expected = torch.tensor([[1, 0], [0, 1], [1, 1], [0, nan], [0, 1], [1, nan]])
    torch.testing.assert_close(scores.target, expected, equal_nan=True)
    assert scores.logits["image"].dtype == torch.float32
    assert not scores.logits["image"].requires_grad


def test_every_part_returns_to_the_mode_that_it_was_in(table: Path) -> None:
    """A network under PAT-I, say, is evaluated while the wrapper was never told of any mode."""
    model = MultiLabelClassifier("test_resnet", LABELS, image_size=SIZE).train()
    model.backbone.eval()
    wrapped = PatchInference(MultiLabelClassifier("test_resnet", LABELS, image_size=SIZE).eval())
    seen: set[bool] = set()
    for network in (model, wrapped):
        norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
        norms[0].register_forward_hook(lambda module, *_: seen.add(module.training))
        before = {name: module.training for name, module in network.named_modules()}
        assert len(set(before.values())) == 2
        score(network, table, SIZE)
        assert {name: module.training for name, module in network.named_modules()} == before
    assert seen == {False}


def test_nothing_that_could_be_read_is_no_score(table: Path) -> None:
    (table.parent / "bad.csv").write_text("image,labels\nnowhere.png,cat|dog\n")
    records = open_records(f"table:{table.parent / 'bad.csv'}")
    loader = make_loader(records, size=(SIZE, SIZE), batch_size=3, on_error="skip", every_batch=True)
    model = PatchClassifier("test_vit", LABELS, image_size=SIZE)
    scores = score_pictures(model, loader, accelerator=Accelerator())
    assert scores.target.shape == (0, 2)
    assert {name: value.shape for name, value in scores.logits.items()} == dict.fromkeys(
        ["image", "patch", "tde"], (0, 2)
    )
    assert [failure.name for failure in loader.failures] == ["nowhere.png"]


def test_a_model_without_preprocessing_is_refused() -> None:
    with pytest.raises(InputError, match="a Linear says no preprocessing; give a Classifier"):
        score_images(PatchInference(nn.Linear(3, 2)), torch.zeros(1, 3, 8, 8, dtype=torch.uint8))


def test_a_network_that_was_trained_on_patches_alone_is_ranked_by_them(table: Path) -> None:
    torch.manual_seed(0)
    model = PatchClassifier("test_vit", LABELS, image_size=SIZE)
    both = score_pictures(model, open_loader(table, SIZE), accelerator=Accelerator(cpu=True), keep_patches=True)
    model.patch_only = True
    alone = score_pictures(model, open_loader(table, SIZE), accelerator=Accelerator(cpu=True), keep_patches=True)
    assert (both.ranking, alone.ranking, list(alone.logits)) == ("tde", "patch", ["patch"])
    assert torch.equal(alone.get("patch"), both.get("patch"))
    assert alone.weights is not None
    assert both.weights is not None
    assert torch.equal(alone.weights, both.weights)


def make_three(wrapped: bool) -> Classifier | PatchInference:
    """A model that knows three labels."""
    labels, lam, temperature = ["dog", "cow", "cat"], 0.5, 2.0
    torch.manual_seed(0)
    if wrapped:
        return PatchInference(
            MultiLabelClassifier("test_vit", labels, image_size=SIZE), lam=lam, temperature=temperature
        )
    model = PatchClassifier("test_vit", labels, image_size=SIZE)
    model.set_mixing(lam=lam, temperature=temperature)
    return model


@pytest.mark.parametrize("wrapped", [False, True])
def test_records_of_fewer_labels_get_the_scores_of_these(wrapped: bool, table: Path) -> None:
    model = make_three(wrapped)
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
    torch.testing.assert_close(few.mix(lam=few.lam, temperature=few.temperature), few.get("tde"))


def test_a_label_that_the_network_does_not_know_has_no_score(table: Path) -> None:
    model = MultiLabelClassifier("test_vit", ["dogs", "cat"], image_size=SIZE)
    with pytest.raises(InputError, match="unknown label 'dog'; did you mean 'dogs'"):
        score(model, table, SIZE)


@pytest.mark.parametrize(("side", "parts"), [(64, [20]), (256, [8, 8, 4]), (448, [2] * 10), (2000, [1] * 20)])
def test_a_cpu_gets_as_many_pixels_at_once_as_it_is_quick_with(side: int, parts: list[int]) -> None:
    images = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(20, 3, side, side)
    split = split_for_device(images)
    assert [len(part) for part in split] == parts
    assert [len(part) for part in split_for_device(images.to("meta"))] == [20]  # any other device takes all


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_logits_that_are_not_finite_blame_the_network(value: float, table: Path) -> None:
    plain, patched = (kind("test_resnet", LABELS, image_size=SIZE) for kind in (MultiLabelClassifier, PatchClassifier))
    plain.get_parameter("head.project.bias").data[1] = value
    patched.get_parameter("patch_projection.bias").data[0] = value
    plain.origin = patched.origin = "runs/mine"
    said = rf"is {value:g} for .*0.png; its weights or its description are damaged; use a sound model$"
    for model, where in ((plain, "image logit of 'dog'"), (PatchInference(plain), "image logit of 'dog'")):
        with pytest.raises(InputError, match=f"^runs/mine: its {where} {said}"):
            score_pictures(model, open_loader(table, SIZE), accelerator=Accelerator(cpu=True))
    with pytest.raises(InputError, match=f"^runs/mine: its patch logit of 'cat' {said}"):
        score_pictures(patched, open_loader(table, SIZE), accelerator=Accelerator(cpu=True))
