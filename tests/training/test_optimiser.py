import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from pivotpatch.training.config import OptimiserSection
from pivotpatch.training.optimiser import find_cycle_point, make_optimiser


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
