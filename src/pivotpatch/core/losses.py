"""Losses over many labels at once, for logits; unknown labels (NaN in the target) contribute nothing.

Computed in float32 at least: in float16 the probabilities of confident logits are exactly 0 and 1
and their logarithms are not finite.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.core.counterfactual import at_least_float32
from pivotpatch.core.errors import InputError, choose_one_of

Reduction = Literal["sum", "mean", "none"]


def binary_cross_entropy(logits: Tensor, target: Tensor, *, reduction: Reduction = "sum") -> Tensor:
    """Equation 1: binary cross entropy of every label.

    Args:
        logits: (B,L), any floating dtype.
        target: (B,L), 1 present, 0 absent, NaN unknown; values between are soft labels.
        reduction: "sum" over images and labels (the paper), "mean" over the known ones, or "none".

    Returns:
        A scalar, or (B,L) with 0 at unknown labels for "none".

    >>> binary_cross_entropy(torch.zeros(1, 2), torch.tensor([[1.0, float("nan")]])).item()
    0.6931471824645996
    """
    logits, target, known = _prepare(logits, target, "binary_cross_entropy")
    return _reduce(F.binary_cross_entropy_with_logits(logits, target, reduction="none"), known, reduction)


def asymmetric_loss(
    logits: Tensor,
    target: Tensor,
    *,
    gamma_neg: float = 4.0,
    gamma_pos: float = 0.0,
    clip: float = 0.05,
    detach_focus: bool = False,
    reduction: Reduction = "sum",
) -> Tensor:
    """Asymmetric loss: easy negatives count less, very easy ones not at all.

    A positive costs -(1 - s)^gamma_pos * log(s) and a negative -m^gamma_neg * log(1 - m), with
    s = sigmoid(logits) and m = max(s - clip, 0).

    Args:
        logits: (B,L), any floating dtype.
        target: (B,L), 1 present, 0 absent, NaN unknown; values between are soft labels.
        gamma_neg: focusing power for negatives.
        gamma_pos: focusing power for positives.
        clip: probability below which a negative costs nothing, in [0, 1).
        detach_focus: treat the focusing factors as constants in the backward pass, as the loss's
            authors do in their training script.
        reduction: "sum" over images and labels (the paper), "mean" over the known ones, or "none".

    Returns:
        A scalar, or (B,L) with 0 at unknown labels for "none".

    >>> asymmetric_loss(torch.tensor([[-4.0, 0.0]]), torch.tensor([[0.0, 1.0]])).item()
    0.6931471824645996
    """
    if gamma_neg < 0 or gamma_pos < 0 or not 0 <= clip < 1:
        raise InputError(
            "asymmetric_loss",
            f"gamma_neg is {gamma_neg}, gamma_pos {gamma_pos} and clip {clip}",
            "give gammas of 0 or more and a clip in [0, 1)",
        )
    logits, target, known = _prepare(logits, target, "asymmetric_loss")
    log_present = F.logsigmoid(logits)
    if clip > 0:
        shifted = (torch.sigmoid(logits) - clip).clamp(min=0)
        log_absent = torch.log1p(-shifted)
    else:
        shifted = torch.sigmoid(logits)
        log_absent = F.logsigmoid(-logits)
    positive = _focus(torch.sigmoid(-logits), gamma_pos, detach_focus) * log_present
    negative = _focus(shifted, gamma_neg, detach_focus) * log_absent
    return _reduce(-(target * positive + (1 - target) * negative), known, reduction)


class BinaryCrossEntropyLoss(nn.Module):
    """`binary_cross_entropy` as a module."""

    def __init__(self, *, reduction: Reduction = "sum") -> None:
        super().__init__()
        self.reduction: Reduction = reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Loss of logits (B,L) against target (B,L)."""
        return binary_cross_entropy(logits, target, reduction=self.reduction)


class AsymmetricLoss(nn.Module):
    """`asymmetric_loss` as a module; the defaults are the paper's."""

    def __init__(
        self,
        *,
        gamma_neg: float = 4.0,
        gamma_pos: float = 0.0,
        clip: float = 0.05,
        detach_focus: bool = False,
        reduction: Reduction = "sum",
    ) -> None:
        super().__init__()
        self.gamma_neg = gamma_neg
        self.gamma_pos = gamma_pos
        self.clip = clip
        self.detach_focus = detach_focus
        self.reduction: Reduction = reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Loss of logits (B,L) against target (B,L)."""
        return asymmetric_loss(
            logits,
            target,
            gamma_neg=self.gamma_neg,
            gamma_pos=self.gamma_pos,
            clip=self.clip,
            detach_focus=self.detach_focus,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        """The parameters, for printing."""
        return f"gamma_neg={self.gamma_neg}, gamma_pos={self.gamma_pos}, clip={self.clip}"


def _prepare(logits: Tensor, target: Tensor, where: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and target in the dtype of the computation, and where the target is known (B,L)."""
    if logits.shape != target.shape or logits.ndim != 2:
        raise InputError(
            where,
            f"logits have shape {tuple(logits.shape)} and target {tuple(target.shape)}",
            "give both as (B, L)",
        )
    if not logits.is_floating_point():
        raise InputError(where, f"logits are {logits.dtype}", "give floating-point logits")
    logits = at_least_float32(logits)
    target = target.to(logits.dtype)
    known = ~torch.isnan(target)
    zero = logits.new_zeros(())
    return torch.where(known, logits, zero), torch.where(known, target, zero), known


def _focus(base: Tensor, gamma: float, detach: bool) -> Tensor:
    """base^gamma (B,L) with a finite derivative at 0 for every gamma."""
    if gamma == 0:
        return torch.ones_like(base)
    if detach:
        base = base.detach()
    return base.clamp(min=torch.finfo(base.dtype).tiny) ** gamma


def _reduce(loss: Tensor, known: Tensor, reduction: Reduction) -> Tensor:
    """Reduce a loss (B,L) over its known labels."""
    loss = torch.where(known, loss, loss.new_zeros(()))
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if reduction == "mean":
        return loss.sum() / known.sum().clamp(min=1)
    raise InputError("loss", f"unknown reduction {reduction!r}", choose_one_of(reduction, ("sum", "mean", "none")))
