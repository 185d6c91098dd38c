"""The paper's equations 3 and 4, written with loops over single numbers."""

import math


def weights(logits: list[float], temperature: float) -> list[float]:
    """Equation 4 for one label: the weight of each patch."""
    powers = [math.exp(q / temperature) for q in logits]
    return [power / sum(powers) for power in powers]


def tde(image: float, patches: list[float], *, weight_logits: list[float], lam: float, temperature: float) -> float:
    """Equation 3 for one label of one image: p + lam * sum_j w_j q_j."""
    shares = weights(weight_logits, temperature)
    return image + lam * sum(share * patch for share, patch in zip(shares, patches, strict=True))
