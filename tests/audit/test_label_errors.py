"""Planted errors come out on top."""

from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pivotpatch.audit.label_errors import LabelError, find_label_errors
from pivotpatch.inference.scores import Scores


class Planted(NamedTuple):
    """Scores whose target was damaged, and where (N,L)."""

    scores: Scores
    missing: Tensor
    wrong: Tensor


@pytest.fixture(scope="module")
def planted() -> Planted:
    """Labels from frequent to rare, easy to hopeless, given too freely or too shyly."""
    generator = torch.Generator().manual_seed(0)
    labels = 30
    prior = 0.4 * 10 ** (-2.3 * torch.rand(labels, generator=generator))
    strength = 6 * torch.rand(labels, generator=generator)
    offset = 1.5 * torch.randn(labels, generator=generator) - 1
    truth = (torch.rand(3000, labels, generator=generator) < prior).float()
    logits = strength * (truth - 0.5) + offset + 1.2 * torch.randn(3000, labels, generator=generator)
    chance = torch.rand(truth.shape, generator=generator)
    missing, wrong = (chance < 0.03) & (truth == 1), (chance < 0.002) & (truth == 0)
    target = torch.where(missing, 0.0, torch.where(wrong, 1.0, truth))
    names = tuple(f"label {place}" for place in range(labels))
    return Planted(Scores(names, tuple(map(str, range(3000))), target, {"image": logits}), missing, wrong)


@pytest.fixture(scope="module")
def found(planted: Planted) -> list[LabelError]:
    return find_label_errors(planted.scores, count=10_000)


def precision(planted: Planted, found: list[LabelError]) -> float:
    damaged = planted.missing | planted.wrong
    return fmean(damaged[error.row, planted.scores.labels.index(error.label)].item() for error in found)


def test_planted_errors_come_first(planted: Planted, found: list[LabelError]) -> None:
    """Chance is the share of damaged entries: 0.3 % of the noes, 2 % of the yeses."""
    for direction, least in (("missing", 0.7), ("wrong", 0.85)):
        assert precision(planted, [error for error in found if error.direction == direction][:50]) > least


def test_it_beats_the_plain_distance_of_probability_and_target(planted: Planted, found: list[LabelError]) -> None:
    distance = (planted.scores.probs("image") - planted.scores.target).abs().flatten()
    plain = (planted.missing | planted.wrong).flatten()[distance.topk(100).indices].float().mean().item()
    assert precision(planted, found[:100]) > plain + 0.2


def test_a_label_that_is_never_found_does_not_flood_the_list() -> None:
    """Half of the yeses of one label are missed as a rule; one of the other label's is missed once."""
    target = torch.zeros(400, 2)
    target[:100] = 1
    logits = torch.full((400, 2), -4.0) + torch.linspace(0, 0.1, 400)[:, None]
    logits[:100, 0] = 4.0  # found without fail ...
    logits[7, 0] = -4.0  # ... but for one
    logits[:50, 1] = 4.0
    found = find_label_errors(Scores(("easy", "hard"), tuple(map(str, range(400))), target, {"image": logits}))
    assert (found[0].label, found[0].picture, found[0].direction) == ("easy", "7", "wrong")
    assert found[0].self_confidence < min(error.self_confidence for error in found[1:])


@pytest.mark.parametrize(("count", "prior"), [(500, 0.75), (2000, 0.03)])
def test_noise_is_sure_of_nothing(count: int, prior: float) -> None:
    generator = torch.Generator().manual_seed(0)
    target = (torch.rand(count, 4, generator=generator) < prior).float()
    logits = torch.randn(count, 4, generator=generator)
    assert find_label_errors(Scores(tuple("abcd"), tuple(map(str, range(count))), target, {"image": logits})) == []


def test_ranks_rise_with_self_confidence_of_confident_disagreement(planted: Planted, found: list[LabelError]) -> None:
    assert [error.rank for error in found] == list(range(1, len(found) + 1))
    assert all(a.self_confidence <= b.self_confidence <= 0.25 for a, b in pairwise(found))
    for error in found:
        truth = planted.scores.target[error.row, planted.scores.labels.index(error.label)]
        assert (truth == 1) == (error.direction == "wrong")
        assert error.probability >= 0.75 if error.direction == "missing" else error.probability <= 0.25
        assert planted.scores.pictures[error.row] == error.picture
