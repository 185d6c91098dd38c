"""How sure an mAP or an F1 is: intervals from resampled images, for one model or for two on the same ones."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pivotpatch.core.metrics import Definition, EmptyRule, average_precision, measure_counts
from pivotpatch.errors import InputError

_CHUNKS = (16, 64)  # resamples at once, fewest and most
_COUNTS = 1 << 18  # how often images were drawn: numbers that a processor's cache holds
F1_MEASURES = ("CF1", "OF1")
_COLUMNS = 1000  # labels whose quantiles are found at once


@dataclass(frozen=True)
class Interval:
    """What was measured, and the bounds of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class ResampledPrecision:
    """Average precision of one or more score matrices in the same R resamples of the images.

    Attributes:
        definition: "step" or "envelope".
        measured: (L,) by name, on the images as they are; NaN for a label without a positive image.
        drawn: (R,L) by name; NaN where a resample has no positive image of a label.
    """

    definition: Definition
    measured: Mapping[str, Tensor]
    drawn: Mapping[str, Tensor]

    def bound_mean(self, name: str, *, minus: str | None = None, confidence: float = 0.95) -> Interval:
        """The interval of a matrix's mAP, or of the difference of two.

        The percentiles of the resamples, moved back by the bootstrap's own bias: an image that is drawn twice counts
        twice at its place, so that resamples of rare labels come out too high, and the mean over many labels hides
        everything but that. A label without a positive image in a resample is left out of that resample's mean.
        """
        measured, drawn = self._pick(name, minus)
        bounds = _bound(measured.nanmean()[None], drawn.nanmean(dim=1, keepdim=True), confidence, paired=bool(minus))
        return Interval(*bounds[:, 0].tolist())

    def bound_labels(self, name: str, *, minus: str | None = None, confidence: float = 0.95) -> list[Interval | None]:
        """The interval of each label's average precision or difference; None for a label without a positive image."""
        measured, drawn = self._pick(name, minus)
        bounds = _bound(measured, drawn, confidence, paired=bool(minus))
        return [None if row[0] != row[0] else Interval(*row) for row in bounds.T.tolist()]

    def _pick(self, name: str, minus: str | None) -> tuple[Tensor, Tensor]:
        if minus is None:
            return self.measured[name], self.drawn[name]
        return self.measured[name] - self.measured[minus], self.drawn[name] - self.drawn[minus]


@dataclass(frozen=True, eq=False)
class ResampledF1:
    """CF1 and OF1 of one or more sets of decisions in the same resamples.

    Attributes:
        values: (2,1+R) by name, the rows of `F1_MEASURES`; first on the images as they are.
    """

    values: Mapping[str, Tensor]

    def bound(self, measure: str, name: str, *, minus: str | None = None, confidence: float = 0.95) -> Interval:
        """The interval of a measure, or of the difference of two models in it."""
        values = self.values[name] if minus is None else self.values[name] - self.values[minus]
        row = values[F1_MEASURES.index(measure)]
        return Interval(*_bound(row[:1], row[1:, None], confidence, paired=bool(minus))[:, 0].tolist())


def _bound(measured: Tensor, drawn: Tensor, confidence: float, *, paired: bool) -> Tensor:
    """Values and bounds (3,K) of what was measured (K,), from the same in resamples (R,K)."""
    ends = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=drawn.dtype)
    parts = drawn.split(_COLUMNS, dim=1)  # torch refuses quantiles of very large tensors
    quantiles = torch.cat([part.nanquantile(ends, dim=0) for part in parts], dim=1)
    bias = drawn.nanmean(dim=0) - measured
    return torch.cat([measured[None], (quantiles - bias).clamp(min=-1.0 if paired else 0.0, max=1.0)])


def resample_average_precision(
    scores: Mapping[str, Tensor],
    target: Tensor,
    *,
    resamples: int = 1000,
    definition: Definition = "step",
    generator: torch.Generator,
) -> ResampledPrecision:
    """Average precision in samples of the images, as many as there are, drawn with replacement.

    All matrices see the same resamples, so that their differences are paired. Each is exactly what `average_precision`
    makes of the drawn rows, ties and unknown labels included, but nothing is sorted again.

    Args:
        scores: (N,L) by name, of the same images and labels; any scale.
        target: (N,L), 1 present, 0 absent, NaN unknown.
        resamples: R.
        definition: of average precision, "step" or "envelope".
        generator: draws the images.

    >>> target = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    >>> drawn = resample_average_precision({"model": target}, target, generator=torch.Generator().manual_seed(0))
    >>> drawn.bound_mean("model")
    Interval(value=1.0, low=1.0, high=1.0)
    """
    if resamples < 1:
        raise InputError("bootstrap", f"{resamples} resamples", "give 1 or more; 1,000 are usual")
    measured = {}
    for name, matrix in scores.items():
        found = average_precision(matrix, target, definition=definition).per_label
        measured[name] = torch.tensor([torch.nan if value is None else value for value in found], dtype=torch.float64)
    target = target.float().cpu()
    plans = {name: _Plan.make(matrix.detach().cpu(), target) for name, matrix in scores.items()}
    parts: dict[str, list[Tensor]] = {name: [] for name in scores}
    for counts in _draw_counts(len(target), resamples, generator):
        for name, plan in plans.items():
            values = torch.full((counts.shape[1], target.shape[1]), torch.nan, dtype=torch.float64)
            values[:, plan.labels] = plan.measure(counts, definition)
            parts[name].append(values)
    drawn = {name: torch.cat(each) for name, each in parts.items()}
    return ResampledPrecision(definition, measured, drawn)


def resample_f1(
    given: Mapping[str, Tensor],
    target: Tensor,
    *,
    resamples: int = 1000,
    empty: EmptyRule = "zero",
    generator: torch.Generator,
) -> ResampledF1:
    """CF1 and OF1 of decisions in samples of the images, drawn with replacement; the decisions stay as they are.

    Args:
        given: (N,L) boolean by name, the decisions of each model about the same images and labels.
        target: (N,L), 1 present, 0 absent, NaN unknown.
        resamples: R.
        empty: what the precision of a label that is never given counts, as in `precision_recall`.
        generator: draws the images.

    >>> target = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    >>> drawn = resample_f1({"model": target == 1}, target, generator=torch.Generator().manual_seed(0))
    >>> drawn.bound("OF1", "model")
    Interval(value=1.0, low=1.0, high=1.0)
    """
    target = target.float().cpu()
    present, known, count = target == 1, ~target.isnan(), len(target)
    # The first row counts each image once: what was measured.
    counts = chain([torch.ones(count, 1)], _draw_counts(count, resamples, generator))
    decided = {name: each.cpu() & known for name, each in given.items()}
    parts: dict[str, list[Tensor]] = {name: [] for name in given}
    for drawn in counts:
        presents = drawn.T @ present.float()
        for name, each in decided.items():
            hits, gives = drawn.T @ (each & present).float(), drawn.T @ each.float()
            measured = measure_counts(hits.double(), gives.double(), presents.double(), empty=empty)
            parts[name].append(torch.stack([measured[measure] for measure in F1_MEASURES]))
    return ResampledF1({name: torch.cat(each, dim=1) for name, each in parts.items()})


def _draw_counts(count: int, resamples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """How often each image was drawn (N,r), for r resamples at a time."""
    chunk = min(max(_COUNTS // count, _CHUNKS[0]), _CHUNKS[1])
    for number, seed in enumerate(torch.randint(2**62, (-(-resamples // chunk),), generator=generator).tolist()):
        size = min(chunk, resamples - number * chunk)
        drawn = torch.randint(count, (count, size), generator=torch.Generator().manual_seed(seed))
        cells = drawn * size + torch.arange(size)
        yield torch.bincount(cells.flatten(), minlength=count * size).view(count, size).float()


class _Plan(NamedTuple):
    """Everything about some labels that no resample changes.

    A precision is needed only at the scores of a label's positive images, its levels, the highest first. Images
    between two levels are a bag; what a resample gives above a level is a sum over bags.

    Attributes:
        labels: (K,) those that have a positive image.
        levels: how many each of them has.
        given: images in order, one label after the other.
        given_starts: where each bag of them begins.
        present: the positive ones among them.
        present_starts: likewise.
    """

    labels: Tensor
    levels: list[int]
    given: Tensor
    given_starts: Tensor
    present: Tensor
    present_starts: Tensor

    @classmethod
    def make(cls, scores: Tensor, target: Tensor) -> "_Plan":
        """Put the images of scores (N,K) and target (N,K) into bags."""
        labels = (target == 1).any(dim=0).nonzero().flatten()
        levels: list[int] = []
        bags: dict[str, list[Tensor]] = {"given": [], "given_starts": [], "present": [], "present_starts": []}
        filled = {"given": 0, "present": 0}
        for values, truth in zip(scores.T[labels], target.T[labels], strict=True):
            own = -values  # so that the highest score comes first
            heights = own[truth == 1].unique()
            levels.append(len(heights))
            for kind, chosen in (("given", ~truth.isnan()), ("present", truth == 1)):
                rows = chosen.nonzero().flatten()
                sorted_values, order = own[rows].sort()
                ends = torch.searchsorted(sorted_values, heights, right=True)
                bags[kind].append(rows[order[: ends[-1]]].int())
                bags[f"{kind}_starts"].append(torch.cat([ends.new_zeros(1), ends[:-1]]) + filled[kind])
                filled[kind] += int(ends[-1])
        joined = {kind: torch.cat([torch.empty(0, dtype=torch.int32), *parts]).int() for kind, parts in bags.items()}
        return cls(labels, levels, **joined)

    def measure(self, counts: Tensor, definition: Definition) -> Tensor:
        """Average precision (r,K) of resamples in which images were drawn `counts` (N,r) times."""
        # Sums of whole numbers are exact in float32 up to 2^24 images.
        given = F.embedding_bag(self.given, counts, self.given_starts, mode="sum").double()
        present = F.embedding_bag(self.present, counts, self.present_starts, mode="sum").double()
        found = torch.empty(counts.shape[1], len(self.levels), dtype=torch.float64)
        for place, (all_in, hits_in) in enumerate(
            zip(given.split(self.levels), present.split(self.levels), strict=True)
        ):
            hits = hits_in.cumsum(0)
            precision = hits / all_in.cumsum(0).clamp(min=1)
            if definition == "envelope":  # a level of which nothing was drawn is never the best
                precision = precision.flip(0).cummax(0).values.flip(0)
            found[:, place] = (hits_in * precision).sum(0) / hits[-1]
        return found
