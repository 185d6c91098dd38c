from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_networks import HEADS

from pivotpatch import MultiLabelClassifier, PatchClassifier, PatchInference
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import (
    Architecture,
    Embeddings,
    IndependentClassifier,
    SharedClassifier,
    load_relabelled,
)
from pivotpatch.peers.hcp import HCPClassifier
from pivotpatch.peers.mcar import MCARClassifier
from pivotpatch.runtime.values import Adaptive, Calibration, Patching

LABELS = ["cat", "dog", "straße", "日本"]


def small(backbone: str = "test_resnet", head: str = "linear") -> Architecture:
    return Architecture(backbone, head, 64, head_options=HEADS[head])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("patch_size", [None, 32])
def test_logits_are_those_of_a_pass_for_each_view(head: str, patch_size: int | None) -> None:
    """All in one pass where patches are as large as the image; they may come later, or alone."""
    torch.manual_seed(0)
    patching = Patching(patch_size=patch_size, lam=0.5, temperature=2.0)
    model = PatchClassifier(small(head=head), LABELS, patching=patching).eval()
    side = patch_size or 64
    images, patches = torch.rand(3, 3, 64, 64), torch.rand(3, 4, 3, side, side)
    seen: list[torch.Size] = []
    with torch.inference_mode():
        p = model.head.project(model.head.embed(model.backbone(images)))
        parts = [model.head.embed(model.backbone(patches[:, j])) for j in range(4)]
        q = torch.stack([model.patch_projection(part) for part in parts], dim=1)
        w = torch.stack([model.weight_projection(part) for part in parts], dim=1)
        pooled = (torch.softmax(w / 2, dim=1) * q).sum(1)
        model.backbone.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
        once, seen_alone = model.forward_views(images, patches), model.embed_images(images)
        later = model.project_embeddings(Embeddings(seen_alone[1:], model.embed_patches(patches[1:])))
        alone, first = model.forward_patches(patches), model.head.project(seen_alone)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close((first, once.image_logits, once.patch_logits), (p, p, q))
    close((alone, once.pooled_logits, once.tde_logits), (pooled, pooled, p + 0.5 * pooled))
    close(tuple(later), tuple(value[1:] for value in once))
    whole = [(15, 3, 64, 64)] if patch_size is None else [(3, 3, 64, 64), (12, 3, 32, 32)]
    assert seen == [*whole, (3, 3, 64, 64), (8, 3, side, side), (12, 3, side, side)]


def test_independent_models_share_nothing_but_how_they_start(tmp_path: Path) -> None:
    torch.save(MultiLabelClassifier("test_resnet", LABELS).backbone.network.state_dict(), tmp_path / "w.pth")
    model = IndependentClassifier("test_resnet", LABELS, weights=tmp_path / "w.pth").eval()
    states = [member.state_dict() for member in model.members]
    for key, value in states[0].items():
        same = [torch.equal(value, state[key]) for state in states[1:]]
        assert all(same) if key.startswith("backbone.") else not any(same)
    images = torch.rand(2, 3, 64, 64)
    logits = model(images)
    for index, member in enumerate(model.members):
        assert isinstance(member, MultiLabelClassifier)
        assert member.labels == (LABELS[index],)
        assert torch.equal(member(images)[:, 0], logits[:, index])
    logits[:, 1].sum().backward()
    moved = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert {name.split(".")[1] for name in moved} == {"1"}


@pytest.mark.parametrize("head", HEADS)
def test_from_classifier_starts_as_pat_i(head: str) -> None:
    torch.manual_seed(0)
    trained = MultiLabelClassifier(small(head=head), LABELS).eval()
    trained.preprocessing = replace(trained.preprocessing, mean=(0.1, 0.2, 0.3))
    before = {key: value.clone() for key, value in trained.state_dict().items()}
    state = torch.random.get_rng_state()
    model = PatchClassifier.from_classifier(trained, patching=Patching(2, 0.2, 200, lam=0.5, temperature=0.7))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.preprocessing == trained.preprocessing
    assert model.picture_size == 200
    images = torch.rand(2, 3, 64, 64)
    expected = PatchInference(trained, overlap=0.2, lam=0.5, temperature=0.7)(images)
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-6)
    assert not model.training
    heads = [model.head.project, model.patch_projection, model.weight_projection, trained.head.project]
    assert len({id(parameter) for head in heads for parameter in head.parameters()}) == 8
    model(images).tde_logits.sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(value, before[key]) for key, value in trained.state_dict().items())


def test_images_that_do_not_suit_the_network_are_named() -> None:
    vit = MultiLabelClassifier("test_vit3", LABELS, image_size=64)
    with pytest.raises(InputError, match="images are 32 x 32 pixels; resize them to 64, or build the"):
        vit(torch.rand(1, 3, 32, 32))
    with pytest.raises(InputError, match="backbone: images are torch.uint8; preprocess them first"):
        vit(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    flexible = Architecture("test_vit3", image_size=64, backbone_options={"dynamic_img_size": True})
    assert MultiLabelClassifier(flexible, LABELS)(torch.rand(1, 3, 32, 96)).shape == (1, 4)
    with pytest.raises(InputError, match="it gives a (list|tuple), no map; choose another backbone"):
        MultiLabelClassifier("crossvit_9_240", LABELS)(torch.rand(1, 3, 240, 240))
    with pytest.raises(InputError, match="no smaller"):
        PatchClassifier(small(), LABELS)(torch.rand(1, 3, 64, 64), source=torch.rand(1, 3, 32, 64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "tresnet_l.miil_in1k_488"}, "no weights .*; did you mean 'tresnet_l.miil_in1k_448'"),
        ({"architecture": Architecture("test_resnet", backbone_options={"colour": 1})}, "cannot be built with"),
        ({"labels": ["a", "a"]}, "are not different names"),
        ({"labels": "cat"}, "'cat' are not different names"),
        ({"image_size": 0}, "image_size is 0"),
        ({"weights": "no.safetensors"}, "there is no such file"),
        ({"patching": Patching(patch_size=4096)}, "patch_size is 4096"),
        ({"image_size": 96, "patching": Patching(source_size=95)}, "source_size is 95; give a side of 96 pixels"),
    ],
)
def test_bad_choices_are_named(options: dict[str, Any], message: str) -> None:
    given = {"architecture": "test_resnet", "labels": LABELS, **options}
    with pytest.raises(InputError, match=message):
        PatchClassifier(given.pop("architecture"), given.pop("labels"), **given)


def test_another_mixture_is_the_same_logits_mixed_anew() -> None:
    torch.manual_seed(0)
    model = PatchClassifier(small(), LABELS).eval()
    model.thresholds = (0.5,) * 4
    model.calibration = Calibration("tde", "platt", (1.0,) * 4, (0.0,) * 4)
    model.adaptive = Adaptive(Calibration("image", "platt", (1.0,) * 4, (0.0,) * 4), (0.0, 1.0))
    images = torch.rand(2, 3, 64, 64)
    lam, temperature = 0.5, 2.0
    with torch.inference_mode():
        before = model(images)
        model.set_mixing(lam=lam, temperature=temperature)
        after = model(images)
    assert [getattr(model, name) for name in ("thresholds", "calibration", "adaptive")] == [None] * 3
    weights = torch.softmax(before.weights.log() / temperature, dim=1)
    pooled = (weights * before.patch_logits).sum(1)
    torch.testing.assert_close(after.tde_logits, before.image_logits + lam * pooled)
    torch.testing.assert_close(after.probs, torch.sigmoid(after.tde_logits / (1 + lam)))
    with pytest.raises(InputError, match="lam is 1e\\+300; give a number from 0 to a million"):
        model.set_mixing(lam=1e300, temperature=1.0)
    assert model.patching.lam == lam


def test_thresholds_are_taken_from_any_numbers() -> None:
    model = MultiLabelClassifier("test_resnet", ["a", "b"], image_size=64)
    accepted: list[Any] = [[0.25, 1.0], torch.tensor([0.25, 1.0]), np.array([0.25, 1.0])]
    for values in accepted:
        model.thresholds = None
        model.thresholds = values
        assert model.thresholds == (0.25, 1.0)
    refused: list[Any] = [(0.3,), (0.3, float("nan")), (0.3, 2.0)]
    for values in refused:
        with pytest.raises(InputError, match="^thresholds: they are .*; give 2 numbers from 0 to 1, one per label$"):
            model.thresholds = values
    assert model.thresholds == (0.25, 1.0)


@pytest.mark.parametrize("kind", [MultiLabelClassifier, PatchClassifier])
def test_what_is_judged_under_autocast_can_be_ranked(kind: type[SharedClassifier]) -> None:
    """Tied logits would share one threshold; in training nothing is ranked."""
    model, count = kind(small(), LABELS).eval(), 2000
    seen = Embeddings(torch.randn(count, model.backbone.features), torch.randn(count, 4, model.backbone.features))
    for training in (False, True):
        model.train(training)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            out = model.project_embeddings(seen)
        logits = out if isinstance(out, torch.Tensor) else out.image_logits
        assert (len(logits[:, 0].unique()) > count - 10) != training


@pytest.mark.parametrize("kind", [MultiLabelClassifier, MCARClassifier, HCPClassifier])
def test_whoever_asks_a_head_has_float32_under_autocast(kind: type[SharedClassifier]) -> None:
    model = kind(small(), LABELS).eval()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(2, 3, 32, 32)).dtype == torch.float32


OLD, NEW = ("cat", "dog", "sofa"), ("lamp", "sofa", "cat", "tree", "moon")


def make(kind: type[SharedClassifier], head: str, labels: tuple[str, ...], *, seed: int) -> SharedClassifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        options = {name: value for name, value in HEADS[head].items() if name != "groups"}  # one per label
        model = kind(Architecture("test_resnet", head, 64, head_options=options), labels)
        for value in model.state_dict().values():  # buffers and biases too, which begin alike
            if value.is_floating_point():
                value.copy_(0.1 * torch.rand_like(value))
    return model.eval()


def test_a_label_keeps_its_classifier_where_the_same_query_serves_it() -> None:
    """Two queries for four labels: a and b are the first one's, c and d the second's."""
    trained, model = (
        MultiLabelClassifier(small(head="ml_decoder"), names).eval()
        for names in (("a", "b", "c", "d"), ("b", "c", "d", "new"))
    )
    fresh = model.head.project.get_parameter("weight").detach().clone()
    assert load_relabelled(model, trained) == ("b", "c", "d")
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found, expected = model(images), trained(images)
    torch.testing.assert_close(found[:, [0, 2]], expected[:, [1, 3]])  # b and d
    kept = model.head.project.get_parameter("weight")
    assert torch.equal(kept[0, :, 1], fresh[0, :, 1])  # c, which the first query serves now
    assert torch.equal(kept[1, :, 1], fresh[1, :, 1])


def test_a_backbone_with_as_many_channels_as_labels_is_taken_as_it_is() -> None:
    """In a stage of `test_cvt` a layer called "projection" has 16 channels."""
    labels = [f"label {number}" for number in range(16)]
    trained, model = (MultiLabelClassifier("test_cvt", names) for names in (labels, labels[::-1]))
    load_relabelled(model, trained)
    assert all(map(torch.equal, model.backbone.state_dict().values(), trained.backbone.state_dict().values()))


@pytest.mark.parametrize("head", ["ml_gcn", "ms_cma"])
def test_a_new_label_has_a_vector_of_its_own(head: str) -> None:
    models = [
        MultiLabelClassifier(Architecture("test_resnet", head, 64), names)
        for names in (["a", "b", "c"], ["b", "c", "d"], ["c", "d", "e"])
    ]
    for before, after in pairwise(models):
        load_relabelled(after, before)
    first, *_, last = ([each for name, each in model.named_buffers() if name.endswith(".vectors")] for model in models)
    assert torch.equal(last[0][0], first[0][2])
    assert torch.corrcoef(last[0]).fill_diagonal_(0).abs().max() < 0.5


@pytest.mark.parametrize("head", HEADS)
def test_a_label_that_was_not_known_keeps_its_own_weights_and_all_else_is_taken(head: str) -> None:
    trained, model = make(PatchClassifier, head, OLD, seed=0), make(PatchClassifier, head, NEW, seed=1)
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    assert load_relabelled(model, trained) == ("sofa", "cat")
    for name, value in model.state_dict().items():
        if value.shape == trained.state_dict()[name].shape:
            torch.testing.assert_close(value, trained.state_dict()[name])
        else:  # the one dimension in which they differ counts the labels
            (place,) = (d for d, size in enumerate(value.shape) if size != trained.state_dict()[name].shape[d])
            for row, label in enumerate(NEW):
                is_known = label in OLD
                source = trained.state_dict()[name].select(place, OLD.index(label)) if is_known else None
                wanted = fresh[name].select(place, row) if source is None else source
                torch.testing.assert_close(value.select(place, row), wanted)
