"""Losses over many labels at once, for logits; unknown labels (NaN in the target) contribute nothing.

In float32 at least: in float16, confident probabilities are exactly 0 or 1 and their logarithms not finite.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pivotpatch.core.checks import check_shapes
from pivotpatch.core.counterfactual import CounterfactualLogits, at_least_float32
from pivotpatch.errors import InputError, check_known

Reduction = Literal["sum", "mean", "none"]
Loss = Callable[[Tensor, Tensor], Tensor]


def binary_cross_entropy(logits: Tensor, target: Tensor, *, reduction: Reduction = "sum") -> Tensor:
    """Equation 1: binary cross entropy of every label.

    Args:
        logits: (B,L), any floating dtype.
        target: (B,L), 1 present, 0 absent, NaN unknown; values between are soft labels. Others are
            not looked for: turn a -1 that stands for unknown into NaN first.
        reduction: "sum" over images and labels (the paper), "mean" over the known ones, or "none".

    Returns:
        A scalar, or (B,L) with 0 at unknown labels for "none".

    >>> binary_cross_entropy(torch.zeros(1, 2), torch.tensor([[1.0, float("nan")]])).item()
    0.6931471824645996
    """
    logits, target, known = _prepare(logits, target, "binary_cross_entropy")
    return _reduce(F.binary_cross_entropy_with_logits(logits, target, reduction="none"), known, reduction)


def binary_divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """Kullback-Leibler divergence of each label's probability from the one that is wanted; 0 where they are equal.

    Args:
        logits: of any shape.
        wanted: logits of the same shape, such as a teacher's.

    >>> divergence = binary_divergence(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0]))
    >>> [round(value, 4) for value in divergence.tolist()]  # log(cosh(1 / 2))
    [0.0, 0.1201]
    """
    logits, wanted = at_least_float32(logits), at_least_float32(wanted)
    return wanted.sigmoid() * (wanted - logits) + F.softplus(logits) - F.softplus(wanted)


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
        target: (B,L), 1 present, 0 absent, NaN unknown; values between are soft labels. Others are
            not looked for: turn a -1 that stands for unknown into NaN first.
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
    if not (gamma_neg >= 0 and gamma_pos >= 0 and 0 <= clip < 1):
        wrong = f"gamma_neg is {gamma_neg}, gamma_pos {gamma_pos} and clip {clip}"
        raise InputError("asymmetric_loss", wrong, "give gammas of 0 or more and a clip in [0, 1)")
    logits, target, known = _prepare(logits, target, "asymmetric_loss")
    log_present = F.logsigmoid(logits)
    shifted = (torch.sigmoid(logits) - clip).clamp(min=0)
    # log(1 - shifted) from the other side, where 1 - sigmoid keeps its digits however small it is.
    log_absent = (torch.sigmoid(-logits) + clip).clamp(max=1).log() if clip > 0 else F.logsigmoid(-logits)
    positive = _focus(torch.sigmoid(-logits), gamma_pos, detach_focus) * log_present
    negative = _focus(shifted, gamma_neg, detach_focus) * log_absent
    return _reduce(-(target * positive + (1 - target) * negative), known, reduction)


def patch_loss(logits: CounterfactualLogits, target: Tensor, *, loss: Loss = asymmetric_loss) -> Tensor:
    """Equation 5, what PAT-T minimises: loss(p, y) + loss(q, y).

    The two count alike, there is no loss on their sum, and gradients reach the patch weights too.

    Args:
        logits: of B images; p is `image_logits` and q `pooled_logits`.
        target: (B,L), see `asymmetric_loss`.
        loss: of logits (B,L) against target (B,L): a function or a module of this file.

    >>> from pivotpatch.core.counterfactual import combine_logits
    >>> patch_loss(combine_logits(torch.zeros(1, 1), torch.zeros(1, 4, 1)), torch.ones(1, 1)).item()
    1.3862943649291992
    """
    return loss(logits.image_logits, target) + loss(logits.pooled_logits, target)


class BinaryCrossEntropyLoss(nn.Module):
    """`binary_cross_entropy` as a module."""

    def __init__(self, *, reduction: Reduction = "sum") -> None:
        super().__init__()
        self.reduction: Reduction = reduction
        self(torch.zeros(1, 1), torch.zeros(1, 1))  # a wrong option is told now

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
        focus = {"gamma_neg": gamma_neg, "gamma_pos": gamma_pos, "clip": clip}
        self.options: dict[str, Any] = {**focus, "detach_focus": detach_focus, "reduction": reduction}
        self(torch.zeros(1, 1), torch.zeros(1, 1))  # a wrong option is told now

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Loss of logits (B,L) against target (B,L)."""
        return asymmetric_loss(logits, target, **self.options)

    def extra_repr(self) -> str:
        """The parameters, for printing."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


def _prepare(logits: Tensor, target: Tensor, where: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and target in the dtype of the computation, and where the target is known (B,L)."""
    check_shapes(where, "BL BL", logits=logits, target=target)
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
    check_known(reduction, get_args(Reduction), where="loss", what="reduction")
    loss = torch.where(known, loss, loss.new_zeros(()))
    if reduction == "none":
        return loss
    return loss.sum() / known.sum().clamp(min=1) if reduction == "mean" else loss.sum()
