"""The paper's equations: patch weights (4), pooled patch logits, total direct effect (3).

Logits of half precision or whole numbers are raised to float32 first; float64 stays float64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pivotpatch.core.checks import check_shapes
from pivotpatch.runtime.values import Patching


class CounterfactualLogits(NamedTuple):
    """Everything PAT knows about a batch; B images, P patches, L labels.

    Attributes:
        image_logits: p (B,L), from the whole image.
        patch_logits: q_j (B,P,L), from each patch.
        weights: w_j (B,P,L), the share of each patch; they sum to 1 over P.
        pooled_logits: q (B,L), the weighted sum of the patch logits.
        tde_logits: p + lam * q (B,L), the total direct effect: rank by this.
        probs: (B,L) in [0,1]; sigmoid of `tde_logits`, or of `tde_logits` / (1 + lam) where the
            normalised form was asked for.
    """

    image_logits: Tensor
    patch_logits: Tensor
    weights: Tensor
    pooled_logits: Tensor
    tde_logits: Tensor
    probs: Tensor


def at_least_float32(logits: Tensor) -> Tensor:
    """Raise logits of half precision or whole numbers, of any shape, to float32; leave the others as they are.

    >>> at_least_float32(torch.zeros(1, dtype=torch.float16)).dtype
    torch.float32
    """
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def patch_weights(weight_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Equation 4: softmax over the patches, for each label on its own.

    Args:
        weight_logits: (B,P,L); the patch logits themselves in PAT-I, a head of their own in PAT-T.
        temperature: above 0. Small values pick the strongest patch, large ones give the mean.

    Returns:
        Weights (B,P,L), 1 in sum over P.

    >>> patch_weights(torch.tensor([[[0.0], [0.0]]])).flatten().tolist()
    [0.5, 0.5]
    """
    check_shapes("patch_weights", "BPL", weight_logits=weight_logits)
    Patching(temperature=temperature)  # refuses what is none
    logits = at_least_float32(weight_logits)
    temperature = max(temperature, torch.finfo(logits.dtype).tiny)  # one that is 0 in their dtype would divide 0 by 0
    # A softmax does not change when the largest logit is taken off first, and then a temperature
    # near 0 overflows to -inf (weight 0) instead of inf - inf.
    largest = logits.detach().amax(dim=1, keepdim=True)
    return torch.softmax((logits - largest) / temperature, dim=1)


def pool_patches(patch_logits: Tensor, weights: Tensor) -> Tensor:
    """Pooled patch logits q = sum over the patches of w_j * q_j.

    Args:
        patch_logits: (B,P,L).
        weights: (B,P,L), from `patch_weights`.

    Returns:
        Pooled logits (B,L). NaN where a patch has weight 0 and a logit that is not finite: such a model is refused.

    >>> pool_patches(torch.tensor([[[1.0], [3.0]]]), torch.tensor([[[0.25], [0.75]]])).item()
    2.5
    """
    check_shapes("pool_patches", "BPL BPL", patch_logits=patch_logits, weights=weights)
    return (at_least_float32(patch_logits) * weights).sum(dim=1)


def tde_logits(image_logits: Tensor, pooled_logits: Tensor, *, lam: float = 1.0, normalised: bool = False) -> Tensor:
    """Equation 3 on logits: p + lam * q.

    Args:
        image_logits: p (B,L).
        pooled_logits: q (B,L), from `pool_patches`.
        lam: weight of the direct effect, 0 or more.
        normalised: divide by 1 + lam, so that the result has the scale of one model's logits.
            Ranking within a label and the decision at probability 0.5 stay the same, other
            probabilities do not.

    Returns:
        TDE logits (B,L).

    >>> tde_logits(torch.tensor([[1.0]]), torch.tensor([[3.0]]), lam=1.0).item()
    4.0
    >>> tde_logits(torch.tensor([[1.0]]), torch.tensor([[3.0]]), lam=1.0, normalised=True).item()
    2.0
    """
    check_shapes("tde_logits", "BL BL", image_logits=image_logits, pooled_logits=pooled_logits)
    Patching(lam=lam)  # refuses what is none
    total = at_least_float32(image_logits) + lam * at_least_float32(pooled_logits)
    return total / (1 + lam) if normalised else total


def combine_logits(
    image_logits: Tensor,
    patch_logits: Tensor,
    *,
    weight_logits: Tensor | None = None,
    lam: float = 1.0,
    temperature: float = 1.0,
    normalised: bool = True,
) -> CounterfactualLogits:
    """The whole method after the model: weights, pooling and total direct effect.

    Args:
        image_logits: p (B,L).
        patch_logits: q_j (B,P,L).
        weight_logits: (B,P,L) of the weight head (PAT-T); by default the patch logits (PAT-I).
        lam: see `tde_logits`.
        temperature: see `patch_weights`.
        normalised: whether `probs` come from the normalised form; `tde_logits` are never divided.

    >>> out = combine_logits(torch.zeros(2, 5), torch.zeros(2, 4, 5))
    >>> out.tde_logits.shape, out.probs[0, 0].item()
    (torch.Size([2, 5]), 0.5)
    """
    check_shapes("combine_logits", "BL BPL", image_logits=image_logits, patch_logits=patch_logits)
    weights = patch_weights(patch_logits if weight_logits is None else weight_logits, temperature=temperature)
    pooled = pool_patches(patch_logits, weights)
    tde = tde_logits(image_logits, pooled, lam=lam)
    probs = torch.sigmoid(tde_logits(image_logits, pooled, lam=lam, normalised=normalised))
    return CounterfactualLogits(image_logits, patch_logits, weights, pooled, tde, probs)
