"""A label from few images: the discriminant against a slow reference, and what must not change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from verb import make_model

from pivotpatch.errors import InputError
from pivotpatch.models import open_model
from pivotpatch.models.classifier import Embeddings, IndependentClassifier, MultiLabelClassifier
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.runtime.values import Adaptive, Calibration, Patching
from pivotpatch.tuning.teach import Background, Lesson, add_label, check_teachable, find_background, fit_axis, teach

COUNT = 3  # labels of the models here


def draw(count: int, *, shift: float = 0.0, seed: int = 0, features: int) -> Any:
    """Embeddings of images with four patches; `shift` moves them along one direction, the first patch twice as far."""
    generator = torch.Generator().manual_seed(seed)
    views = torch.randn(count, 5, features, generator=generator) * torch.linspace(2, 0.2, features) + 1
    views += shift * torch.tensor([1.0, 2.0, 0.0, 0.0, 0.0])[:, None] * torch.ones(features) / features**0.5
    return Embeddings(views[:, 0], views[:, 1:])


def make(kind: type = PatchClassifier) -> tuple[PatchClassifier | MultiLabelClassifier, int]:
    model = make_model(kind)
    assert isinstance(model, PatchClassifier | MultiLabelClassifier)
    return model, model.backbone.features


def tuned(model: PatchClassifier | MultiLabelClassifier) -> None:
    kind = "tde" if isinstance(model, PatchClassifier) else "image"
    fitted = Calibration(kind, "platt", (0.5, 1.5, 2.5), (-1.0, -2.0, 0.5))
    model.calibration, model.thresholds = fitted, (0.1, 0.2, 0.3)
    model.preferences = {"recall": (0.01, 0.02, 0.03)}
    if kind == "tde":
        model.adaptive = Adaptive(replace(fitted, kind="image"), (0.0, 0.5, 1.0), replace(fitted, offset=(0, 0, 0.0)))


def learn(model: PatchClassifier | MultiLabelClassifier, features: int, label: str = "mug") -> Lesson:
    background = Background.measure(draw(200, features=features), rank=16)
    return teach(model, label, draw(20, shift=8, seed=1, features=features), background=background)


def answer(model: PatchClassifier | MultiLabelClassifier, seen: Embeddings) -> Tensor:
    with torch.inference_mode():
        out = model.project_embeddings(seen)
    return out if isinstance(out, Tensor) else out.tde_logits / 2  # lam is 1


def test_the_discriminant_is_that_of_a_slow_reference() -> None:
    features, rank = 24, 10
    seen, usual = draw(7, shift=3, seed=1, features=features), draw(300, features=features)
    background = Background.measure(usual, rank=rank)
    axis = (background.axes @ fit_axis(background.locate(seen), background, away=torch.zeros(rank))).double().numpy()
    whole, parts = usual.image.double().numpy(), usual.patches.double().flatten(0, 1).numpy()
    covariance = (np.cov(whole.T, bias=True) + np.cov(parts.T, bias=True)) / 2
    values, vectors = np.linalg.eigh(covariance)
    keep = np.argsort(-values)[:rank]
    ridge = 100 * np.trace(covariance) / features / 7
    inverse = vectors[:, keep] @ np.diag(1 / (values[keep] + ridge)) @ vectors[:, keep].T
    images = seen.image.double().numpy() - whole.mean(0)
    patches = seen.patches.double().numpy() - parts.mean(0)

    def scale(mean: np.ndarray) -> np.ndarray:
        found: np.ndarray = inverse @ mean
        return found * (6 / float(np.mean([image @ found for image in images])))

    first = scale(np.mean([*images, *patches.reshape(-1, features)], axis=0))
    shown = []
    for own in patches:
        weights = np.exp([patch @ first for patch in own])
        shown.append(sum(weight * patch for weight, patch in zip(weights / weights.sum(), own, strict=True)))
    expected = scale((images.mean(0) + np.mean(shown, axis=0)) / 2)
    np.testing.assert_allclose(axis, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [PatchClassifier, MultiLabelClassifier])
def test_other_labels_stay_bit_by_bit(kind: type) -> None:
    model, features = make(kind)
    tuned(model)
    taught: Any = add_label(model, learn(model, features))
    assert taught.labels == (*model.labels, "mug")
    seen = draw(30, seed=5, features=features)
    assert torch.equal(answer(taught, seen)[:, :COUNT], answer(model, seen))
    before, after = model.state_dict(), taught.state_dict()
    assert all(
        torch.equal(after[name][: len(value)] if value.ndim else after[name], value) for name, value in before.items()
    )
    assert taught.calibration.select(range(COUNT)) == model.calibration
    assert taught.thresholds[:COUNT] == model.thresholds
    assert taught.preferences == {"recall": (0.01, 0.02, 0.03, taught.thresholds[-1])}
    if model.adaptive is not None:
        assert taught.adaptive.calibration.select(range(COUNT)) == model.adaptive.calibration
        assert taught.adaptive.again.select(range(COUNT)) == model.adaptive.again


@pytest.mark.parametrize(("fitted", "lam"), [(True, 1.0), (False, 0.5), (False, 1.0), (False, 4.0)])
def test_as_many_images_get_a_label_as_its_lesson_says(fitted: bool, lam: float) -> None:
    model, features = make()
    if fitted:
        tuned(model)
    model.patching = replace(model.patching or Patching(), lam=lam)
    usual = draw(200, features=features)
    background = Background.measure(usual, rank=16)
    lesson = teach(model, "mug", draw(20, shift=1, seed=1, features=features), background=background)
    taught: Any = add_label(model, lesson)
    with torch.inference_mode():
        out: Any = taught.project_embeddings(usual)
    probs = taught.calibration.apply(out.tde_logits / (1 + lam)) if taught.calibration else out.probs
    assert 0 < lesson.given < 0.5
    assert (probs[:, -1] > taught.thresholds[-1]).float().mean().item() == pytest.approx(lesson.given, abs=0.011)


@pytest.mark.parametrize("fitted", [True, False])
def test_what_is_new_gets_the_label_and_other_images_do_not(fitted: bool) -> None:
    model, features = make()
    if fitted:
        tuned(model)
    lesson = learn(model, features)
    taught: Any = add_label(model, lesson)
    shown, usual = draw(200, shift=8, seed=7, features=features), draw(400, seed=8, features=features)
    probs = []
    for seen in (shown, usual):
        logits = answer(taught, seen)
        probs.append((taught.calibration.apply(logits) if taught.calibration else logits.sigmoid())[:, -1])
    given = [(part > taught.thresholds[-1]).float().mean().item() for part in probs]
    assert given[0] == pytest.approx(lesson.recall.value, abs=0.2)
    assert given[0] > 0.6
    assert given[1] < 0.03


def test_the_order_of_images_changes_nothing_and_copies_little() -> None:
    model, features = make()
    background = Background.measure(draw(200, features=features), rank=16)
    seen = draw(12, shift=3, seed=1, features=features)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    lesson, turned, twice = (
        teach(model, "mug", Embeddings(seen.image[rows], seen.patches[rows]), background=background)
        for rows in (torch.arange(12), order, torch.arange(24) % 12)
    )
    torch.testing.assert_close(turned.row, lesson.row, rtol=1e-3, atol=1e-4)
    assert turned.threshold == pytest.approx(lesson.threshold, rel=1e-3)
    assert torch.cosine_similarity(twice.row, lesson.row, dim=0) > 0.95
    assert (lesson.repeated, twice.repeated) == (0, 12)


def test_a_stranger_among_the_images_is_named() -> None:
    model, features = make()
    background = Background.measure(draw(200, features=features), rank=16)
    seen, stranger = draw(15, shift=8, seed=1, features=features), draw(1, shift=-8, seed=9, features=features)
    mixed = Embeddings(torch.cat([seen.image, stranger.image]), torch.cat([seen.patches, stranger.patches]))
    assert teach(model, "mug", mixed, background=background).unlike == (15,)


def test_images_without_it_take_away_what_both_show() -> None:
    """Where the thing stands is in all of them, so that it must not count."""
    model, features = make()
    background = Background.measure(draw(200, features=features), rank=features)
    place = torch.zeros(features)
    place[0] = 8.0
    seen = draw(10, shift=3, seed=1, features=features)
    empty = draw(40, seed=3, features=features)
    moved = [Embeddings(each.image + place, each.patches + place) for each in (seen, empty) if each.patches is not None]
    plain = teach(model, "mug", moved[0], background=background)
    told = teach(model, "mug", moved[0], background=background, without=moved[1])
    share = [(lesson.row[0] / lesson.row.norm()).item() for lesson in (plain, told)]
    assert abs(share[1]) < 0.75 * abs(share[0])


def test_a_label_that_is_known_is_made_anew_in_its_place() -> None:
    model, features = make()
    tuned(model)
    taught: Any = add_label(model, learn(model, features, model.labels[1]))
    assert taught.labels == model.labels
    seen = draw(10, seed=5, features=features)
    before, after = answer(model, seen), answer(taught, seen)
    assert torch.equal(after[:, [0, 2]], before[:, [0, 2]])
    assert not torch.allclose(after[:, 1], before[:, 1])
    assert taught.calibration.slope == (0.5, 1.0, 2.5)


def test_a_background_is_the_same_from_its_file(tmp_path: Path) -> None:
    from pivotpatch.tuning.teach import _read

    model, features = make()
    held = Background.measure(draw(100, features=features), rank=8)
    held.save(tmp_path / "b.safetensors", model)
    _, read = _read(tmp_path / "b.safetensors")
    torch.testing.assert_close(read.places, held.places, rtol=0, atol=held.places.abs().max().item() / 127)
    torch.testing.assert_close(read.axes, held.axes, rtol=0, atol=1e-3)


def test_a_background_with_every_axis_restores_what_was_seen() -> None:
    seen = draw(100, features=24)
    restored = Background.measure(seen, rank=24).restore()
    torch.testing.assert_close(tuple(restored), tuple(seen), rtol=1e-4, atol=1e-4)


def test_the_bundled_background_is_the_taggers_and_no_other_models() -> None:
    tagger = open_model("tagger")
    assert find_background(tagger) is not None
    tagger.patching = Patching(3)
    assert find_background(tagger) is None
    assert find_background(make_model()) is None


def test_models_without_a_row_per_label_are_refused() -> None:
    for model in (
        make_model(IndependentClassifier),
        PatchClassifier("test_resnet", ["a"], head="ml_decoder", image_size=32),
    ):
        with pytest.raises(InputError):
            check_teachable(model)
