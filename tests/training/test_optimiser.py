import math
import warnings
from copy import deepcopy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from pivotpatch.training.config import EmaSection, OptimiserSection
from pivotpatch.training.optimiser import find_cycle_point, make_average, make_optimiser


def make_small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm([4, 6, 6]), nn.Flatten(), nn.Linear(144, 2)
    )


@settings(max_examples=30)
@given(total=st.integers(1, 300), warmup=st.floats(0, 1))
def test_the_cycle_is_that_of_torch(total: int, warmup: float) -> None:
    assume(total * warmup != 1)  # torch divides by zero there
    assert find_cycle_point(0, total=5, warmup=0.2) == (1.0, 0.85)  # and this begins at the peak
    optimiser = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wants steps of the optimiser in between, which change nothing here
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-4, total_steps=total, pct_start=warmup)
        for step in range(total):
            point = find_cycle_point(step, total=total, warmup=warmup)
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


@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_is_over_weights_and_buffers(warmup: bool) -> None:
    model = make_small_model().train()
    average = make_average(model, EmaSection(decay=0.9, warmup=warmup))
    assert average is not None
    slow = deepcopy(model.state_dict())
    optimiser = make_optimiser(model, OptimiserSection(lr=0.1))
    for step in range(40):
        model(torch.randn(2, 3, 8, 8)).square().sum().backward()
        optimiser.step()
        optimiser.zero_grad()
        average.update(model, step=step + 1)
        short = 1 - math.pow(1 + step, -2 / 3)
        decay = min(0.9, short) if warmup or step == 0 else 0.9  # nothing is left of the very first weights
        for name, value in model.state_dict().items():  # whole numbers, such as batch norm's count, are taken over
            mixed = decay * slow[name].double() + (1 - decay) * value.double()
            slow[name] = mixed if value.is_floating_point() else value.clone()
    held = average.module.state_dict()
    assert held["1.num_batches_tracked"] == 40
    assert not torch.allclose(held["1.running_var"], model.state_dict()["1.running_var"])
    for name, value in slow.items():
        torch.testing.assert_close(held[name].double(), value.double(), rtol=1e-5, atol=1e-6)
