"""Lam and temperature fitted on validation scores: which mixture of image and patches ranks images best."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pivotpatch.core.bootstrap import Interval, Ranking, resample_average_precision
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores
from pivotpatch.tuning.calibration import draw_folds

LAMS = (0.0, *(2 ** (half / 2) for half in range(-6, 9)))
"""The lams that are tried: 0 and half powers of two from 1/8 to 16."""
TEMPERATURES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The temperatures that are tried."""


class Pair(NamedTuple):
    """What is fitted: the weight of the patches, and the temperature of the patch weights."""

    lam: float
    temperature: float


@dataclass(frozen=True, eq=False)
class MixingStudy:
    """What lam and temperature are worth: those that the images were scored with, and the best ones."""

    before: Pair  # that the images were scored with
    fitted: Pair  # the best one, the same for all labels
    unseen: tuple[Pair, ...]  # the best ones without each fold
    scores: Scores  # mixed by the fitted pair; each image's TDE logits owe nothing to its own target
    mean_before: float  # mAP of the TDE logits as they were scored (step-wise AP)
    mean_fitted: float  # mAP of those of `scores`
    gain: Interval  # of the second over the first, with a paired bootstrap's interval
    lams: tuple[float, ...]  # G numbers that were tried, rising
    temperatures: tuple[float, ...]  # T numbers that were tried, rising
    means: Tensor  # (T,G) mAP of each pair on all images

    @property
    def pays(self) -> bool:
        """Whether the gain is beyond noise, so that the fitted pair is the one to use."""
        return self.gain.low > 0

    def mix(self, scores: Scores) -> Scores:
        """Other scores of the same images, mixed as those that it was fitted to."""
        return _mix_out_of_fold(scores, self.fitted, self.unseen)

    def to_dict(self) -> dict[str, object]:
        """In plain types, for JSON."""
        tried = {
            "as scored": {**self.before._asdict(), "mAP": self.mean_before, "gain": None},
            "shared": {**self.fitted._asdict(), "mAP": self.mean_fitted, "gain": asdict(self.gain)},
        }
        curve = {"lam": self.lams, "temperature": self.temperatures, "mAP": self.means.tolist()}
        return {"chosen": "shared" if self.pays else "as scored", "tried": tried, "curve": curve}


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
    if not (scores.target == 1).any():
        raise InputError("fit_mixing", "no label has a positive image", "check the target")
    used = Pair(scores.lam, scores.temperature)
    lams = list(dict.fromkeys([used.lam, *lams]))  # the first of equally good ones is taken
    temperatures = list(dict.fromkeys([used.temperature, *(() if scores.patch_logits is None else temperatures)]))
    pairs = [Pair(lam, temperature) for temperature in temperatures for lam in lams]
    means = torch.cat([_measure_lams(scores, lams, temperature) for temperature in temperatures], dim=1)
    best, *unseen = (pairs[column] for column in means.round(decimals=12).argmax(1).tolist())
    mixed = _mix_out_of_fold(scores, best, unseen)
    logits = {"before": scores.remix().get("tde").float(), "fitted": mixed.get("tde").float()}
    drawn = resample_average_precision(logits, scores.target, resamples=resamples, generator=generator)
    table = means[0].reshape(len(temperatures), len(lams))
    return MixingStudy(
        used,
        best,
        tuple(unseen),
        mixed,
        mean_before=drawn.bound_mean("before").value,
        mean_fitted=drawn.bound_mean("fitted").value,
        gain=drawn.bound_mean("fitted", minus="before"),
        lams=tuple(sorted(lams)),
        temperatures=tuple(sorted(temperatures)),
        means=table[np.argsort(temperatures)][:, np.argsort(lams)],
    )


def _measure_lams(scores: Scores, lams: Sequence[float], temperature: float) -> Tensor:
    """The mAP (1 + FOLDS, G) of lams at a temperature, on all images and then without each fold."""
    image, pooled = (scores.remix(temperature=temperature).get(kind).float().T for kind in ("image", "patch"))
    folds = draw_folds(len(scores))
    counts = torch.cat([torch.ones_like(folds[:1]), ~folds]).T.float()
    found = [
        torch.stack([Ranking.make(p + lam * q, truth).measure(counts, "step") for lam in lams], dim=1)
        for p, q, truth in zip(image, pooled, scores.target.T.contiguous(), strict=True)
        if (truth == 1).any()
    ]
    return torch.stack(found).nanmean(0)


def _mix_out_of_fold(scores: Scores, whole: Pair, unseen: Sequence[Pair]) -> Scores:
    """Scores mixed anew, with TDE logits whose order owes nothing to an image's own fold.

    Folds may find other pairs, whose logits have other scales. So an image takes the place (its rank among all) that
    the pair of its fold gives it, and there the logit that the pair `whole` has; targets have no part in that.
    """
    mixed = scores.remix(**whole._asdict())
    ranked = mixed.get("tde").sort(dim=0).values
    logits = torch.empty_like(ranked)
    for pair, inside in zip(unseen, draw_folds(len(scores)), strict=True):
        values = scores.remix(**pair._asdict()).get("tde").T
        logits[inside] = ranked.gather(0, count_below(values[:, inside], values).T)
    return replace(mixed, logits={**mixed.logits, "tde": logits})


def count_below(values: Tensor, among: Tensor) -> Tensor:
    """How many of the numbers `among` (L,N) are below each of the values (L,M), row by row.

    >>> count_below(torch.tensor([[0.5, 0.2]]), torch.tensor([[0.5, 0.1, 0.5]])).tolist()
    [[1, 1]]
    """
    ordered = torch.from_numpy(np.sort(among.contiguous().numpy()))  # torch would sort indices along, slower
    return torch.searchsorted(ordered, values.contiguous())
