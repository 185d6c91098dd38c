"""Engines against probabilities computed by hand from the network's logits."""

import pytest
import torch
from torch import Tensor, nn

from pivotpatch.core.adaptive import Adaptive, measure_uncertainty
from pivotpatch.core.calibration import Calibration
from pivotpatch.core.patches import cut_patches, resize_images
from pivotpatch.errors import InputError
from pivotpatch.inference.engine import Answer, TorchEngine
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.models.classifier import Classifier, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier

LABELS = ["cat", "dog", "bird"]
SLOPE, OFFSET = (0.5, 2.0, 1.5), (1.0, -0.5, 0.25)
LAM = 0.5


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


def test_half_precision_is_nearly_the_same_and_comes_back_whole() -> None:
    model = make_patch_classifier()
    answer, expected = TorchEngine(model, dtype=torch.bfloat16)(pictures()), TorchEngine(model)(pictures())
    assert answer.probs.dtype == torch.float32
    assert torch.allclose(answer.probs, expected.probs, atol=0.03)
    assert not torch.allclose(answer.probs, expected.probs, atol=1e-6)


def test_a_calibration_of_logits_that_are_not_there_is_refused() -> None:
    model = make_plain()
    model.calibration = calibration("tde")
    with pytest.raises(InputError, match="calibration is of 'tde' logits, which a model without patches has not"):
        TorchEngine(model)


def make_adaptive(cutoffs: tuple[float, ...] = (0.0, 1.0), *, patch_size: int | None = None) -> PatchClassifier:
    """A network whose image has a calibration of its own."""
    torch.manual_seed(0)
    model = PatchClassifier("test_resnet", LABELS, image_size=64, source_size=80, patch_size=patch_size, lam=LAM)
    spread(model)
    model.calibration = calibration("tde")
    model.adaptive = Adaptive(Calibration("image", "platt", (0.75, 1.5, 1.0), (0.5, 0.0, -1.0)), cutoffs)
    return model.eval()


def image_probs(model: PatchClassifier, pixels: Tensor) -> Tensor:
    """What the image says alone, by its own calibration."""
    assert model.adaptive is not None
    with torch.no_grad():
        logits = model.forward_images(normalise(model, resize_images(pixels, (64, 64))))
    return model.adaptive.calibration.apply(logits)


@pytest.mark.parametrize("patch_size", [None, 32])
def test_in_two_passes_pictures_get_the_answer_of_one(patch_size: int | None) -> None:
    model = make_adaptive((0.0, 0.0), patch_size=patch_size)  # nothing is clear
    expected, answer = TorchEngine(model)(pictures(size=80)), TorchEngine(model, effort=0.5)(pictures(size=80))
    for name, value in answer._asdict().items():
        assert torch.allclose(value, getattr(expected, name), atol=1e-5), name


def test_the_patches_of_the_unsure_are_looked_at_and_the_others_answered_by_the_image() -> None:
    pixels = pictures(8, size=80)
    alone = image_probs(make_adaptive(), pixels)
    doubt = measure_uncertainty(alone)
    cutoff = doubt.sort().values[4:6].mean().item()
    model = make_adaptive((0.0, cutoff, 1.0))
    seen: list[int] = []
    model.backbone.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    answer, looked = TorchEngine(model, effort=0.5)(pixels), doubt > cutoff
    assert looked.sum() == 3
    assert seen == [8, 3 * 4]  # the network saw no more than that
    full = TorchEngine(model)(pixels)
    for name, value in answer._asdict().items():
        assert value.dtype == torch.float32
        assert torch.allclose(value[looked], getattr(full, name)[looked], atol=1e-5), name
    for probs in (answer.probs, answer.image_probs):
        assert torch.allclose(probs[~looked], alone[~looked], atol=1e-5)
    for part in (answer.patch_probs, answer.weights):
        assert part is not None
        assert part[~looked].isnan().all()
    assert not torch.allclose(full.image_probs[~looked], alone[~looked], atol=0.01)  # its calibration is another


def test_more_effort_looks_at_more_pictures_and_the_batch_has_no_say() -> None:
    pixels = pictures(12, size=80)
    doubt = measure_uncertainty(image_probs(make_adaptive(), pixels)).sort().values
    between = (doubt[:-1] + doubt[1:]) / 2  # so that rounding decides nothing
    model = make_adaptive((0.0, *between[::2].tolist()))
    counts = []
    for effort in (0.01, 0.4, 0.6, 0.99):
        engine = TorchEngine(model, effort=effort)
        together = engine(pixels)
        assert together.weights is not None
        for row in range(12):
            for whole, alone in zip(together, engine(pixels[row : row + 1]), strict=True):
                assert whole is not None
                assert alone is not None
                torch.testing.assert_close(whole[row], alone[0], atol=1e-5, rtol=1e-5, equal_nan=True)
        counts.append(int((~together.weights.isnan()).all(dim=(1, 2)).sum()))
    assert counts[0] == 1
    assert counts[1] < counts[2]
    assert counts[3] == 12


@pytest.mark.parametrize("fitted", [False, True])
def test_without_effort_the_image_is_all_there_is(fitted: bool) -> None:
    model, pixels = make_adaptive(), pictures(size=80)
    expected = image_probs(model, pixels)
    if not fitted:
        model.adaptive = None
        expected = TorchEngine(model)(pixels).image_probs
    engine = TorchEngine(model, effort=0)
    assert (engine.grid, engine.picture_size) == (0, 80)
    answer = engine(pixels)
    assert torch.allclose(answer.probs, expected, atol=1e-5)
    assert torch.equal(answer.image_probs, answer.probs)
    assert (answer.patch_probs, answer.weights) == (None, None)


def test_efforts_that_a_network_cannot_make_are_refused() -> None:
    with pytest.raises(InputError, match="PAT-I looks at the patches of every image, effort is 0.5; leave effort"):
        TorchEngine(PatchInference(make_plain()), effort=0.5)
    with pytest.raises(InputError, match="effort: is 0.5, which needs a model with patches"):
        TorchEngine(make_plain(), effort=0.5)
    with pytest.raises(InputError, match="effort: is 0.5, which needs a tuned checkpoint; run"):
        TorchEngine(make_patch_classifier(), effort=0.5)
    with pytest.raises(InputError, match="TorchEngine: effort is nan; give a number from 0"):
        TorchEngine(make_patch_classifier(), effort=float("nan"))
    plain = make_plain()
    assert torch.equal(TorchEngine(plain, effort=0)(pictures()).probs, TorchEngine(plain)(pictures()).probs)


def test_a_network_that_was_trained_on_patches_alone_is_refused() -> None:
    model = make_patch_classifier()
    model.patch_only = True
    with pytest.raises(InputError, match="TorchEngine: the model was trained on patches alone, .*; give one that"):
        TorchEngine(model)


@pytest.mark.parametrize(
    ("part", "value", "effort"),
    [
        ("head.project.bias", torch.nan, 1.0),
        ("head.project.bias", 3e38, 0.5),
        ("patch_projection.bias", torch.inf, 0.5),
        ("weight_projection.weight", 3e38, 1.0),
    ],
)
def test_what_no_probability_is_blames_the_model(part: str, value: float, effort: float) -> None:
    model = make_adaptive((0.0, 0.0))  # nothing is clear without patches
    model.origin = "runs/mine"
    model.get_parameter(part).data.fill_(value)
    if (part, value) == ("head.project.bias", 3e38):
        model.get_parameter("patch_projection.bias").data.fill_(value)  # finite alone, and too much together
    with pytest.raises(
        InputError, match="^runs/mine: it answers nan where a probability is due; .* use a sound model$"
    ):
        TorchEngine(model, effort=effort)(pictures(size=80))


def test_without_patches_and_with_pat_i_likewise() -> None:
    model = make_plain()
    model.get_parameter("head.project.bias").data[1] = torch.inf
    for wrapped in (model, PatchInference(model)):
        with pytest.raises(InputError, match="^the MultiLabelClassifier: it answers nan"):
            TorchEngine(wrapped)(pictures())


def test_certainty_is_no_fault() -> None:
    model = make_plain()
    model.get_parameter("head.project.bias").data.copy_(torch.tensor([1e30, -1e30, 200.0]))
    assert TorchEngine(model)(pictures()).probs.tolist() == [[1.0, 0.0, 1.0]] * 3
