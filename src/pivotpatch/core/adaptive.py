"""A second look only where the whole image leaves doubt: when to take it, and what to say without."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from pivotpatch.core.calibration import Calibration
from pivotpatch.errors import InputError


def check_effort(effort: float, where: str) -> None:
    """Refuse an effort that is no number from 0 to 1.

    >>> check_effort(0.5, "here")
    """
    if not isinstance(effort, (int, float)) or not 0 <= effort <= 1:
        todo = "give a number from 0, no second look, to 1, one at every image"
        raise InputError(where, f"effort is {effort!r}", todo)


def measure_uncertainty(probs: Tensor) -> Tensor:
    """How much is open in each picture (B,): p (1 - p) summed over its labels, the variance of their number.

    Args:
        probs: (B,L) in [0,1], calibrated.

    >>> import torch
    >>> measure_uncertainty(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).tolist()
    [0.5, 0.0]
    """
    return (probs * (1 - probs)).sum(dim=-1)


@dataclass(frozen=True)
class Adaptive:
    """What the whole image says alone, and how uncertain it must be for a second look.

    Attributes:
        calibration: of the image logits. A image that is not looked at again gets its probabilities, which then can
            be compared with the calibrated ones of those that are.
        cutoffs: quantiles of the uncertainty of validation images at even steps from 0 to 1, rising.
        again: calibration of the TDE logits of a closer look; None where they have that of the patches.

    >>> adaptive = Adaptive(Calibration("image", "platt", (1.0,), (0.0,)), (0.0, 0.1, 0.2))
    >>> adaptive.find_cutoff(0.5), adaptive.find_cutoff(0.75)
    (0.1, 0.05)
    """

    calibration: Calibration
    cutoffs: tuple[float, ...]
    again: Calibration | None = None

    def __post_init__(self) -> None:
        for fitted, kind in ((self.calibration, "image"), (self.again, "tde")):
            if fitted is not None and fitted.kind != kind:
                raise InputError("Adaptive", f"the calibration is of {fitted.kind!r} logits", f"fit one of {kind}")
        if len(self.cutoffs) < 2 or list(self.cutoffs) != sorted(self.cutoffs):  # NaN is never sorted
            raise InputError("Adaptive", "cutoffs are no rising quantiles", "fit them again")
        if not all(map(math.isfinite, self.cutoffs)):
            raise InputError("Adaptive", "a cutoff is not finite", "fit them again")

    def find_cutoff(self, effort: float) -> float:
        """The uncertainty from which on there is a second look, so that `effort` is the share of such pictures."""
        check_effort(effort, "Adaptive")
        place, part = divmod((1 - effort) * (len(self.cutoffs) - 1), 1)
        low, high = self.cutoffs[int(place)], self.cutoffs[min(int(place) + 1, len(self.cutoffs) - 1)]
        return low + part * (high - low)

    def choose(self, probs: Tensor, effort: float) -> Tensor:
        """Which pictures (B,) are to be looked at again.

        Args:
            probs: (B,L), from `calibration`.
            effort: share of such images among validation images, from 0 to 1.
        """
        return measure_uncertainty(probs) >= self.find_cutoff(effort)

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Adaptive":
        """What `to_dict` gave, also after JSON has made lists of its tuples."""
        again = content.get("again")
        return cls(
            Calibration.from_dict(content["calibration"]),
            tuple(content["cutoffs"]),
            None if again is None else Calibration.from_dict(again),
        )
