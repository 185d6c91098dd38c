"""What a model has to know beside its weights: how it cuts and mixes patches, its calibration, when to look again.

Plain values without torch; what is applied to scores takes arrays and tensors alike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pivotpatch.errors import InputError, check_known
from pivotpatch.runtime.checks import check_effort

SIDE = 4096
"""Most rows and columns of an image that a model sees or cuts patches from."""
GRID = 16
"""Most patches per side."""
VIEW_PIXELS = SIDE * SIDE
"""Most pixels of an image and its patches together."""
KINDS = ("image", "patch", "tde")
"""Kinds of logits, in the order of tables: the whole image, the pooled patches, the total direct effect."""
Values = TypeVar("Values")
"""An array, or a tensor."""


class PatchBox(NamedTuple):
    """The pixels of one patch: columns `left` to `right` and rows `top` to `bottom`, ends excluded."""

    left: int
    top: int
    right: int
    bottom: int


def _starts(length: int, grid: int, overlap: float) -> tuple[list[int], int]:
    """First pixel of each of `grid` equal spans that cover `length`, and their common size.

    Spans are rounded up to whole pixels and then spread evenly, so that no border is lost and all
    stay equal; they overlap by the few pixels that this takes, besides what `overlap` asks for.
    """
    # A quotient that is whole but for the last bit of a float is not rounded up.
    size = math.ceil(length / (grid - (grid - 1) * overlap) - 1e-9)
    return [i * (length - size) // max(grid - 1, 1) for i in range(grid)], size


def patch_boxes(height: int, width: int, *, grid: int = 2, overlap: float = 0.0) -> list[PatchBox]:
    """Pixel boxes of the patches of an image, row by row.

    Args:
        height: H, rows of the image.
        width: W, columns of the image.
        grid: patches per side; the result has P = grid * grid boxes of equal size that together
            cover every pixel.
        overlap: share of a patch's side that it has in common with its neighbour, in [0, 1).

    >>> patch_boxes(4, 6, grid=2)[1]
    PatchBox(left=3, top=0, right=6, bottom=2)
    >>> [(box.left, box.right) for box in patch_boxes(1, 7, grid=1)]
    [(0, 7)]
    >>> [(box.left, box.right) for box in patch_boxes(7, 7, grid=2, overlap=0.25)[:2]]
    [(0, 4), (3, 7)]
    """
    Patching(grid, overlap)  # refuses what is none
    if grid > min(height, width):
        wrong = f"grid {grid} is larger than the image, {height} x {width} pixels"
        raise InputError("patch_boxes", wrong, "give a smaller grid or a larger image")
    tops, rows = _starts(height, grid, overlap)
    lefts, columns = _starts(width, grid, overlap)
    return [PatchBox(left, top, left + columns, top + rows) for top in tops for left in lefts]


@dataclass(frozen=True)
class Patching:
    """How a model cuts the patches of an image and mixes their logits with those of the whole image.

    Attributes:
        grid: patches per side, P = grid * grid.
        overlap: share of a patch's side that it has in common with its neighbour, in [0, 1).
        source_size: rows and columns of the image that patches are cut from ("native"); None where they are cut from
            the image that the model sees.
        patch_size: rows and columns at which the model sees each patch; None for those of the image.
        closer_size: rows and columns of a closer look at the whole image, in the place of the patches; None for none.
        lam: weight of the patches' logits.
        temperature: of the softmax over the patches.

    >>> Patching(grid=3).count
    9
    """

    grid: int = 2
    overlap: float = 0.0
    source_size: int | None = None
    patch_size: int | None = None
    closer_size: int | None = None
    lam: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.number):  # of a loop over an array
                object.__setattr__(self, name, value.item())
        for name, valid, todo in (
            ("grid", lambda value: isinstance(value, int) and value >= 1, "give a whole number of patches per side"),
            ("overlap", lambda value: 0 <= value < 1, "give a share of a patch's side, 0 or more and below 1"),
            ("lam", lambda value: 0 <= value <= 1e6, "give a number from 0 to a million"),
            ("temperature", lambda value: value > 0, "give a number above 0"),
        ):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not valid(value):
                raise InputError("patches", f"{name} is {value!r}", todo)

    @property
    def count(self) -> int:
        """P, the number of patches of an image."""
        return self.grid * self.grid


def check_views(image_size: int, cut: Patching, *, where: str) -> None:
    """Refuse an image and patches that have more than `VIEW_PIXELS` together.

    Patches count as they are cut or as the model sees them, whichever is larger.
    """
    side = (cut.source_size or image_size) / (cut.grid - (cut.grid - 1) * cut.overlap)
    pixels = image_size**2 + (cut.grid * max(cut.patch_size or image_size, side)) ** 2
    if pixels > VIEW_PIXELS:
        wrong = f"an image and its {cut.grid} x {cut.grid} patches have {pixels / 1e6:,.0f} million pixels"
        todo = f"give a smaller grid, overlap or size, for {VIEW_PIXELS / 1e6:.1f} million at most"
        raise InputError(where, wrong, todo)


@dataclass(frozen=True)
class Calibration:
    """Probabilities sigmoid(slope * logits + offset), with numbers of its own for each of L labels.

    Attributes:
        kind: of the logits that it was fitted to: "image", "patch" or "tde". Those of "tde" are in the normalised form,
            (p + lam q) / (1 + lam), so that slope 1 and offset 0 change nothing for every kind.
        method: how it was fitted.
        slope: L numbers; 1 / T where a temperature T was fitted.
        offset: L numbers.

    >>> Calibration("image", "platt", (0.5,), (1.0,)).apply(np.array([[-2.0]])).item()
    0.5
    """

    kind: str
    method: str
    slope: tuple[float, ...]
    offset: tuple[float, ...]

    def __post_init__(self) -> None:
        check_known(self.kind, KINDS, where="Calibration", what="kind")
        if len(self.slope) != len(self.offset):
            wrong = f"{len(self.slope)} slopes and {len(self.offset)} offsets"
            raise InputError("Calibration", wrong, "give one of each per label")
        if not all(map(math.isfinite, self.slope + self.offset)):
            raise InputError("Calibration", "a slope or an offset is not finite", "fit it again")

    def apply(self, logits: Values) -> Values:
        """Probabilities (B,L) of logits (B,L), in float32 at least."""
        given: Any = logits
        if given.shape[-1] != len(self.slope):
            wrong = f"fitted to {len(self.slope)} labels, logits have shape {tuple(given.shape)}"
            raise InputError("Calibration", wrong, "give logits of the same labels")
        if isinstance(given, np.ndarray):
            given = given if given.dtype in (np.float32, np.float64) else given.astype(np.float32)
            return squash(given * np.asarray(self.slope, given.dtype) + np.asarray(self.offset, given.dtype))
        exact = given.is_floating_point() and given.dtype.itemsize >= 4  # neither half precision nor whole numbers
        given = given if exact else given.float()
        calibrated = given * given.new_tensor(self.slope) + given.new_tensor(self.offset)
        return calibrated.sigmoid()

    def select(self, places: Sequence[int]) -> "Calibration":
        """Of the labels at these places, in their order.

        >>> Calibration("image", "platt", (1.0, 2.0), (0.0, 3.0)).select([1]).offset
        (3.0,)
        """
        slope, offset = (tuple(values[place] for place in places) for values in (self.slope, self.offset))
        return replace(self, slope=slope, offset=offset)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Calibration":
        """What `asdict` gave, also after JSON has made lists of its tuples."""
        return cls(content["kind"], content["method"], tuple(content["slope"]), tuple(content["offset"]))


def squash(logits: Any) -> Any:
    """The sigmoid of an array of any shape, without overflow.

    >>> squash(np.array([-1000.0, 0.0, 1000.0])).tolist()
    [0.0, 0.5, 1.0]
    """
    return 0.5 * (1 + np.tanh(0.5 * logits))


def measure_uncertainty(probs: Values) -> Values:
    """How much is open in each image (B,): p (1 - p) summed over its labels, the variance of their number.

    Args:
        probs: (B,L) in [0,1], calibrated.

    >>> measure_uncertainty(np.array([[0.5, 0.5], [1.0, 0.0]])).tolist()
    [0.5, 0.0]
    """
    given: Any = probs
    return (given * (1 - given)).sum(-1)


def rate_self_confidence(probs: NDArray[np.floating], target: NDArray[np.floating]) -> NDArray[np.floating]:
    """What a model gives to the target's answers, as a part of what it gives to such answers as a rule.

    That is p where the target says yes and 1 - p where it says no, divided by its mean over all images with that
    answer: a label that the model hardly ever finds is not suspicious for being missed once more.

    Args:
        probs: (N,L), NaN where there are none.
        target: (N,L), 1 present, 0 absent, NaN unknown.

    Returns:
        (N,L), 0 or more, 1 for an ordinary answer; NaN where either is unknown.

    >>> rate_self_confidence(np.array([[0.9], [0.9], [0.3]]), np.array([[1.0], [1.0], [1.0]])).round(4).tolist()
    [[1.2857], [1.2857], [0.4286]]
    """
    own, rated = np.where(target == 1, probs, 1 - probs), np.full(probs.shape, np.nan)
    for answer in (0, 1):
        asked = (target == answer) & ~np.isnan(probs)
        usual = np.where(asked, own, 0).sum(0) / np.maximum(asked.sum(0), 1)
        rated = np.where(asked, own / np.maximum(usual, 1e-6), rated)
    return rated


@dataclass(frozen=True)
class Adaptive:
    """What the whole image says alone, and how uncertain it must be for a second look.

    Attributes:
        calibration: of the image logits. An image that is not looked at again gets its probabilities, which then can
            be compared with the calibrated ones of those that are.
        cutoffs: quantiles of the uncertainty of validation images at even steps from 0 to 1, rising.
        again: calibration of the TDE logits of a closer look; None where they have that of the patches.
        effort: share of images that get a second look where nobody asks for another.

    >>> adaptive = Adaptive(Calibration("image", "platt", (1.0,), (0.0,)), (0.0, 0.1, 0.2))
    >>> adaptive.find_cutoff(0.5), adaptive.find_cutoff(0.75)
    (0.1, 0.05)
    """

    calibration: Calibration
    cutoffs: tuple[float, ...]
    again: Calibration | None = None
    effort: float = field(default=1.0, repr=False)  # a digest of the model is made of the rest; work notes its own

    def __post_init__(self) -> None:
        check_effort(self.effort, "Adaptive")
        for fitted, kind in ((self.calibration, "image"), (self.again, "tde")):
            if fitted is not None and fitted.kind != kind:
                raise InputError("Adaptive", f"the calibration is of {fitted.kind!r} logits", f"fit one of {kind}")
        rising = list(self.cutoffs) == sorted(self.cutoffs)  # NaN is never sorted
        if len(self.cutoffs) < 2 or not rising or self.cutoffs[0] < 0 or not all(map(math.isfinite, self.cutoffs)):
            raise InputError("Adaptive", "cutoffs are no rising quantiles", "fit them again")

    def find_cutoff(self, effort: float) -> float:
        """The uncertainty from which on there is a second look, so that `effort` is the share of such images."""
        return float(np.interp((1 - effort) * (len(self.cutoffs) - 1), range(len(self.cutoffs)), self.cutoffs))

    def choose(self, probs: Any, effort: float) -> Any:
        """Which images (B,) are to be looked at again.

        Args:
            probs: (B,L), from `calibration`.
            effort: share of such images among validation images, from 0 to 1.
        """
        return measure_uncertainty(probs) >= self.find_cutoff(effort)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Adaptive":
        """What `asdict` gave, also after JSON has made lists of its tuples."""
        again = content.get("again")
        return cls(
            Calibration.from_dict(content["calibration"]),
            tuple(content["cutoffs"]),
            None if again is None else Calibration.from_dict(again),
            content.get("effort", 1.0),
        )


def choose_effort(asked: float | None, adaptive: Adaptive | None) -> float:
    """The effort that is asked for; where it is None, the model's own.

    >>> choose_effort(None, None), choose_effort(0.5, None)
    (1.0, 0.5)
    """
    own = 1.0 if adaptive is None else adaptive.effort
    return float(own if asked is None else asked)
