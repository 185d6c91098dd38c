"""How sure an mAP, an F1 or a share is: intervals from resampled images, of one model or of two; Wilson's."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from pivotpatch.core.metrics import Definition, EmptyRule, check_scores, measure_counts
from pivotpatch.errors import InputError

F1_MEASURES = ("CF1", "OF1")
_CHUNKS = (16, 64)  # resamples at once, fewest and most
_COUNTS = 1 << 18  # how often images were drawn: numbers that a processor's cache holds
_COLUMNS = 1000  # labels whose quantiles are found at once


@dataclass(frozen=True)
class Interval:
    """What was measured, and the bounds of its confidence interval."""

    value: float
    low: float
    high: float


def wilson_interval(rates: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends of Wilson score intervals, 95 %, of shares; from 0 to 1 where nothing was counted.

    Args:
        rates: shares of any shape.
        counts: how many each is a share of.

    >>> low, high = wilson_interval(torch.tensor(1.0), torch.tensor(3))
    >>> round(low.item(), 2), high.item()
    (0.44, 1.0)
    """
    square = torch.special.ndtri(torch.tensor(0.975, dtype=torch.float64)) ** 2
    rates, counts = rates.double(), counts.double()
    centre = (rates + square / (2 * counts)) / (1 + square / counts)
    spread = (square * (rates * (1 - rates) / counts + square / (4 * counts**2))).sqrt() / (1 + square / counts)
    nothing = counts == 0
    low = (centre - spread).clamp(min=0).masked_fill(nothing, 0.0)
    return low, (centre + spread).clamp(max=1).masked_fill(nothing, 1.0)


@final
@dataclass(frozen=True, eq=False)
class Resampled:
    """What was measured of one or more models, on the images as they are and in the same R resamples of them."""

    # (1+R,K) by name, first on the images as they are; K labels, or K measures. NaN where there is none, such as for
    # a label without a positive image.
    values: Mapping[str, Tensor]

    def bound_mean(self, name: str, *, minus: str | None = None, confidence: float = 0.95) -> Interval:
        """The interval of a model's mean over the columns, such as its mAP, or of the difference of two.

        A label without a positive image in a resample is left out of that resample's mean.
        """
        values = self._pick(name, minus).nanmean(dim=1, keepdim=True)
        return Interval(*_bound(values, confidence, paired=bool(minus))[:, 0].tolist())

    def bound_each(self, name: str, *, minus: str | None = None, confidence: float = 0.95) -> list[Interval | None]:
        """The interval of each column, or of each difference; None where nothing was measured."""
        bounds = _bound(self._pick(name, minus), confidence, paired=bool(minus))
        return [None if row[0] != row[0] else Interval(*row) for row in bounds.T.tolist()]

    def _pick(self, name: str, minus: str | None) -> Tensor:
        return self.values[name] if minus is None else self.values[name] - self.values[minus]


def _bound(values: Tensor, confidence: float, *, paired: bool) -> Tensor:
    """Values and bounds (3,K) of what was measured and resampled (1+R,K).

    The percentiles of the resamples, moved back by the bootstrap's own bias: an image that is drawn twice counts
    twice at its place, so that resamples of rare labels come out too high, and the mean over many labels hides
    everything but that.
    """
    measured, drawn = values[:1], values[1:]
    ends = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=drawn.dtype)
    parts = drawn.split(_COLUMNS, dim=1)  # torch refuses quantiles of very large tensors
    quantiles = torch.cat([part.nanquantile(ends, dim=0) for part in parts], dim=1)
    bias = drawn.nanmean(dim=0) - measured
    return torch.cat([measured, (quantiles - bias).clamp(min=-1.0 if paired else 0.0, max=1.0)])


def resample_average_precision(
    scores: Mapping[str, Tensor],
    target: Tensor,
    *,
    resamples: int = 1000,
    definition: Definition = "step",
    generator: torch.Generator,
) -> Resampled:
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
    truth = target.float().cpu().T.contiguous()
    labels = (truth == 1).any(dim=1).nonzero()[:, 0].tolist()

    def measure(counts: Tensor, ranked: list[Ranking]) -> Tensor:
        found = torch.full((counts.shape[1], target.shape[1]), torch.nan, dtype=torch.float64)
        for label, ranking in zip(labels, ranked, strict=True):
            found[:, label] = ranking.measure(counts, definition)
        return found

    measures = {}
    for name, matrix in scores.items():
        check_scores(matrix, target, labels=None, where="bootstrap")
        by_label = matrix.detach().cpu().T.contiguous()
        measures[name] = partial(measure, ranked=[Ranking.make(by_label[label], truth[label]) for label in labels])
    return resample(measures, len(target), resamples, generator)


def resample_f1(
    given: Mapping[str, Tensor],
    target: Tensor,
    *,
    resamples: int = 1000,
    empty: EmptyRule = "zero",
    generator: torch.Generator,
) -> Resampled:
    """CF1 and OF1 of decisions in samples of the images, drawn with replacement; the decisions stay as they are.

    Args:
        given: (N,L) boolean by name, the decisions of each model about the same images and labels.
        target: (N,L), 1 present, 0 absent, NaN unknown.
        resamples: R.
        empty: what the precision of a label that is never given counts, as in `precision_recall`.
        generator: draws the images.

    >>> target = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    >>> drawn = resample_f1({"model": target == 1}, target, generator=torch.Generator().manual_seed(0))
    >>> drawn.bound_each("model")[F1_MEASURES.index("OF1")]
    Interval(value=1.0, low=1.0, high=1.0)
    """
    target = target.float().cpu()
    present, known = target == 1, ~target.isnan()

    def measure(counts: Tensor, decided: Tensor) -> Tensor:
        hits, gives, presents = (counts.T @ each.float() for each in (decided & present, decided, present))
        found = measure_counts(hits.double(), gives.double(), presents.double(), empty=empty)
        return torch.stack([found[name] for name in F1_MEASURES], dim=1)

    measures = {name: partial(measure, decided=each.cpu() & known) for name, each in given.items()}
    return resample(measures, len(target), resamples, generator)


def resample(
    measures: Mapping[str, Callable[[Tensor], Tensor]], count: int, resamples: int, generator: torch.Generator
) -> Resampled:
    """What each of `measures` (r,K) says of resamples in which images were drawn so often (N,r).

    >>> measures = {"mean": lambda counts: (counts * torch.tensor([[0.0], [1.0]])).mean(0)[:, None]}
    >>> resample(measures, 2, 3, torch.Generator().manual_seed(0)).values["mean"].shape
    torch.Size([4, 1])
    """
    if resamples < 1:
        raise InputError("bootstrap", f"{resamples} resamples", "give 1 or more; 1,000 are usual")
    parts: dict[str, list[Tensor]] = {name: [] for name in measures}
    once = torch.ones(count, 1)  # each image as it is
    for counts in chain([once], _draw_counts(count, resamples, generator)):
        for name, measure in measures.items():
            parts[name].append(measure(counts))
    return Resampled({name: torch.cat(each) for name, each in parts.items()})


def _draw_counts(count: int, resamples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """How often each image was drawn (N,r), for r resamples at a time."""
    chunk = min(max(_COUNTS // count, _CHUNKS[0]), _CHUNKS[1])
    for number, seed in enumerate(torch.randint(2**62, (-(-resamples // chunk),), generator=generator).tolist()):
        size = min(chunk, resamples - number * chunk)
        drawn = torch.randint(count, (count, size), generator=torch.Generator().manual_seed(seed))
        cells = drawn * size + torch.arange(size)
        yield torch.bincount(cells.flatten(), minlength=count * size).view(count, size).float()


class Ranking(NamedTuple):
    """What no resample changes about a label: its P positive images, and the images that are ranked above the last."""

    images: Tensor  # (M,) of known truth, the highest score first
    starts: Tensor  # (P,) where those begin that are given together with each positive and not yet with the one before
    positives: Tensor  # (P,) images, the highest score first
    ends: Tensor  # (P,) the last positive that has the same score as each

    @classmethod
    def make(cls, scores: Tensor, target: Tensor) -> "Ranking":
        """Rank the images by scores (N,), with the target (N,)."""
        known = (~target.isnan()).nonzero()[:, 0]
        images = known[scores[known].argsort(descending=True)]
        positives = images[target[images] == 1]
        down = -scores[positives]
        given = torch.searchsorted(-scores[images], down, right=True)
        starts = torch.cat([given.new_zeros(1), given[:-1]])
        return cls(images[: given[-1]].int(), starts.int(), positives, torch.searchsorted(down, down, right=True) - 1)

    def measure(self, counts: Tensor, definition: Definition) -> Tensor:
        """Average precision (r,) of resamples in which images were drawn `counts` (N,r) times."""
        # Sums of whole numbers are exact in float32 up to 2^24 images.
        given = F.embedding_bag(self.images, counts, self.starts, mode="sum").cumsum(0)
        drawn = counts[self.positives].double()
        precision = drawn.cumsum(0)[self.ends] / given.clamp(min=1)
        if definition == "envelope":  # a positive that was not drawn is never the best
            precision = precision.flip(0).cummax(0).values.flip(0)
        return (drawn * precision).sum(0) / drawn.sum(0)
