"""Every head of another system against its equations, and what all heads must keep."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from made_networks import PEER_OPTIONS as OPTIONS
from reference.peers import ORACLES, ml_gcn_edges
from torch import Tensor, nn

from pivotpatch import PatchClassifier, PatchInference
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import Architecture, MultiLabelClassifier, load_relabelled
from pivotpatch.models.heads import Head, make_head
from pivotpatch.models.limits import PEERS, WORDED
from pivotpatch.peers.add_gcn import ADDGCNHead
from pivotpatch.peers.c_tran import CTranHead, draw_known
from pivotpatch.peers.label_priors import LabelPrior, WordVectors

LABELS, FEATURES = ("cat", "dog", "cup", "tie", "bed"), 16
COUNTS = torch.tensor([[9, 6, 0, 2, 0], [6, 8, 1, 4, 0], [0, 1, 3, 0, 0], [2, 4, 0, 5, 0], [0, 0, 0, 0, 0]])
EVERY = pytest.mark.parametrize("name", list(PEERS))


def vary(module: nn.Module) -> None:
    """Give all weights and running moments values that a mistake would not survive, and its priors some counts."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in module.named_parameters():
            value.add_(0.2 * torch.randn(value.shape, generator=generator) + (0.1 if name.endswith("bias") else 0))
        for part in module.modules():
            if isinstance(part, nn.BatchNorm1d):
                assert part.running_mean is not None
                assert part.running_var is not None
                part.running_mean.copy_(torch.randn(part.num_features, generator=generator))
                part.running_var.copy_(0.5 + torch.rand(part.num_features, generator=generator))
            if isinstance(part, LabelPrior):
                part.learn_counts(COUNTS)


def make(name: str, **options: Any) -> Head:
    torch.manual_seed(0)
    head = make_head(name, features=FEATURES, labels=len(LABELS), options={**OPTIONS[name], **options})
    vary(head)
    return head.double().eval()


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def make_classifier(name: str, kind: type[Any] = MultiLabelClassifier) -> Any:
    torch.manual_seed(0)
    model = kind(Architecture("test_resnet", name, 64, head_options=OPTIONS[name]), LABELS)
    vary(model.head)
    return model.eval()


@EVERY
def test_a_head_is_its_equations(name: str) -> None:
    head, features = make(name), 3 * draw(2, FEATURES, 3, 5)
    with torch.no_grad():
        logits = head(features)
    state = {key: value.numpy() for key, value in head.state_dict().items()}
    assert logits.shape == (2, len(LABELS))
    for image in range(2):
        for label in range(len(LABELS)):
            expected = ORACLES[name](state, features[image].numpy(), label)
            assert logits[image, label].item() == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert logits.std(dim=0).mean() > 0.05  # so that a wrong image or label would be seen
    assert any(isinstance(part, WordVectors) for part in head.modules()) == (name in WORDED)


def test_options_are_in_the_equations_too() -> None:
    head, features = make("csra", lam=2.0, scale=0.25), draw(1, FEATURES, 2, 3)
    state = {key: value.numpy() for key, value in head.state_dict().items()}
    expected = [ORACLES["csra"](state, features[0].numpy(), label, lam=2.0) for label in range(len(LABELS))]
    assert head(features)[0].tolist() == pytest.approx([0.25 * each for each in expected], rel=1e-6)


@EVERY
def test_labels_in_another_order_are_scores_in_that_order(name: str) -> None:
    """A head that takes over what labels of the same name have, counts and vectors too, says the same of them."""
    order = [3, 0, 4, 1, 2]
    trained = make_classifier(name)
    torch.manual_seed(1)
    model = MultiLabelClassifier(trained.architecture, [LABELS[place] for place in order]).eval()
    assert load_relabelled(model, trained) == tuple(LABELS[place] for place in order)
    images = draw(2, 3, 64, 64).float()
    torch.testing.assert_close(model(images), trained(images)[:, order], rtol=1e-4, atol=1e-5)


@EVERY
def test_pat_t_triples_the_last_step_and_pat_i_goes_around_it(name: str) -> None:
    single = make_classifier(name)
    model = PatchClassifier.from_classifier(single)
    fresh = make_classifier(name, PatchClassifier)
    images = draw(2, 3, 64, 64).float()
    with torch.inference_mode():
        around, found, drawn = PatchInference(single)(images), model(images), fresh(images)
    torch.testing.assert_close(found, around, rtol=1e-4, atol=1e-4)
    parts = ("patch_projection", "weight_projection")
    assert {key.partition(".")[0] for key in fresh.state_dict()} == {"backbone", "head", *parts}
    for part in parts:
        own, theirs = dict(getattr(fresh, part).named_parameters()), dict(fresh.head.project.named_parameters())
        assert own.keys() == theirs.keys() != set()
        assert all(not torch.equal(own[key], theirs[key]) for key in own if not key.endswith("bias"))
    assert drawn.weights.shape == (2, 4, len(LABELS))
    assert drawn.weights.std(dim=1).mean() > 1e-6


def test_one_image_leaves_the_moments_of_add_gcn_alone() -> None:
    head = make("add_gcn").train()
    assert isinstance(head, ADDGCNHead)
    before = deepcopy(head.norm.state_dict())
    head(draw(1, FEATURES, 3, 3))
    assert all(torch.equal(value, before[key]) for key, value in head.norm.state_dict().items())
    head(draw(2, FEATURES, 3, 3))
    assert not torch.equal(head.norm.state_dict()["running_mean"], before["running_mean"])


def test_the_graph_of_ml_gcn_is_the_published_one() -> None:
    head = make("ml_gcn")
    torch.testing.assert_close(
        head.state_dict()["project.graph.edges"],
        torch.from_numpy(ml_gcn_edges(COUNTS.double().numpy())),
        rtol=1e-6,
        atol=1e-7,
    )
    fresh = make_head("ml_gcn", features=4, labels=3, options={"vector_width": 2})
    assert torch.equal(fresh.state_dict()["project.graph.edges"], torch.eye(3))


def test_the_graph_of_ssgrl_is_conditional_co_occurrence() -> None:
    edges = make("ssgrl").state_dict()["graph.edges"]
    assert edges[0, 1].item() == pytest.approx(6 / 9)
    assert edges[1, 0].item() == pytest.approx(6 / 8)
    assert not edges.diagonal().any()
    assert not edges[4].any()


def test_embeddings_of_ms_cma_have_the_cosines_of_co_occurrence() -> None:
    vectors = make("ms_cma", width=32).state_dict()["semantic.vectors"]
    cosines = nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=2)
    assert cosines[0, 1].item() == pytest.approx((6 / 9 + 6 / 8) / 2, abs=0.02)
    assert cosines[1, 3].item() == pytest.approx((4 / 8 + 4 / 5) / 2, abs=0.02)
    assert cosines[0, 4].item() < 0.42  # never together: anything below alpha will do


def test_c_tran_takes_labels_that_are_known() -> None:
    head, features = make("c_tran"), draw(1, FEATURES, 2, 2)
    assert isinstance(head, CTranHead)
    known = [1.0, float("nan"), 0.0, float("nan"), float("nan")]
    logits = head.project(head.embed(features, torch.tensor([known], dtype=torch.float64)))
    state = {key: value.numpy() for key, value in head.state_dict().items()}
    expected = [ORACLES["c_tran"](state, features[0].numpy(), label, known=known) for label in range(len(LABELS))]
    assert logits[0].tolist() == pytest.approx(expected, rel=1e-6)
    nothing = torch.full((1, len(LABELS)), torch.nan, dtype=torch.float64)
    torch.testing.assert_close(head.project(head.embed(features, nothing)), head(features))


def test_c_tran_reveals_up_to_three_quarters_of_the_labels() -> None:
    torch.manual_seed(0)
    target = torch.randint(2, (4000, 40)).float()
    known = draw_known(target)
    shares = known.isfinite().float().mean(dim=1)
    assert torch.equal(known[known.isfinite()], target[known.isfinite()])
    assert shares.mean().item() == pytest.approx(0.375, abs=0.01)
    assert shares.std().item() == pytest.approx(((0.75**2) / 12 + 0.375 * 0.625 / 40) ** 0.5, abs=0.015)


def test_word_vectors_are_random_but_always_the_same_until_some_are_given() -> None:
    torch.manual_seed(5)
    state, one, other = torch.random.get_rng_state(), WordVectors(3, 4), WordVectors(3, 4)
    assert torch.equal(one.vectors, other.vectors)
    assert torch.equal(torch.random.get_rng_state(), state)
    one.take(torch.ones(3, 4))
    assert torch.equal(one.vectors, torch.ones(3, 4))
    with pytest.raises(InputError, match="word vectors: they are .2, 4., and the model was built for .3, 4."):
        one.take(torch.ones(2, 4))


def test_rarl_draws_nothing_where_a_model_is_judged() -> None:
    head, features = make("rarl").eval(), draw(1, FEATURES, 4, 4)
    before = torch.get_rng_state()
    head(features)
    assert torch.equal(torch.get_rng_state(), before)
