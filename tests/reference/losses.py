"""Binary cross entropy and the asymmetric loss of one label, in plain floating point."""

import math


def asymmetric(logit: float, present: float, *, gamma_neg: float, gamma_pos: float, clip: float) -> float:
    """The loss of one label; soft targets mix the two terms."""
    probability = 1 / (1 + math.exp(-logit))
    shifted = max(probability - clip, 0.0)
    positive = -math.pow(1 - probability, gamma_pos) * math.log(probability)
    negative = -math.pow(shifted, gamma_neg) * math.log(1 - shifted)
    return present * positive + (1 - present) * negative
