"""Pictures of every kind get the answer that the network gives to their pixels."""

import json
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from pivotpatch.core.adaptive import Adaptive, measure_uncertainty
from pivotpatch.core.calibration import Calibration
from pivotpatch.core.patches import PatchBox
from pivotpatch.data.decoding import decode_image
from pivotpatch.errors import InputError
from pivotpatch.inference.engine import Answer, TorchEngine
from pivotpatch.inference.prediction import LONGEST
from pivotpatch.inference.predictor import Picture, Predictor
from pivotpatch.models import named
from pivotpatch.models.checkpoint import load_checkpoint, save_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier

LABELS = ("cat", "dog")
PIXELS = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
CLEAR = np.full((80, 80, 3), (255, 160, 0), np.uint8)


@dataclass(frozen=True)
class Means:
    """An engine whose answer can be read off a picture: the mean of its red and of its blue channel."""

    labels: tuple[str, ...] = LABELS
    thresholds: tuple[float, ...] | None = None
    picture_size: int = 16
    grid: int = 2
    overlap: float = 0.0

    def __call__(self, pictures: Tensor) -> Answer:
        assert pictures.dtype == torch.uint8
        assert pictures.shape[1:] == (3, self.picture_size, self.picture_size)
        probs = pictures[:, [0, 2]].float().mean(dim=(2, 3)) / 255
        if not self.grid:
            return Answer(probs, probs)
        corners = (
            pictures[:, [0, 2]].float().unfold(2, 8, 8).unfold(3, 8, 8).mean(dim=(4, 5)).flatten(2).transpose(1, 2)
        )
        return Answer(probs, probs, probs, corners / corners.sum(dim=1, keepdim=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with native patches."""
    torch.manual_seed(0)
    model = PatchClassifier("test_resnet", LABELS, image_size=32, source_size=64)
    model.thresholds = (0.25, 0.75)
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    save_checkpoint(model, folder)
    return folder


def encode(pixels: NDArray[np.uint8], kind: str = "PNG") -> bytes:
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def every_kind(folder: Path) -> dict[str, Picture]:
    path = folder / "a photo #1.png"
    path.write_bytes(encode(PIXELS))
    tensor = torch.from_numpy(PIXELS).permute(2, 0, 1)
    return {
        "path": path,
        "text": str(path),
        "url": path.as_uri(),
        "bytes": path.read_bytes(),
        "pillow": Image.fromarray(PIXELS),
        "opened": Image.open(path),
        "array": PIXELS,
        "read-only": np.broadcast_to(PIXELS, PIXELS.shape),
        "strided": np.asfortranarray(PIXELS),
        "tensor": tensor,
        "floats": tensor / 255,
        "halves": (tensor / 255).double().requires_grad_(),
    }


def test_a_picture_gets_the_same_answer_however_it_is_given(checkpoint: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(checkpoint)
    given = every_kind(tmp_path)
    pixels = decode_image(PIXELS, size=(64, 64))  # what the loader would ship
    expected = predictor.engine(torch.from_numpy(pixels).permute(2, 0, 1)[None])
    for kind, picture in given.items():
        prediction = predictor(picture)
        assert torch.equal(prediction.probs, expected.probs[0]), kind
        assert prediction.size == (90, 70)
        assert prediction.labels == LABELS
        assert prediction.thresholds.tolist() == [0.25, 0.75]
        assert np.array_equal(prediction.image, PIXELS), kind
        named = kind in ("path", "text", "url")
        assert prediction.picture == (str(tmp_path / "a photo #1.png") if named else None)


def test_grey_pixels_are_repeated() -> None:
    grey = PIXELS[..., 0]
    prediction = Predictor(Means())(grey)
    assert torch.equal(prediction.probs, Predictor(Means())(np.dstack([grey] * 3)).probs)
    assert prediction.probs[0] == prediction.probs[1]


def test_rows_go_to_their_pictures_and_columns_to_their_labels() -> None:
    red, blue = np.zeros((30, 40, 3), np.uint8), np.zeros((50, 20, 3), np.uint8)
    red[:15, 20:, 0] = 255  # a quarter of the picture, above on the right
    blue[..., 2] = 204
    first, second = Predictor(Means(thresholds=(0.2, 0.9)))([red, blue])
    assert [tag.label for tag in first.tags] == ["cat"]
    assert first.tags[0].prob == pytest.approx(0.25, abs=0.05)
    assert first.tags[0].box == PatchBox(20, 0, 40, 15)
    assert second.probs.tolist() == pytest.approx([0, 0.8])
    assert not second.tags
    assert (first.size, second.size) == ((30, 40), (50, 20))


def test_labels_without_thresholds_are_given_above_a_half() -> None:
    pixels = np.full((20, 20, 3), 127, np.uint8)
    pixels[..., 2] = 128
    assert [tag.label for tag in Predictor(Means())(pixels).tags] == ["dog"]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7])
def test_a_list_is_answered_in_batches_and_in_order(count: int) -> None:
    pictures = [np.full((20, 20, 3), 10 * place, np.uint8) for place in range(count)]
    found = Predictor(Means(), batch_size=3)(pictures)
    assert [round(prediction.probs[0].item() * 25.5, 3) for prediction in found] == list(range(count))
    assert [prediction.to_dict() for prediction in Predictor(Means())(tuple(pictures))] == [
        prediction.to_dict() for prediction in found
    ]


def test_size_and_boxes_are_of_the_turned_picture(tmp_path: Path) -> None:
    stored = np.zeros((300, 200, 3), np.uint8)
    stored[:150, :100, 0] = 255  # stored above on the left, shown above on the right
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.jpg"
    Image.fromarray(stored).save(path, exif=exif, quality=100, subsampling=0)
    for picture in (path, Image.open(path), path.read_bytes()):
        prediction = Predictor(Means())(picture)
        assert prediction.size == (200, 300)
        assert prediction.get("cat").box == PatchBox(150, 0, 300, 100)


def test_a_large_jpeg_is_read_as_the_loader_reads_it(tmp_path: Path) -> None:
    small = np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    path = tmp_path / "large.jpg"
    Image.fromarray(small).resize((1500, 1000)).save(path)
    prediction = Predictor(Means())(path)
    expected = Means()(torch.from_numpy(decode_image(path, size=(16, 16))).permute(2, 0, 1)[None])
    assert torch.equal(prediction.probs, expected.probs[0])
    assert prediction.size == (1000, 1500)
    opened = Image.open(path)
    assert Predictor(Means())(opened).size == opened.size[::-1] == (1000, 1500)  # not decoded smaller for good


def test_little_is_kept_of_a_large_picture_and_nothing_of_the_callers() -> None:
    pixels = np.zeros((2000, 1000, 3), np.uint8)
    source = Predictor(Means())(pixels).source
    assert isinstance(source, np.ndarray)
    assert source.shape == (LONGEST, LONGEST // 2, 3)
    assert source.base is None
    own = PIXELS.copy()
    prediction = Predictor(Means())(own)
    own[:] = 0
    assert np.array_equal(prediction.image, PIXELS)


@pytest.mark.parametrize(
    ("picture", "wrong"),
    [
        ("https://example.org/a.jpg", "https://example.org/a.jpg: is not on this machine; download it"),
        ("s3://bucket/a.jpg", "is not on this machine"),
        ("file://other.example/a.jpg", "is not on this machine"),
        ("no such file.jpg", r"no such file.jpg: cannot be read \(No such file"),
        (".", "it is no regular file"),
        (b"not a picture", "picture: is in none of the known formats"),
        (b"", "picture: is empty"),
        (encode(PIXELS)[:200], "picture: cannot be decoded"),
        (7, "picture: is a int; give a path"),
        (np.zeros((8, 8, 3)), r"the array is float64 of shape \(8, 8, 3\)"),
        (np.zeros((8, 8, 4), np.uint8), r"the array is uint8 of shape \(8, 8, 4\)"),
        (np.zeros((0, 8), np.uint8), r"shape \(0, 8, 3\)"),
        (torch.zeros(2, 3, 8, 8), r"shape \(2, 3, 8, 8\); give \(3, H, W\), or list"),
        (torch.zeros(8, 8, 3), r"shape \(8, 8, 3\); give \(3, H, W\)$"),
        (torch.zeros(3, 0, 8), r"shape \(3, 0, 8\)"),
        (torch.full((3, 8, 8), 1.5), "values run from 1.5 to 1.5; give uint8, or floats from 0 to 1 that are not"),
        (torch.full((3, 8, 8), -0.1), "values run from -0.1"),
        (torch.full((3, 8, 8), torch.nan), "values run from nan"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), "the tensor is torch.int64"),
    ],
)
def test_what_is_no_picture_is_refused(picture: Picture, wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        Predictor(Means())(picture)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.png"
    path.write_bytes(encode(PIXELS)[:300])
    with pytest.raises(InputError, match="cut.png: cannot be decoded"):
        Predictor(Means())([PIXELS, path])


def test_pixels_of_a_list_are_named_by_their_place() -> None:
    pictures = [*[PIXELS] * 9, PIXELS[..., :2]]
    with pytest.raises(InputError, match=r"pictures\[9\]: the array is uint8 of shape \(90, 70, 2\)"):
        Predictor(Means(), batch_size=4)(pictures)


@pytest.mark.parametrize("size", [(1, 9), (1, 1)])
def test_a_picture_may_have_fewer_pixels_than_patches(size: tuple[int, int]) -> None:
    for grid in (0, 2):
        prediction = Predictor(Means(grid=grid))(np.full((*size, 3), 255, np.uint8))
        assert prediction.probs.tolist() == [1, 1]
        assert prediction.size == size


def test_a_network_needs_an_engine(checkpoint: Path) -> None:
    network = load_checkpoint(checkpoint)
    todo = r"write Predictor\(TorchEngine\(network\)\)$"
    with pytest.raises(InputError, match=f"^Predictor: it is given a network; {todo}"):
        Predictor(network)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"^Predictor.load: a PatchClassifier is no name nor folder; .* {todo}"):
        Predictor.load(network)  # type: ignore[arg-type]


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(InputError, match="batch_size is 0"):
        Predictor(Means(), batch_size=0)


def test_a_network_without_patches_gives_tags_without_boxes() -> None:
    model = MultiLabelClassifier("test_resnet", LABELS, image_size=32)
    (tag, *_) = Predictor(TorchEngine(model))(PIXELS).top(1)
    assert (tag.prob, tag.patch_prob, tag.weights, tag.box) == (tag.image_prob, None, None, None)


def test_a_run_is_opened_at_its_best_network(checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "last").symlink_to(checkpoint, target_is_directory=True)
    with pytest.raises(InputError, match="run: the run has no best network yet; train on, or give .*last"):
        Predictor.load(run)
    model = MultiLabelClassifier("test_resnet", ["best"], image_size=32)
    save_checkpoint(model, run / "best")
    assert Predictor.load(str(run)).labels == ("best",)
    assert Predictor.load(run / "last", device="cpu").labels == LABELS


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("tager", "tager: is neither a bundled model nor .*did you mean 'tagger'.*or give the folder of a run"),
        ("missing.onnx", "missing.onnx: .*check the path"),
        (
            "photo.safetensors",
            "photo.safetensors: is a file; .*give the folder of a run or checkpoint, or an .onnx file",
        ),
        ("empty", "empty: is no checkpoint, model.json is missing"),
    ],
)
def test_what_cannot_be_opened_is_named(name: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photo.safetensors").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=wrong):
        Predictor.load(name)


def test_a_bundled_model_that_is_not_there_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "BUNDLED", ("absent",))
    with pytest.raises(InputError, match="absent: this installation lacks it; install pivotpatch again, or give a run"):
        Predictor.load("absent")


def test_a_device_that_is_not_there_is_refused(checkpoint: Path) -> None:
    with pytest.raises(InputError, match="device: 'nonsense' cannot be used"):
        Predictor.load(checkpoint, device="nonsense")


@pytest.fixture(scope="module")
def tuned(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with a cutoff at effort 0.5 that the image of `CLEAR` is below."""
    model = load_checkpoint(checkpoint)
    image = Calibration("image", "platt", (1.0, 1.0), (0.0, 0.0))
    doubt = [measure_uncertainty(Predictor.load(checkpoint, effort=0)(pixels).probs) for pixels in (CLEAR, PIXELS)]
    assert doubt[0] < doubt[1]
    model.adaptive = Adaptive(image, (0.0, (doubt[0].item() + doubt[1].item()) / 2, 1.0))
    folder = tmp_path_factory.mktemp("tuned") / "checkpoint"
    save_checkpoint(model, folder)
    return folder


def test_a_picture_that_is_clear_without_its_patches_has_no_box(tuned: Path) -> None:
    clear, unclear = Predictor.load(tuned, effort=0.5)([CLEAR, PIXELS])
    full, alone = Predictor.load(tuned)(PIXELS), Predictor.load(tuned, effort=0)(CLEAR)
    assert torch.allclose(unclear.probs, full.probs, atol=1e-6)
    assert [tag.box for tag in unclear.top(2)] == [tag.box for tag in full.top(2)] != [None, None]
    assert torch.allclose(clear.probs, alone.probs, atol=1e-6)
    assert (clear.patch_probs, clear.weights) == (None, None)
    (tag, *_) = clear.top(1)
    assert (tag.prob, tag.patch_prob, tag.weights, tag.box) == (tag.image_prob, None, None, None)
    assert len(clear.tags) == 1
    (told,) = json.loads(json.dumps(clear.to_dict(), allow_nan=False))["tags"]
    assert (told["patch_prob"], told["weights"], told["box"]) == (None, None, None)
    assert set(told) == set(full.top(1)[0].to_dict())
    for label in (None, "cat"):
        clear.plot(label).savefig(BytesIO(), format="png")
    assert "nan" not in clear._repr_html_() + repr(clear)


@pytest.mark.parametrize("effort", [0.0, 0.5])
def test_effort_goes_through_batches_of_any_size(tuned: Path, effort: float) -> None:
    pictures = [CLEAR, PIXELS, PIXELS[::-1].copy(), CLEAR, PIXELS[:, ::-1].copy()]
    predictor = Predictor.load(tuned, effort=effort)
    together, alone = predictor(pictures), [predictor(picture) for picture in pictures]
    for one, other in zip(together, alone, strict=True):
        assert torch.allclose(one.probs, other.probs, atol=1e-6)
        assert (one.weights is None) == (other.weights is None)
    assert {one.weights is None for one in together} == ({True} if effort == 0 else {True, False})


def test_efforts_that_cannot_be_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="effort: is 0.5, but nobody has fitted .*; run pivotpatch tune, with a calib"):
        Predictor.load(checkpoint, effort=0.5)
    with pytest.raises(InputError, match="Predictor: effort is 2; give a number from 0"):
        Predictor.load(checkpoint, effort=2)
    with pytest.raises(InputError, match="m.onnx: exported networks look at the patches of every picture, effort is 0"):
        Predictor.load(tmp_path / "m.onnx", effort=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backbone", ["resnet18", "tresnet_m", "tf_efficientnet_lite0", "test_vit"])
def test_a_gpu_says_nearly_the_same(backbone: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = PatchClassifier(backbone, LABELS, image_size=64, closer_size=None if backbone == "test_vit" else 96)
    model.calibration = Calibration("tde", "platt", (1.0, 1.0), (0.0, 0.0))
    model.adaptive = Adaptive(Calibration("image", "platt", (1.0, 1.0), (0.0, 0.0)), (0.0, 0.0, 1.0))
    save_checkpoint(model, tmp_path / "model")
    for effort in (0, 0.5, 1):
        here, there = (
            Predictor.load(tmp_path / "model", device=device, effort=effort)(PIXELS) for device in ("cpu", "cuda")
        )
        torch.testing.assert_close(there.probs, here.probs, rtol=0, atol=0.02)
        assert there.probs.device.type == "cpu"
