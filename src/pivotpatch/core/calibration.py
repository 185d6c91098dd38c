"""Calibrated probabilities: a slope and an offset on the logits of each label."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pivotpatch.core.counterfactual import at_least_float32
from pivotpatch.errors import InputError


@dataclass(frozen=True)
class Calibration:
    """Probabilities sigmoid(slope * logits + offset), with numbers of its own for each of L labels.

    Attributes:
        kind: of the logits that it was fitted to: "image", "patch" or "tde". Those of "tde" are in the normalised form,
            (p + lam q) / (1 + lam), so that slope 1 and offset 0 change nothing for every kind.
        method: how it was fitted.
        slope: L numbers; 1 / T where a temperature T was fitted.
        offset: L numbers.

    >>> Calibration("image", "platt", (0.5,), (1.0,)).apply(torch.tensor([[-2.0]])).item()
    0.5
    """

    kind: str
    method: str
    slope: tuple[float, ...]
    offset: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.slope) != len(self.offset):
            wrong = f"{len(self.slope)} slopes and {len(self.offset)} offsets"
            raise InputError("Calibration", wrong, "give one of each a label")
        if not all(map(math.isfinite, self.slope + self.offset)):
            raise InputError("Calibration", "a slope or an offset is not finite", "fit it again")

    def apply(self, logits: Tensor) -> Tensor:
        """Probabilities (B,L) of logits (B,L)."""
        if logits.shape[-1] != len(self.slope):
            wrong = f"fitted to {len(self.slope)} labels, logits have shape {tuple(logits.shape)}"
            raise InputError("Calibration", wrong, "give logits of the same labels")
        logits = at_least_float32(logits)
        slope, offset = (logits.new_tensor(values) for values in (self.slope, self.offset))
        return torch.sigmoid(logits * slope + offset)

    def select(self, places: Sequence[int]) -> "Calibration":
        """Of the labels at these places, in their order.

        >>> Calibration("image", "platt", (1.0, 2.0), (0.0, 3.0)).select([1]).offset
        (3.0,)
        """
        slope, offset = (tuple(values[place] for place in places) for values in (self.slope, self.offset))
        return replace(self, slope=slope, offset=offset)

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Calibration":
        """What `to_dict` gave, also after JSON has made lists of its tuples."""
        return cls(content["kind"], content["method"], tuple(content["slope"]), tuple(content["offset"]))
