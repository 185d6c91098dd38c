"""How weights move: parameter groups, and schedules as functions of the step."""

import math
from typing import Any, NamedTuple

import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from pivotpatch.training.config import OptimiserSection, ScheduleSection

INITIAL, FINAL = 1 / 25, 1 / 25e4  # of the peak rate
MOMENTUM = (0.85, 0.95)  # at the peak, and at both ends
STEADY = 0.9  # where the rate falls in steps
FALL = 0.1


class CyclePoint(NamedTuple):
    """A place on a schedule: the learning rate, as a part of its peak, and the momentum or first of Adam's betas."""

    rate: float
    momentum: float


def find_point(step: int, *, total: int, schedule: ScheduleSection) -> CyclePoint:
    """Where a schedule is before step number `step` of `total`: it needs no state, so a run resumes anywhere.

    The numbers of one cycle are those of torch's `OneCycleLR` with its defaults, which the published training uses.

    >>> find_point(19, total=100, schedule=ScheduleSection(warmup=0.2))
    CyclePoint(rate=1.0, momentum=0.85)
    >>> find_point(60, total=100, schedule=ScheduleSection(name="steps", warmup=0.1, falls=(0.6, 0.8)))
    CyclePoint(rate=0.1, momentum=0.9)
    """
    if schedule.name == "steps":
        fallen = sum(step >= round(part * total) for part in schedule.falls)
        rise = min(1.0, (step + 1) / max(1, round(schedule.warmup * total)))
        return CyclePoint(rise * FALL**fallen, STEADY)
    peak_at, low, high = schedule.warmup * total - 1, *MOMENTUM
    if step <= peak_at:
        along = step / peak_at if peak_at > 0 else 1.0
        return CyclePoint(_anneal(INITIAL, 1.0, along), _anneal(high, low, along))
    along = (step - peak_at) / (total - 1 - peak_at)
    return CyclePoint(_anneal(1.0, FINAL, along), _anneal(low, high, along))


def set_point(optimiser: torch.optim.Optimizer, point: CyclePoint, *, peak: float) -> None:
    """Give an optimiser the rate and momentum of a place on its schedule."""
    for group in optimiser.param_groups:
        group["lr"] = peak * point.rate * group["share"]
        if "betas" in group:
            group["betas"] = (point.momentum, group["betas"][1])
        else:
            group["momentum"] = point.momentum


def _anneal(start: float, end: float, along: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * along))


def make_optimiser(model: nn.Module, section: OptimiserSection) -> torch.optim.Optimizer:
    """An optimiser over what `model` trains; norms and biases do not decay unless the section says so."""
    inner = {id(weight) for name, weight in model.named_parameters() if "backbone" in name.split(".")}
    groups: list[dict[str, Any]] = []
    for group in param_groups_weight_decay(model, section.weight_decay):
        for share, inside in ((1.0, False), (section.backbone_share, True)):
            weights = [weight for weight in group["params"] if (id(weight) in inner) == inside]
            decay = section.weight_decay if section.decay_all else group["weight_decay"]
            groups += [{"params": weights, "weight_decay": decay, "share": share}] if weights else []
    fused = next(model.parameters()).device.type in ("cuda", "cpu")  # several times faster on both
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=STEADY, fused=fused)
    kind = torch.optim.AdamW if section.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=section.lr, fused=fused)
