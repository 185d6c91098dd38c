"""Lam and temperature fitted on validation scores: which mixture of image and patches ranks images best."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pivotpatch.core.bootstrap import Interval, resample_average_precision
from pivotpatch.core.metrics import average_precision
from pivotpatch.inference.scores import Scores
from pivotpatch.tuning.folds import FOLDS, draw_folds, rank_among

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
    """One way to mix image and patches.

    Attributes:
        name: "as scored" or "shared".
        lam: weight of the patches, the same for all labels.
        temperature: of the patch weights.
        logits: (N,L) normalised TDE logits; where the mixture was fitted, each image's owe nothing to its own target.
        mean: mAP of these logits (step-wise AP).
        unseen: the pairs that were fitted without each fold; none where nothing was fitted.
    """

    name: str
    lam: float
    temperature: float
    logits: Tensor
    mean: float
    unseen: tuple[Pair, ...] = ()

    def mix(self, scores: Scores) -> Tensor:
        """The same as `logits` (N,L), of other scores of the same images."""
        return _mix_out_of_fold(scores, Pair(self.lam, self.temperature), self.unseen)


@dataclass(frozen=True, eq=False)
class MixingStudy:
    """What lam and temperature are worth.

    Attributes:
        before: the mixture that the images were scored with.
        shared: the best one.
        gain: of its mAP over that of `before`, out of fold, with a paired bootstrap's interval.
        lams: G numbers that were tried, rising.
        temperatures: T numbers that were tried, rising.
        means: (T,G) mAP of each pair on all images.
        chosen: the mixture to use: as scored, unless the gain is beyond noise.
    """

    before: Mixture
    shared: Mixture
    gain: Interval
    lams: tuple[float, ...]
    temperatures: tuple[float, ...]
    means: Tensor
    chosen: Mixture

    def to_dict(self) -> dict[str, object]:
        """In plain types, for JSON."""
        gains = {self.before.name: None, self.shared.name: asdict(self.gain)}
        tried = {
            each.name: {"lam": each.lam, "temperature": each.temperature, "mAP": each.mean, "gain": gains[each.name]}
            for each in (self.before, self.shared)
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
    drawn = resample_average_precision(logits, target, resamples=resamples, generator=generator)
    before = Mixture("as scored", used.lam, used.temperature, logits["before"], judged["before"])
    shared = Mixture("shared", best.lam, best.temperature, logits["shared"], judged["shared"], tuple(unseen))
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
    """Table (1 + FOLDS, T * G) of the mAP of all pairs, on all images and then without each fold.

    How many images of each fold score at least as much as a positive is counted once; sums of these counts give its
    precision with and without a fold.
    """
    fold, lam = draw_folds(len(scores)), torch.tensor(lams)[:, None]
    means = []
    for temperature in temperatures:
        cooled = scores if scores.patch_logits is None else scores.remix(temperature=temperature)
        image, pooled = (cooled.get(kind).float() for kind in ("image", "patch"))
        precision = []
        for p, q, target in zip(image.T, pooled.T, scores.target.T, strict=True):
            mixed, present, known = (p + lam * q) / (1 + lam), target == 1, ~torch.isnan(target)  # (G,N), (N,), (N,)
            hits, given = (_count_by_fold(mixed, mixed[:, present], fold, rows) for rows in (present, known))
            own = fold[present]
            kept = torch.cat([own[None] >= 0, own != torch.arange(FOLDS)[:, None]])  # (1 + FOLDS, P)
            ratio = hits / given.clamp(min=1) * kept[:, None]
            precision.append(ratio.sum(2) / kept.sum(1, keepdim=True))  # NaN where no positive is left
        means.append(torch.stack(precision).nanmean(0))
    return torch.cat(means, dim=1)


def _count_by_fold(mixed: Tensor, values: Tensor, fold: Tensor, rows: Tensor) -> Tensor:
    """How many of some rows (N,) of mixed (G,N) are at least as high as the values (G,P): (1 + FOLDS, G, P).

    The first counts all folds, the others all but one.
    """
    counts = []
    for number in range(FOLDS):
        ranked = np.sort(mixed[:, rows & (fold == number)].contiguous().numpy())  # torch would sort indices along
        counts.append(ranked.shape[1] - torch.searchsorted(torch.from_numpy(ranked), values.contiguous()))
    each = torch.stack(counts).double()
    return torch.cat([each.sum(0, keepdim=True), each.sum(0) - each])


def _mix(scores: Scores, pair: Pair) -> Tensor:
    """Normalised TDE logits (N,L); the temperature is as it was where patches were not kept."""
    temperature = None if scores.patch_logits is None else pair.temperature
    return scores.remix(lam=pair.lam, temperature=temperature).scaled("tde").float()


def _mix_out_of_fold(scores: Scores, whole: Pair, unseen: Sequence[Pair]) -> Tensor:
    """Normalised TDE logits (N,L) whose order owes nothing to an image's own fold.

    Folds may find other pairs, whose logits have other scales. So an image takes the place (its rank among all) that
    the pair of its fold gives it, and there the logit that the pair `whole` has; targets have no part in that.
    """
    mixed = _mix(scores, whole)
    if not unseen:
        return mixed
    fold = draw_folds(len(scores))
    ranked, logits = mixed.sort(dim=0).values, torch.empty_like(mixed)
    for number, pair in enumerate(unseen):
        rows = fold == number
        logits[rows] = ranked.gather(0, rank_among(_mix(scores, pair), rows))
    return logits
