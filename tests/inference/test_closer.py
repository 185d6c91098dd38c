"""A closer look in scores and answers, against the network's own logits mixed by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from made_networks import fit_made_up, make_network, make_pictures
from PIL import Image
from torch import Tensor

from pivotpatch.core.adaptive import Adaptive
from pivotpatch.core.calibration import Calibration
from pivotpatch.core.counterfactual import CounterfactualLogits
from pivotpatch.data.address import open_records
from pivotpatch.data.loading import make_loader
from pivotpatch.inference.engine import Answer, TorchEngine
from pivotpatch.inference.predictor import Predictor
from pivotpatch.inference.scoring import score_images, score_pictures
from pivotpatch.models.checkpoint import save_checkpoint
from pivotpatch.models.patch_classifier import PatchClassifier

SEEN, CLOSER, LOADED = 32, 48, 56
IMAGE = Calibration("image", "platt", (0.75, 1.5, 1.0), (0.5, 0.0, -1.0))
AGAIN = Calibration("tde", "platt_per_label", (1.25, 0.5, 2.0), (-0.5, 0.25, 0.0))


def make_closer(cutoffs: tuple[float, ...] = (0.0, 1.0), *, head: str = "linear") -> PatchClassifier:
    """A model that looks closer, with both calibrations."""
    model = make_network(head=head, source_size=LOADED, overlap=0.25)
    assert isinstance(model, PatchClassifier)
    fit_made_up(model)
    model.adaptive, model.closer_size = Adaptive(IMAGE, cutoffs, AGAIN), CLOSER
    return model


def score_closer(model: PatchClassifier, pixels: Tensor) -> CounterfactualLogits:
    with torch.inference_mode():
        out = score_images(model, pixels, closer_size=CLOSER)
    assert not isinstance(out, Tensor)
    return out


def mix_by_hand(model: PatchClassifier, pixels: Tensor) -> Answer:
    """What a closer look at every picture gives."""
    out, lam, fitted = score_closer(model, pixels), model.lam, AGAIN
    slope, offset = torch.tensor(fitted.slope), torch.tensor(fitted.offset)
    p, q = out.image_logits, (out.weights * out.patch_logits).sum(dim=1)
    tde, image, patch = (torch.sigmoid(slope * x + offset) for x in ((p + lam * q) / (1 + lam), p, q))
    return Answer(tde, image, patch, out.weights)


def prepare(model: PatchClassifier, pixels: Tensor, size: int) -> Tensor:
    return replace(model.preprocessing, image_size=size)(pixels)


@pytest.mark.parametrize("head", ["linear", "query2label"])
def test_a_closer_look_sees_the_picture_twice_unless_effort_is_all_or_none(head: str) -> None:
    """At the network's size and larger, both from what the loader gives; no patch is cut from pixels."""
    model, pixels = make_closer(head=head), make_pictures(3, LOADED, LOADED)
    seen: list[tuple[int, int]] = []
    with torch.inference_mode():
        expected = model.look_closer(model.forward_images(prepare(model, pixels, SEEN)), prepare(model, pixels, CLOSER))
    model.backbone.register_forward_pre_hook(lambda _, given: seen.append((len(given[0]), given[0].shape[-1])))
    for value, known in zip(score_closer(model, pixels), expected, strict=True):
        torch.testing.assert_close(value, known, rtol=1e-3, atol=1e-4)
    assert seen == [(3, SEEN), (3, CLOSER)]
    for effort, passes in ((1.0, [(15, SEEN)]), (0.0, [(3, SEEN)])):
        seen.clear()
        TorchEngine(model, effort=effort)(pixels)
        assert seen == passes


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{place}.png" for place in range(5)]
    for path, pixels in zip(paths, make_pictures(5, LOADED, LOADED), strict=True):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
    return paths


def test_scores_of_a_closer_look_are_those_of_the_records_and_can_be_mixed_again(photos: list[Path]) -> None:
    """The network knows a label more, and in another order."""
    model, pixels = make_closer(), make_pictures(5, LOADED, LOADED)
    model.labels = ("cat", "dog", "fish")
    table = photos[0].with_name("photos.csv")
    table.write_text("image,fish,cat\n" + "".join(f"{path.name},1,0\n" for path in photos))
    loader = make_loader(open_records(f"table:{table}"), size=(LOADED, LOADED), batch_size=2, every_batch=True)
    scores = score_pictures(model, loader, accelerator=Accelerator(cpu=True), keep_patches=True, closer_size=CLOSER)
    assert scores.labels == ("fish", "cat")
    out = score_closer(model, pixels)
    known = {"image": out.image_logits, "patch": out.pooled_logits, "tde": out.tde_logits}
    for kind, logits in scores.logits.items():
        torch.testing.assert_close(logits, known[kind][:, [2, 0]], rtol=0, atol=1e-4)
    assert scores.patch_logits is not None
    torch.testing.assert_close(scores.patch_logits, out.patch_logits[..., [2, 0]], rtol=0, atol=1e-4)
    model.set_mixing(lam=0.3, temperature=0.5)
    again = score_closer(model, pixels).tde_logits[:, [2, 0]]
    torch.testing.assert_close(scores.remix(lam=0.3, temperature=0.5).get("tde"), again, rtol=0, atol=1e-3)


def test_a_predictor_looks_closer_as_its_checkpoint_says(photos: list[Path], tmp_path: Path) -> None:
    """Also once its batch norms are folded, which is tried at the size of the first look alone."""
    model, pixels = make_closer((0.0, 0.0)), make_pictures(5, LOADED, LOADED)  # nothing is clear
    save_checkpoint(model, tmp_path / "model")
    expected = mix_by_hand(model, pixels)
    for fold in (True, False):
        predictor = Predictor.load(tmp_path / "model", device="cpu", effort=0.5, fold=fold)
        for place, path in enumerate(photos):
            found = predictor(path)
            assert found.weights is not None
            torch.testing.assert_close(torch.as_tensor(found.probs), expected.probs[place], rtol=0, atol=1e-4)
            assert expected.weights is not None
            torch.testing.assert_close(torch.as_tensor(found.weights), expected.weights[place], rtol=0, atol=1e-4)
