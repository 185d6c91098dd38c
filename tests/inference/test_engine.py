"""The engine of torch against probabilities computed by hand from the model's logits."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_networks import LABELS, ask, fit_made_up, make_network, make_pictures, make_plain
from torch import Tensor

from pivotpatch.accel.inference import quicken_inference
from pivotpatch.core.patches import cut_patches
from pivotpatch.errors import InputError
from pivotpatch.inference.engine import TorchEngine, open_engine
from pivotpatch.inference.patch_inference import PatchInference
from pivotpatch.inference.scoring import score_images
from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.models.classifier import MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.engine import Answer
from pivotpatch.runtime.predictor import Predictor
from pivotpatch.runtime.values import Adaptive, Calibration, measure_uncertainty

SLOPE, OFFSET = (0.5, 2.0, 1.5), (1.0, -0.5, 0.25)
LAM, SIZE, LOADED = 0.5, 32, 48
IMAGE = Calibration("image", "platt", (0.75, 1.5, 1.0), (0.5, 0.0, -1.0))


def calibration(kind: str) -> Calibration:
    return Calibration(kind, "platt_per_label", SLOPE, OFFSET)


def pictures(count: int = 3, *, size: int = SIZE) -> Tensor:
    return make_pictures(count, size, size)


def make_patched() -> PatchClassifier:
    model = make_network()
    model.set_mixing(lam=LAM, temperature=0.7)
    return model


def make_adaptive(cutoffs: tuple[float, ...] = (0.0, 1.0), *, patch_size: int | None = None) -> PatchClassifier:
    """A model whose image has a calibration of its own."""
    model = make_network(source_size=LOADED, patch_size=patch_size)
    model.calibration = calibration("tde")
    model.adaptive = Adaptive(IMAGE, cutoffs)
    return model


def image_probs(model: PatchClassifier, pixels: Tensor) -> Tensor:
    """What the image says alone, by its own calibration."""
    assert model.adaptive is not None
    with torch.no_grad():
        return model.adaptive.calibration.apply(model.head.project(model.embed_images(model.preprocessing(pixels))))


def by_hand(model: PatchClassifier, pixels: Tensor, kind: str | None) -> Answer[Tensor]:
    """The equations once more, on what the three projections say of the views."""
    with torch.no_grad():
        patches = torch.stack([model.preprocessing(parts) for parts in cut_patches(pixels, grid=2)])
        out = model.forward_views(model.preprocessing(pixels), patches)
    p, q = out.image_logits, torch.einsum("bpl,bpl->bl", out.weights, out.patch_logits)
    logits = {"image": p, "patch": q, "tde": (p + LAM * q) / (1 + LAM)}
    slope, offset = (torch.ones(3), torch.zeros(3)) if kind is None else (torch.tensor(SLOPE), torch.tensor(OFFSET))
    probs = {name: 1 / (1 + (-slope * values - offset).exp()) for name, values in logits.items()}
    return Answer(probs[kind or "tde"], probs["image"], probs["patch"], out.weights)


@pytest.mark.parametrize("kind", [None, "image", "patch", "tde"])
def test_probabilities_are_those_that_the_calibration_makes_of_its_kind(kind: str | None) -> None:
    model = make_patched()
    model.calibration = None if kind is None else calibration(kind)
    model.thresholds = (0.1, 0.2, 0.3)
    engine = TorchEngine(model)
    assert (engine.labels, engine.thresholds) == (LABELS, (0.1, 0.2, 0.3))
    answer, expected = ask(engine, pictures()), by_hand(model, pictures(), kind)
    for name, value in answer._asdict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, getattr(expected, name), atol=1e-4, rtol=0, msg=name)
    assert answer.probs.std() > 0.02  # so that a wrong label or kind would be seen


@pytest.mark.parametrize("fitted", [False, True])
def test_a_network_without_patches_has_one_opinion(fitted: bool) -> None:
    model = make_plain()
    model.calibration = calibration("image") if fitted else None
    for effort in (1, 0):
        engine = TorchEngine(model, effort=effort)
        assert (engine.grid, engine.thresholds) == (0, None)
        answer = ask(engine, pictures())
        with torch.no_grad():
            logits = model(model.preprocessing(pictures()))
        expected = torch.sigmoid(logits * torch.tensor(SLOPE) + torch.tensor(OFFSET) if fitted else logits)
        torch.testing.assert_close(answer.probs, expected, atol=1e-4, rtol=0)
        assert torch.equal(answer.image_probs, answer.probs)
        assert (answer.patch_probs, answer.weights) == (None, None)


@pytest.mark.parametrize("kind", ["image", "tde"])
@pytest.mark.parametrize("normalised", [True, False])
def test_pat_i_uses_what_was_fitted_to_both_and_not_what_was_fitted_to_the_image(kind: str, normalised: bool) -> None:
    model = make_plain()
    model.thresholds, model.calibration = (0.1, 0.2, 0.3), calibration(kind)
    wrapped = PatchInference(model, lam=3.0, normalised=normalised, grid=3, overlap=0.25)
    engine = TorchEngine(wrapped)
    assert (engine.labels, engine.grid, engine.overlap) == (LABELS, 3, 0.25)
    with torch.no_grad():
        out = wrapped(model.preprocessing(pictures()))
    logits = out.image_logits + 3 * out.pooled_logits
    if kind == "image":
        assert engine.thresholds is None
        expected = torch.sigmoid(logits / 4 if normalised else logits)
    else:
        assert engine.thresholds == (0.1, 0.2, 0.3)
        expected = model.calibration.apply(logits / 4)
    answer = ask(engine, pictures())
    torch.testing.assert_close(answer.probs, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(answer.weights, out.weights, atol=1e-4, rtol=0)


def test_nothing_of_the_callers_is_changed() -> None:
    model = make_patched()
    expected = ask(TorchEngine(model), pictures())
    model.train()
    model.backbone.eval()  # as where it is frozen
    modes = {name: part.training for name, part in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    answer = ask(TorchEngine(model), pictures())
    assert torch.equal(answer.probs, expected.probs)
    assert modes == {name: part.training for name, part in model.named_modules()}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_another_preprocessing_is_another_model() -> None:
    model = make_patched()
    before = TorchEngine(model).digest()
    model.preprocessing = replace(model.preprocessing, mean=(0.0, 0.0, 0.0))
    assert TorchEngine(model).digest() != before


@pytest.mark.parametrize("patch_size", [None, 16])
def test_the_patches_of_the_unsure_are_looked_at_and_the_others_answered_by_the_image(patch_size: int | None) -> None:
    pixels = pictures(8, size=LOADED)
    alone = image_probs(make_adaptive(patch_size=patch_size), pixels)
    doubt = measure_uncertainty(alone)
    cutoff = doubt.sort().values[4:6].mean().item()
    model = make_adaptive((0.0, cutoff, 1.0), patch_size=patch_size)
    seen: list[int] = []
    model.backbone.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    answer, looked = ask(TorchEngine(model, effort=0.5), pixels), doubt > cutoff
    assert looked.sum() == 3
    assert seen == [8, 3 * 4]  # the network saw no more than that
    full = ask(TorchEngine(model), pixels)
    for name, value in answer._asdict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value[looked], getattr(full, name)[looked], atol=1e-4, rtol=0, msg=name)
    for probs in (answer.probs, answer.image_probs):
        torch.testing.assert_close(probs[~looked], alone[~looked], atol=1e-4, rtol=0)
    for part in (answer.patch_probs, answer.weights):
        assert part is not None
        assert part[~looked].isnan().all()
    assert not torch.allclose(full.image_probs[~looked], alone[~looked], atol=0.01)  # its calibration is another
    for expected in (alone, full.image_probs):
        none = ask(TorchEngine(model, effort=0), pixels)
        torch.testing.assert_close(none.probs, expected, atol=1e-4, rtol=0)
        assert none.weights is None
        model.adaptive = None


def test_more_effort_looks_at_more_pictures_and_the_batch_has_no_say() -> None:
    pixels = pictures(12, size=LOADED)
    doubt = measure_uncertainty(image_probs(make_adaptive(), pixels)).sort().values
    between = (doubt[:-1] + doubt[1:]) / 2  # so that rounding decides nothing
    model = make_adaptive((0.0, *between[::2].tolist()))
    counts = []
    for effort in (0.01, 0.4, 0.6, 0.99):
        engine = TorchEngine(model, effort=effort)
        together, alone = ask(engine, pixels), [ask(engine, pixels[row : row + 1]) for row in range(12)]
        for whole, *parts in zip(together, *alone, strict=True):
            expected = torch.cat([part for part in parts if part is not None])
            torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0, equal_nan=True)
        assert together.weights is not None
        counts.append(int((~together.weights.isnan()).all(dim=(1, 2)).sum()))
    assert counts[0] == 1
    assert counts[1] < counts[2]
    assert counts[3] == 12


def test_what_a_model_cannot_answer_is_refused() -> None:
    patch_only, with_tde = make_patched(), make_plain()
    patch_only.patch_only, with_tde.calibration = True, calibration("tde")
    refused: list[tuple[MultiLabelClassifier | PatchClassifier | PatchInference, float, str]] = [
        (PatchInference(make_plain()), 0.5, "effort: is 0.5, but PAT-I looks at the patches of all images"),
        (make_plain(), 0.5, "which needs a model with patches"),
        (make_patched(), 0.5, "which needs a tuned checkpoint"),
        (make_patched(), float("nan"), "effort is nan; give a number from 0"),
        (with_tde, 1, "calibration is of 'tde' logits, which a model without patches has not"),
        (patch_only, 1, "the model was trained on patches alone"),
        (make_plain().half(), 1, r"the model's weights are torch.float16; keep it in float32 .* and give dtype="),
    ]
    for model, effort, message in refused:
        with pytest.raises(InputError, match=message):
            TorchEngine(model, effort=effort)


@pytest.mark.parametrize(
    ("parts", "value", "effort"),
    [
        (["head.project.bias"], torch.nan, 1.0),
        (["head.project.bias", "patch_projection.bias"], 3e38, 0.5),  # finite alone, and too much together
        (["weight_projection.weight"], 3e38, 1.0),
    ],
)
def test_what_no_probability_is_blames_the_model(parts: list[str], value: float, effort: float) -> None:
    model = make_adaptive((0.0, 0.0))  # nothing is clear without patches
    model.origin = "runs/mine"
    for part in parts:
        model.get_parameter(part).data.fill_(value)
    with pytest.raises(InputError, match="^runs/mine: it answers nan where a probability is due; .* a sound model$"):
        ask(TorchEngine(model, effort=effort), pictures(size=LOADED))


def test_a_predictor_looks_closer_as_its_checkpoint_says(tmp_path: Path) -> None:
    """Also once its batch norms are folded, which is tried at the size of the first look alone."""
    model, pixels = make_network(source_size=LOADED, overlap=0.25, closer_size=40), pictures(5, size=LOADED)
    fit_made_up(model)
    model.adaptive = Adaptive(IMAGE, (0.0, 0.0), calibration("tde"))  # nothing is clear
    save_checkpoint(model, tmp_path / "model")
    with torch.inference_mode():
        out: Any = score_images(model, pixels, closer_size=40)
    pooled = (out.weights * out.patch_logits).sum(dim=1)
    logits = (out.image_logits + 0.5 * pooled) / 1.5  # lam is 0.5
    probs = torch.sigmoid(torch.tensor(SLOPE) * logits + torch.tensor(OFFSET))
    for fold in (True, False):
        found = Predictor(open_engine(tmp_path / "model", device="cpu", effort=0.5, fold=fold))(list(pixels))
        for place, prediction in enumerate(found):
            torch.testing.assert_close(torch.as_tensor(prediction.probs), probs[place], rtol=0, atol=1e-4)
            torch.testing.assert_close(torch.as_tensor(prediction.weights), out.weights[place], rtol=0, atol=1e-4)


def test_a_model_that_is_given_stays_what_it_is() -> None:
    for model in (make_network().train(), make_plain().train()):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        predictor = Predictor.load(model, effort=1)  # which folds batch norms
        assert model.training
        assert [*model.state_dict()] == [*before]
        predictor(pictures()[0].permute(1, 2, 0).numpy())
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert predictor.engine.model is not model  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"given a PatchInference; .* write Predictor\(TorchEngine\(it\)\)"):
        Predictor.load(PatchInference(make_plain()))


def test_a_part_may_be_of_half_precision_under_autocast_as_a_folded_backbone_is_on_a_gpu() -> None:
    model = make_network()
    expected = ask(TorchEngine(model), pictures()).probs
    backbone = quicken_inference(model.backbone, side=SIZE, device=torch.device("cuda"), dtype=torch.bfloat16)
    model.backbone = backbone.to(torch.bfloat16) if next(backbone.parameters()).is_floating_point() else backbone
    assert next(model.parameters()).dtype == torch.bfloat16
    found = ask(TorchEngine(model, dtype=torch.bfloat16), pictures()).probs
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


def test_threads_may_ask_a_model_in_training_mode() -> None:
    model, pixels = make_network().train(), pictures()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = TorchEngine(model)
    expected = ask(engine, pixels).probs
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: ask(engine, pixels).probs, range(100))]
    assert all(torch.equal(each, expected) for each in found)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert model.backbone.training
