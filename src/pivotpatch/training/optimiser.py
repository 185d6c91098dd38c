"""How weights move: parameter groups, and the one-cycle schedule as a function of the step."""

import math
from typing import NamedTuple

import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from pivotpatch.training.config import OptimiserSection

INITIAL, FINAL = 1 / 25, 1 / 25e4  # of the peak rate
MOMENTUM = (0.85, 0.95)  # at the peak, and at both ends


class CyclePoint(NamedTuple):
    """A place on the cycle: the learning rate, as a part of its peak, and the first of Adam's betas."""

    rate: float
    momentum: float


def find_cycle_point(step: int, *, total: int, warmup: float) -> CyclePoint:
    """Where the one-cycle policy is before step number `step` of `total`.

    The numbers are those of torch's `OneCycleLR` with its defaults, which the published training uses; as a function
    of the step it needs no state, so a run resumes anywhere.

    >>> find_cycle_point(19, total=100, warmup=0.2)
    CyclePoint(rate=1.0, momentum=0.85)
    """
    peak_at, low, high = warmup * total - 1, *MOMENTUM
    if step <= peak_at:
        along = step / peak_at if peak_at > 0 else 1.0
        return CyclePoint(_anneal(INITIAL, 1.0, along), _anneal(high, low, along))
    along = (step - peak_at) / (total - 1 - peak_at)
    return CyclePoint(_anneal(1.0, FINAL, along), _anneal(low, high, along))


def _anneal(start: float, end: float, along: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * along))


def make_optimiser(model: nn.Module, section: OptimiserSection) -> torch.optim.Adam:
    """An optimiser over what `model` trains; norms and biases do not decay unless the section says so."""
    kind = torch.optim.AdamW if section.name == "adamw" else torch.optim.Adam
    groups = param_groups_weight_decay(model, section.weight_decay)
    if section.decay_all:
        groups = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = next(model.parameters()).device.type in ("cuda", "cpu")  # several times faster on both
    return kind(groups, lr=section.lr, weight_decay=section.weight_decay, fused=fused)
