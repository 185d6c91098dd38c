"""Engines against probabilities computed by hand from the network's logits."""

import pytest
import torch
from torch import Tensor, nn

from pivotpatch.core.calibration import Calibration
from pivotpatch.core.errors import InputError
from pivotpatch.core.patches import cut_patches
from pivotpatch.inference.engine import Answer, TorchEngine
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.classifier import Classifier, IndependentClassifier, MultiLabelClassifier, PatchClassifier

LABELS = ["cat", "dog", "bird"]
SLOPE, OFFSET = (0.5, 2.0, 1.5), (1.0, -0.5, 0.25)
LAM = torch.tensor([0.5, 1.0, 2.0])


def calibration(kind: str) -> Calibration:
    return Calibration(kind, "platt_per_label", SLOPE, OFFSET)


def pictures(count: int = 3, *, size: int = 64) -> Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def normalise(model: Classifier, pixels: Tensor) -> Tensor:
    mean, std = (
        torch.tensor(values).reshape(3, 1, 1) for values in (model.preprocessing.mean, model.preprocessing.std)
    )
    return (pixels / 255 - mean) / std


def spread(model: nn.Module) -> None:
    """Give an untrained network logits that differ enough for its probabilities to tell them apart."""
    generator = torch.Generator().manual_seed(1)
    for name, values in model.named_parameters():
        if values.shape[0] == len(LABELS):
            values.data = torch.randn(values.shape, generator=generator) * (0.5 if name.endswith("weight") else 1)


def make_patch_classifier() -> PatchClassifier:
    torch.manual_seed(0)
    model = PatchClassifier("test_resnet", LABELS, image_size=64, lam=LAM, temperature=0.7)
    spread(model)
    return model.eval()


def make_plain() -> MultiLabelClassifier:
    torch.manual_seed(0)
    model = MultiLabelClassifier("test_resnet", LABELS, image_size=64)
    spread(model)
    return model.eval()


def by_hand(model: PatchClassifier, pixels: Tensor, kind: str | None) -> Answer:
    """The equations once more, on what the three projections say of the views."""
    with torch.no_grad():
        out = model.forward_views(normalise(model, pixels), normalise(model, cut_patches(pixels, grid=2)))
    p, q = out.image_logits, torch.einsum("bpl,bpl->bl", out.weights, out.patch_logits)
    logits = {"image": p, "patch": q, "tde": (p + LAM * q) / (1 + LAM)}
    slope, offset = (torch.ones(3), torch.zeros(3)) if kind is None else (torch.tensor(SLOPE), torch.tensor(OFFSET))
    probs = {name: 1 / (1 + (-slope * values - offset).exp()) for name, values in logits.items()}
    return Answer(probs[kind or "tde"], probs["image"], probs["patch"], out.weights)


@pytest.mark.parametrize("kind", [None, "image", "patch", "tde"])
def test_probabilities_are_those_that_the_calibration_makes_of_its_kind(kind: str | None) -> None:
    model = make_patch_classifier()
    model.calibration = None if kind is None else calibration(kind)
    model.thresholds = (0.1, 0.2, 0.3)
    engine = TorchEngine(model)
    assert (engine.labels, engine.thresholds) == (tuple(LABELS), (0.1, 0.2, 0.3))
    assert (engine.picture_size, engine.grid, engine.overlap) == (64, 2, 0.0)
    answer, expected = engine(pictures()), by_hand(model, pictures(), kind)
    for name, value in answer._asdict().items():
        assert value.dtype == torch.float32
        assert torch.allclose(value, getattr(expected, name), atol=1e-5), name
    assert answer.probs.std() > 0.02  # so that a wrong label or kind would be seen


@pytest.mark.parametrize("fitted", [False, True])
def test_a_network_without_patches_has_one_opinion(fitted: bool) -> None:
    model = make_plain()
    model.calibration = calibration("image") if fitted else None
    engine = TorchEngine(model)
    assert (engine.grid, engine.thresholds) == (0, None)
    answer = engine(pictures())
    with torch.no_grad():
        logits = model(normalise(model, pictures()))
    expected = torch.sigmoid(logits * torch.tensor(SLOPE) + torch.tensor(OFFSET) if fitted else logits)
    assert torch.allclose(answer.probs, expected, atol=1e-5)
    assert torch.equal(answer.image_probs, answer.probs)
    assert answer.patch_probs is None
    assert answer.weights is None


def test_networks_of_one_label_each_are_one_engine() -> None:
    model = IndependentClassifier("test_resnet", LABELS[:2], image_size=64).eval()
    with torch.no_grad():
        expected = torch.sigmoid(model(normalise(model, pictures())))
    assert torch.allclose(TorchEngine(model)(pictures()).probs, expected, atol=1e-5)


def test_pat_i_gives_what_it_gives_alone() -> None:
    model = make_plain()
    wrapped = PatchInference(model, lam=2.0, normalised=False, grid=3, overlap=0.25)
    engine = TorchEngine(wrapped)
    assert (engine.labels, engine.grid, engine.overlap) == (tuple(LABELS), 3, 0.25)
    answer = engine(pictures())
    with torch.no_grad():
        expected = wrapped(normalise(model, pictures()))
    assert torch.allclose(answer.probs, torch.sigmoid(expected.image_logits + 2 * expected.pooled_logits), atol=1e-5)
    assert answer.weights is not None
    assert answer.weights.shape == (3, 9, 3)


def test_what_was_fitted_to_the_image_is_not_used_for_pat_i_around_it() -> None:
    model = make_plain()
    model.thresholds, model.calibration = (0.1, 0.2, 0.3), calibration("image")
    plain, engine = TorchEngine(make_plain()), TorchEngine(PatchInference(model))
    assert engine.thresholds is None
    assert torch.equal(engine(pictures()).probs, TorchEngine(PatchInference(plain.model))(pictures()).probs)
    model.calibration = calibration("tde")
    engine = TorchEngine(PatchInference(model, lam=3.0))
    assert engine.thresholds == (0.1, 0.2, 0.3)
    with torch.no_grad():
        out = PatchInference(model, lam=3.0)(normalise(model, pictures()))
    logits = (out.image_logits + 3 * out.pooled_logits) / 4
    assert torch.allclose(engine(pictures()).probs, model.calibration.apply(logits), atol=1e-5)


def test_native_patches_are_cut_from_the_larger_picture() -> None:
    model = PatchClassifier("test_resnet", LABELS, image_size=64, source_size=128).eval()
    spread(model)
    engine, pixels = TorchEngine(model), pictures(2, size=128)
    assert engine.picture_size == 128
    patches = torch.stack([pixels[..., r : r + 64, c : c + 64] for r in (0, 64) for c in (0, 64)], dim=1)
    with torch.no_grad():
        out = model.forward_views(torch.zeros(2, 3, 64, 64), normalise(model, patches))
    answer = engine(pixels)
    assert answer.patch_probs is not None
    assert torch.allclose(answer.patch_probs, torch.sigmoid(out.pooled_logits), atol=1e-5)


def test_a_picture_gets_the_same_answer_in_every_batch() -> None:
    engine = TorchEngine(make_patch_classifier())
    together = engine(pictures(5))
    for row in range(5):
        alone = engine(pictures(5)[row : row + 1])
        for name, value in together._asdict().items():
            assert torch.allclose(value[row], getattr(alone, name)[0], atol=1e-5), name


def test_nothing_of_the_callers_is_changed() -> None:
    model = make_patch_classifier()
    expected = TorchEngine(model)(pictures())
    model.train()
    model.backbone.eval()  # as where it is frozen
    modes = {name: part.training for name, part in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    answer = TorchEngine(model)(pictures())
    assert torch.equal(answer.probs, expected.probs)
    assert modes == {name: part.training for name, part in model.named_modules()}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_modes_come_back_after_a_failure() -> None:
    model = make_patch_classifier().train()
    with pytest.raises(InputError, match="images are torch.float32"):
        TorchEngine(model)(pictures() / 255)
    assert all(part.training for part in model.modules())


def test_half_precision_is_nearly_the_same_and_comes_back_whole() -> None:
    model = make_patch_classifier()
    answer, expected = TorchEngine(model, dtype=torch.bfloat16)(pictures()), TorchEngine(model)(pictures())
    assert answer.probs.dtype == torch.float32
    assert torch.allclose(answer.probs, expected.probs, atol=0.03)
    assert not torch.allclose(answer.probs, expected.probs, atol=1e-6)


def test_a_calibration_of_logits_that_are_not_there_is_refused() -> None:
    model = make_plain()
    model.calibration = calibration("tde")
    with pytest.raises(InputError, match="calibration is of 'tde' logits, which a network without patches has not"):
        TorchEngine(model)


def test_a_model_that_says_no_preprocessing_is_refused() -> None:
    with pytest.raises(InputError, match="a Identity says no preprocessing; give a Classifier"):
        TorchEngine(PatchInference(nn.Identity()))
