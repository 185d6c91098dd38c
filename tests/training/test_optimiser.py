import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from pivotpatch.training.config import OptimiserSection, ScheduleSection
from pivotpatch.training.optimiser import CyclePoint, find_point, make_optimiser, set_point


def make_small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm([4, 6, 6]), nn.Flatten(), nn.Linear(144, 2)
    )


@settings(max_examples=30)
@given(total=st.integers(1, 300), warmup=st.floats(0, 1))
def test_the_cycle_is_that_of_torch(total: int, warmup: float) -> None:
    assume(total * warmup != 1)  # torch divides by zero there
    assert find_point(0, total=5, schedule=ScheduleSection(warmup=0.2)) == (1.0, 0.85)  # and this begins at the peak
    optimiser = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wants steps of the optimiser in between, which change nothing here
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-4, total_steps=total, pct_start=warmup)
        for step in range(total):
            point = find_point(step, total=total, schedule=ScheduleSection(warmup=warmup))
            (group,) = optimiser.param_groups
            assert 3e-4 * point.rate == pytest.approx(group["lr"], rel=1e-9, abs=1e-15)
            assert point.momentum == pytest.approx(group["betas"][0], rel=1e-9)
            if step < total - 1:
                schedule.step()


@pytest.mark.parametrize("name", ["adamw", "adam"])
@pytest.mark.parametrize("decay_all", [False, True])
def test_norms_and_biases_do_not_decay_and_frozen_weights_are_left_out(name: str, decay_all: bool) -> None:
    model = make_small_model()
    model[2].requires_grad_(False)
    section = OptimiserSection.model_validate({"name": name, "weight_decay": 0.5, "decay_all": decay_all})
    optimiser = make_optimiser(model, section)
    decays = {id(weight): group["weight_decay"] for group in optimiser.param_groups for weight in group["params"]}
    found = {name: decays[id(weight)] for name, weight in model.named_parameters() if id(weight) in decays}
    names = [f"{layer}.{part}" for layer in (0, 1, 4) for part in ("weight", "bias")]
    assert found == {name: 0.5 if decay_all or name in ("0.weight", "4.weight") else 0 for name in names}
    assert type(optimiser) is (torch.optim.AdamW if name == "adamw" else torch.optim.Adam)


@settings(max_examples=30)
@given(falls=st.lists(st.integers(1, 79), max_size=3, unique=True), epochs=st.just(80), per_epoch=st.integers(1, 5))
def test_a_rate_that_falls_in_steps_is_that_of_torch(falls: list[int], epochs: int, per_epoch: int) -> None:
    total = epochs * per_epoch
    section = ScheduleSection(name="steps", warmup=0, falls=tuple(fall / epochs for fall in sorted(falls)))
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        milestones = [fall * per_epoch for fall in sorted(falls)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones, gamma=0.1)
        for step in range(total):
            point = find_point(step, total=total, schedule=section)
            (group,) = optimiser.param_groups
            assert (point.rate, point.momentum) == pytest.approx((group["lr"], group["momentum"]))
            schedule.step()


def test_a_rate_rises_to_its_peak_within_the_warmup() -> None:
    section = ScheduleSection(name="steps", warmup=0.1, falls=(0.5,))
    rates = [find_point(step, total=40, schedule=section).rate for step in range(40)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 17, *[0.1] * 20])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_backbone_has_a_rate_of_its_own(name: str) -> None:
    model = nn.ModuleDict({"backbone": make_small_model(), "head": nn.Linear(2, 2)})
    section = OptimiserSection.model_validate({"name": name, "lr": 0.5, "weight_decay": 0.0, "backbone_share": 0.1})
    optimiser = make_optimiser(model, section)
    set_point(optimiser, CyclePoint(0.5, 0.9), peak=0.5)
    rates = {id(weight): group["lr"] for group in optimiser.param_groups for weight in group["params"]}
    for key, weight in model.named_parameters():
        assert rates[id(weight)] == pytest.approx(0.025 if key.startswith("backbone") else 0.25), key
    assert optimiser.param_groups[0]["lr"] == 0.25  # the one that is logged


def test_sgd_is_that_of_the_textbook() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    model = nn.Module()
    model.weight = weight
    optimiser = make_optimiser(model, OptimiserSection(name="sgd", lr=0.1, weight_decay=0.01))
    speed, expected = torch.zeros(1, 2), weight.detach().clone()
    for step in range(3):
        set_point(optimiser, find_point(step, total=3, schedule=ScheduleSection(name="steps", warmup=0)), peak=0.1)
        weight.grad = torch.tensor([[0.5, float(step)]])
        optimiser.step()
        speed = 0.9 * speed + weight.grad + 0.01 * expected
        expected = expected - 0.1 * speed
        torch.testing.assert_close(weight.detach(), expected)
