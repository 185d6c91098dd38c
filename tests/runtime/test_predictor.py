"""Images of every kind get the answer that the model gives to their pixels."""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from made_engines import Means
from numpy.typing import NDArray
from PIL import Image

from pivotpatch.errors import InputError
from pivotpatch.models import load_checkpoint, save_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.decoding import decode_image
from pivotpatch.runtime.engine import Answer, Array, Pixels
from pivotpatch.runtime.prediction import LONGEST
from pivotpatch.runtime.predictor import Picture, Predictor
from pivotpatch.runtime.values import Adaptive, Calibration, PatchBox, Patching

LABELS = ("cat", "dog")
PIXELS = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with native patches."""
    torch.manual_seed(0)
    model = PatchClassifier("test_resnet", LABELS, image_size=32, patching=Patching(source_size=64))
    model.thresholds = (0.25, 0.75)
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    save_checkpoint(model, folder)
    return folder


def test_a_picture_gets_the_same_answer_however_it_is_given(checkpoint: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(checkpoint)
    pixels = decode_image(PIXELS, size=(64, 64))  # what the loader would ship
    expected = predictor.engine.ask(pixels[None])
    path = tmp_path / "a photo #1.png"
    Image.fromarray(PIXELS).save(path)
    tensor = torch.from_numpy(PIXELS).permute(2, 0, 1)
    named: list[Picture] = [path, str(path)]
    held: list[Picture] = [path.read_bytes(), Image.open(path), np.asfortranarray(PIXELS), tensor]
    for picture in [*named, *held, (tensor / 255).double().requires_grad_()]:
        prediction = predictor(picture)
        assert np.array_equal(prediction.probs, expected.probs[0])
        assert (prediction.size, prediction.labels) == ((90, 70), LABELS)
        assert prediction.thresholds.tolist() == [0.25, 0.75]
        assert np.array_equal(prediction.image, PIXELS)
        assert prediction.picture == (str(path) if any(picture is each for each in named) else None)


def test_rows_go_to_their_pictures_and_columns_to_their_labels() -> None:
    red, blue = np.zeros((30, 40, 3), np.uint8), np.zeros((50, 20, 3), np.uint8)
    red[:15, 20:, 0] = 255  # a quarter of the picture, above on the right
    blue[..., 2] = 204
    first, second = Predictor(Means(thresholds=(0.2, 0.5, 0.9), grid=2))([red, blue])
    assert [tag.label for tag in first.tags] == ["red"]
    assert first.tags[0].prob == pytest.approx(0.25, abs=0.05)
    assert first.tags[0].box == PatchBox(20, 0, 40, 15)
    assert second.probs.tolist() == pytest.approx([0, 0, 0.8])
    assert not second.tags
    assert (first.size, second.size) == ((30, 40), (50, 20))


def test_a_camera_may_write_each_image_into_the_same_place() -> None:
    def film(frame: NDArray[np.uint8] | torch.Tensor) -> Iterator[Picture]:
        for level in range(12):
            frame[:] = 20 * level
            yield frame

    for frame in (np.zeros((30, 40, 3), np.uint8), torch.zeros(3, 30, 40, dtype=torch.uint8)):
        found = [prediction.probs[0] for prediction in Predictor(Means(), batch_size=2).predict(film(frame))]
        assert found == pytest.approx([20 * level / 255 for level in range(12)])


def test_a_large_jpeg_is_turned_and_read_as_the_loader_reads_it_and_little_of_it_is_kept(tmp_path: Path) -> None:
    stored = np.zeros((2000, 1000, 3), np.uint8)
    stored[:1000, :500, 0] = 255  # stored above on the left, shown above on the right
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.jpg"
    Image.fromarray(stored).save(path, exif=exif, quality=100, subsampling=0)
    expected = Means().ask(decode_image(path, size=(8, 8))[None])
    opened = Image.open(path)
    for picture in (path, opened, path.read_bytes()):
        prediction = Predictor(Means(grid=2))(picture)
        assert prediction.size == (1000, 2000)
        assert prediction.get("red").box == PatchBox(1000, 0, 2000, 500)
        assert np.array_equal(prediction.probs, expected.probs[0])
        assert prediction.image.shape == (LONGEST // 2, LONGEST, 3)
    assert opened.size == (1000, 2000)  # not decoded smaller for good


@pytest.mark.parametrize(
    ("picture", "wrong"),
    [
        ("no such file.jpg", r"no such file.jpg: cannot be read \(No such file"),
        (b"not an image", "image: is in none of the known formats"),
        (7, "image: is a int; give a path"),
        (BytesIO(b"x"), "image: is a BytesIO; give a path"),
        (torch.full((3, 8, 8), 3, dtype=torch.bfloat16), "the tensor is torch.bfloat16 from 3 to 3; give uint8"),
        ([PIXELS, PIXELS[..., :2]], r"images\[1\]: the array is uint8 of shape \(90, 70, 2\)"),
        (torch.zeros(2, 3, 8, 8), r"shape \(2, 3, 8, 8\); give \(3, H, W\), or list"),
        (torch.full((3, 8, 8), 1.5), "from 1.5 to 1.5; give uint8, or floats from 0 to 1 that are not normalised"),
    ],
)
def test_what_is_no_picture_is_refused(picture: Picture, wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        Predictor(Means())(picture)


def test_a_predictor_needs_an_engine_and_a_device_that_is_there(checkpoint: Path) -> None:
    with pytest.raises(
        InputError, match=r"^Predictor: it is given a PatchClassifier; write Predictor\(TorchEngine\(model\)\)$"
    ):
        Predictor(load_checkpoint(checkpoint))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="batch_size is 0"):
        Predictor(Means(), batch_size=0)
    with pytest.raises(InputError, match="device: 'nonsense' cannot be used"):
        Predictor.load(checkpoint, device="nonsense")
    for device in ("cpu", torch.device("cpu")):
        assert Predictor.load(device=device).engine.labels[:1] == ("person",)


class Unsure(Means):
    """Looks at the patches of the second image only."""

    def ask(self, images: Pixels) -> Answer[Array]:
        probs, image_probs, patch_probs, weights = super().ask(images)
        assert patch_probs is not None
        assert weights is not None
        clear = np.array([np.nan, 0.0], np.float32)
        return Answer(probs, image_probs, patch_probs + clear[:, None], weights + clear[:, None, None])


def test_a_picture_that_is_clear_without_its_patches_has_no_box() -> None:
    clear, unclear = Predictor(Unsure(thresholds=(0.1, 0.9, 0.9), grid=2))([PIXELS, PIXELS])
    assert None not in [tag.box for tag in unclear.top(2)]
    assert (clear.patch_probs, clear.weights) == (None, None)
    (told,) = clear.to_dict()["tags"]
    assert (told["patch_prob"], told["weights"], told["box"]) == (None, None, None)
    assert set(told) == set(unclear.top(1)[0].to_dict())


def test_one_bad_file_loses_no_good_image() -> None:
    images: list[Picture] = [PIXELS, "gone.png", PIXELS[:9], b"no image", *[PIXELS] * 9, 7]
    found = Predictor(Means(), batch_size=3)(images, on_error="skip")
    wrong = {place: str(each) for place, each in enumerate(found) if isinstance(each, InputError)}
    assert [(place, told.partition(":")[0]) for place, told in wrong.items()] == [
        (1, "gone.png"),
        (3, "images[3]"),
        (13, "images[13]"),
    ]
    assert [each.size for each in found if not isinstance(each, InputError)] == [(90, 70), (9, 70)] + [(90, 70)] * 9
    with pytest.raises(InputError, match=r"gone\.png"):
        Predictor(Means())(images)
    with pytest.raises(InputError, match="Predictor: unknown on_error 'ignore'; known: error, skip"):
        Predictor(Means())(images, on_error="ignore")  # type: ignore[call-overload]


def test_a_preference_chooses_among_fitted_thresholds(checkpoint: Path, tmp_path: Path) -> None:
    model = load_checkpoint(checkpoint)
    model.preferences = {"precision": (0.9, 0.8), "balance": (0.25, 0.75), "recall": (0.05, 0.1)}
    save_checkpoint(model, tmp_path / "tuned")
    for prefer, thresholds in (*model.preferences.items(), (None, (0.25, 0.75))):
        prediction = Predictor.load(tmp_path / "tuned", prefer=prefer)(PIXELS)  # type: ignore[arg-type]
        assert prediction.thresholds.tolist() == pytest.approx(thresholds)
    with pytest.raises(InputError, match="has no thresholds that prefer recall; tune it"):
        Predictor.load(checkpoint, prefer="recall")
    with pytest.raises(InputError, match="Predictor: unknown preference 'precison'; did you mean 'precision'"):
        Predictor.load(checkpoint, prefer="precison")  # type: ignore[arg-type]


def test_one_image_is_no_list_of_images(checkpoint: Path) -> None:
    predictor = Predictor.load(checkpoint)
    for one in ("photo.jpg", Path("photo.jpg"), b"", Image.new("RGB", (4, 4)), PIXELS):
        with pytest.raises(InputError, match=r"it is given one image \(\w+\); give a list of images, or call"):
            next(predictor.predict(one))  # type: ignore[arg-type]
    Image.fromarray(PIXELS).save(checkpoint.parent / "one.png")
    paths = np.array([str(checkpoint.parent / "one.png")] * 2)  # as pandas holds them
    assert [each.labels for each in predictor.predict(paths)] == [predictor.labels] * 2
    threshold = predictor(PIXELS).thresholds[0]
    assert predictor(PIXELS, threshold=threshold).thresholds[1] == threshold  # a number of numpy


def test_a_predictor_tells_what_it_is() -> None:
    assert repr(Predictor(Means())) == "<Predictor of means: 3 labels, torch, effort 1>"
    assert repr(Predictor.load(effort=0.5)) == "<Predictor of tagger: 80 labels, ONNX Runtime, effort 0.5>"


@pytest.mark.gpu
@pytest.mark.parametrize("backbone", ["resnet18", "tresnet_m", "tf_efficientnet_lite0", "test_vit"])
def test_a_gpu_says_nearly_the_same(backbone: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    cut = Patching(closer_size=None if backbone == "test_vit" else 96)
    model = PatchClassifier(backbone, LABELS, image_size=64, patching=cut)
    model.calibration = Calibration("tde", "platt", (1.0, 1.0), (0.0, 0.0))
    model.adaptive = Adaptive(Calibration("image", "platt", (1.0, 1.0), (0.0, 0.0)), (0.0, 0.0, 1.0))
    save_checkpoint(model, tmp_path / "model")
    for effort in (0, 0.5, 1):
        both = [Predictor.load(tmp_path / "model", device=name, effort=effort)(PIXELS) for name in ("cpu", "cuda")]
        np.testing.assert_allclose(both[1].probs, both[0].probs, rtol=0, atol=0.02)
