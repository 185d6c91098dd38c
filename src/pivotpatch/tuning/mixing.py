"""Lam and temperature fitted on validation scores: which mixture of image and patches ranks images best."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pivotpatch.core.bootstrap import Interval, resample_average_precision
from pivotpatch.core.metrics import average_precision
from pivotpatch.inference.scores import Scores
from pivotpatch.tuning.calibration import FOLDS, draw_folds, split_folds

LAMS = (0.0, *(2 ** (half / 2) for half in range(-6, 9)))
"""The lams that are tried: 0 and half powers of two from 1/8 to 16."""
TEMPERATURES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The temperatures that are tried."""


class Pair(NamedTuple):
    """What is fitted: the weight of the patches, and the temperature of the patch weights."""

    lam: float
    temperature: float


@dataclass(frozen=True, eq=False)
class Mixture:
    """One way to mix image and patches."""

    name: str  # "as scored" or "shared"
    lam: float  # weight of the patches, the same for all labels
    temperature: float  # of the patch weights
    logits: Tensor  # (N,L) normalised TDE; of a fitted mixture, each image's owe nothing to its own target
    mean: float  # mAP of these logits (step-wise AP)
    unseen: tuple[Pair, ...] = ()  # fitted without each fold; none where nothing was fitted

    def mix(self, scores: Scores) -> Tensor:
        """The same as `logits` (N,L), of other scores of the same images."""
        return _mix_out_of_fold(scores, Pair(self.lam, self.temperature), self.unseen)


@dataclass(frozen=True, eq=False)
class MixingStudy:
    """What lam and temperature are worth."""

    before: Mixture  # that the images were scored with
    shared: Mixture  # the best one
    gain: Interval  # of its mAP over that of `before`, out of fold, with a paired bootstrap's interval
    lams: tuple[float, ...]  # G numbers that were tried, rising
    temperatures: tuple[float, ...]  # T numbers that were tried, rising
    means: Tensor  # (T,G) mAP of each pair on all images
    chosen: Mixture  # to use: as scored, unless the gain is beyond noise

    def to_dict(self) -> dict[str, object]:
        """In plain types, for JSON."""
        tried = {
            each.name: {"lam": each.lam, "temperature": each.temperature, "mAP": each.mean, "gain": gain}
            for each, gain in ((self.before, None), (self.shared, asdict(self.gain)))
        }
        curve = {"lam": self.lams, "temperature": self.temperatures, "mAP": self.means.tolist()}
        return {"chosen": self.chosen.name, "tried": tried, "curve": curve}


def fit_mixing(
    scores: Scores,
    *,
    lams: Sequence[float] = LAMS,
    temperatures: Sequence[float] = TEMPERATURES,
    resamples: int = 1000,
    generator: torch.Generator,
) -> MixingStudy:
    """Fit lam and temperature by mAP, without another forward pass: the best of all pairs; ties keep the old one.

    The pair is fitted again without each fold, and the logits of the result come from those fits: they can be compared
    with those of `before` image by image, as if the images were new.

    Args:
        scores: with image and patch logits; where patches were not kept, the temperature stays as it was.
        lams: to try.
        temperatures: to try.
        resamples: of the interval of the gain.
        generator: draws them.
    """
    used = Pair(float(scores.lam), float(scores.temperature))
    lams = tuple(dict.fromkeys([used.lam, *lams]))  # the first of equally good ones is taken
    if scores.patch_logits is None:
        temperatures = ()
    temperatures = tuple(dict.fromkeys([used.temperature, *temperatures]))
    pairs = [Pair(lam, temperature) for temperature in temperatures for lam in lams]
    means, target = _tabulate(scores, lams, temperatures), scores.target
    best, *unseen = (pairs[column] for column in means.argmax(1).tolist())
    logits = {"before": scores.remix().scaled("tde").float(), "shared": _mix_out_of_fold(scores, best, unseen)}
    judged = {name: average_precision(values, target).mean for name, values in logits.items()}
    before = Mixture("as scored", used.lam, used.temperature, logits["before"], judged["before"])
    shared = Mixture("shared", best.lam, best.temperature, logits["shared"], judged["shared"], tuple(unseen))
    drawn = resample_average_precision(logits, target, resamples=resamples, generator=generator)
    gain = drawn.bound_mean("shared", minus="before")
    by_lam, by_temperature = np.argsort(lams), np.argsort(temperatures)
    return MixingStudy(
        before,
        shared,
        gain,
        lams=tuple(sorted(lams)),
        temperatures=tuple(sorted(temperatures)),
        means=means[0].reshape(len(temperatures), len(lams))[by_temperature][:, by_lam],
        chosen=shared if gain.low > 0 else before,
    )


def _tabulate(scores: Scores, lams: Sequence[float], temperatures: Sequence[float]) -> Tensor:
    """Table (1 + FOLDS, T * G) of the mAP of all pairs, on all images and then without each fold."""
    fold, lam = draw_folds(len(scores)).numpy(), torch.tensor(lams)[:, None]
    means = []
    for temperature in temperatures:
        mixed = _mix(scores, Pair(0.0, temperature))
        image, pooled = (mixed.get(kind).float() for kind in ("image", "patch"))
        found = []
        for p, q, truth in zip(image.T, pooled.T, scores.target.T.numpy(), strict=True):
            known = ~np.isnan(truth)
            values = ((p + lam * q) / (1 + lam)).numpy()[:, known]
            found.append(_measure_precision(values, truth[known] == 1, fold[known]))
        means.append(torch.stack(found).nanmean(0))
    return torch.cat(means, dim=1)


def _measure_precision(values: NDArray[np.float32], present: NDArray[np.bool_], fold: NDArray[np.int64]) -> Tensor:
    """Average precision (1 + FOLDS, G) of scores (G,N), of all images and then without each fold (N,), by one sort.

    NaN where no positive image is left.
    """
    order = np.argsort(-values, axis=1)
    ranked, shown, folds = np.take_along_axis(values, order, 1), present[order], fold[order]
    places = shown.nonzero()[1].reshape(len(values), -1)  # (G,P) of the positives
    # Equal scores are judged together, at the place of the last of them.
    ends = np.where(np.diff(ranked, axis=1, append=-np.inf) != 0, np.arange(len(fold)), len(fold))
    last = np.take_along_axis(np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1], places, 1)
    each = folds == np.arange(FOLDS)[:, None, None]

    def count(chosen: NDArray[np.bool_]) -> Tensor:  # (1 + FOLDS, G, P) images down to each positive
        running = torch.from_numpy(chosen).cumsum(2, dtype=torch.int32)
        by_fold = running.gather(2, torch.from_numpy(last).expand(FOLDS, *last.shape))
        return torch.cat([by_fold.sum(0, keepdim=True), by_fold.sum(0) - by_fold])

    own = np.take_along_axis(folds, places, 1)
    kept = torch.from_numpy(np.stack([own >= 0, *(own != number for number in range(FOLDS))]))
    precision = count(each & shown).double() / count(each).clamp(min=1)
    return (precision * kept).sum(2) / kept.sum(2)


def _mix(scores: Scores, pair: Pair) -> Scores:
    """Scores mixed anew; the temperature is as it was where patches were not kept."""
    return scores.remix(lam=pair.lam, temperature=None if scores.patch_logits is None else pair.temperature)


def _mix_out_of_fold(scores: Scores, whole: Pair, unseen: Sequence[Pair]) -> Tensor:
    """Normalised TDE logits (N,L) whose order owes nothing to an image's own fold.

    Folds may find other pairs, whose logits have other scales. So an image takes the place (its rank among all) that
    the pair of its fold gives it, and there the logit that the pair `whole` has; targets have no part in that.
    """
    mixed = _mix(scores, whole).scaled("tde").float()
    if not unseen:
        return mixed
    ranked, logits = mixed.sort(dim=0).values, torch.empty_like(mixed)
    for pair, (inside, _) in zip(unseen, split_folds(len(scores)), strict=True):
        logits[inside] = ranked.gather(0, rank_among(_mix(scores, pair).scaled("tde").float(), inside))
    return logits


def rank_among(values: Tensor, rows: Tensor) -> Tensor:
    """Ranks (M,L) of the values (N,L) in some rows (M,) among all, per label; equal ones share theirs.

    >>> rank_among(torch.tensor([[0.5], [0.1], [0.5]]), torch.tensor([0, 2])).tolist()
    [[1], [1]]
    """
    ordered = torch.from_numpy(np.sort(values.T.contiguous().numpy()))  # torch would sort indices along, slower
    return torch.searchsorted(ordered, values[rows].T.contiguous()).T
