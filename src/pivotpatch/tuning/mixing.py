"""Lam and temperature fitted on validation scores: which mixture of image and patches ranks pictures best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from pivotpatch.core.counterfactual import check_lam, check_temperature
from pivotpatch.core.metrics import average_precision, check_scores
from pivotpatch.errors import InputError
from pivotpatch.inference.scores import Scores
from pivotpatch.tuning.folds import draw_folds

LAMS = (0.0, *(2 ** (half / 2) for half in range(-6, 9)))
"""The lams that are tried: 0 and half powers of two from 1/8 to 16."""
TEMPERATURES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The temperatures that are tried."""


class Pair(NamedTuple):
    """Lam and temperature: numbers, or (L,)."""

    lam: float | Tensor
    temperature: float | Tensor


class Unseen(NamedTuple):
    """What was fitted without each fold: a pair a fold, and the fold (N,) that each picture is in."""

    pairs: tuple[Pair, ...]
    fold: Tensor


@dataclass(frozen=True, eq=False)
class Mixture:
    """One way to mix image and patches.

    Attributes:
        name: "as scored", "shared" or "per label".
        lam: a number, or (L,).
        temperature: likewise.
        logits: (N,L) normalised TDE logits; where the mixture was fitted, each picture's owe nothing to its own target.
        mean: mAP of these logits (step-wise AP).
        unseen: the fits that these logits come from; None where nothing was fitted.
    """

    name: str
    lam: float | Tensor
    temperature: float | Tensor
    logits: Tensor
    mean: float
    unseen: Unseen | None = None

    def mix(self, scores: Scores) -> Tensor:
        """The same as `logits` (N,L), of other scores of the same pictures."""
        return _mix_out_of_fold(scores, Pair(self.lam, self.temperature), self.unseen)


@dataclass(frozen=True, eq=False)
class MixingStudy:
    """What lam and temperature are worth.

    Attributes:
        before: the mixture that the pictures were scored with.
        shared: one lam and one temperature for all labels.
        per_label: a pair for each label.
        lams: G numbers that were tried, rising.
        temperatures: T numbers that were tried, rising.
        means: (T,G) mAP of each pair on all pictures.
        weight: (L,) in [0,1], how much each label's own curve counts in `per_label`.
    """

    before: Mixture
    shared: Mixture
    per_label: Mixture
    lams: tuple[float, ...]
    temperatures: tuple[float, ...]
    means: Tensor
    weight: Tensor


def fit_mixing(
    scores: Scores,
    *,
    lams: Sequence[float] = LAMS,
    temperatures: Sequence[float] = TEMPERATURES,
    folds: int = 5,
    generator: torch.Generator | None = None,
) -> MixingStudy:
    """Fit lam and temperature by mAP, without another pass through the network.

    The shared pair is the one of highest mAP among all that are tried; what was scored with wins ties.

    A label's own pair would follow the noise of its few positives, so that its curve (AP against the pairs, less its
    mean) is shrunk towards the mean curve of all labels, and its best pair is read from the result. Its weight is
    S / (S + noise / positives), empirical Bayes: `noise` is what the curves' distance from the mean curve owes to
    chance, measured by leaving out one fold at a time (jackknife) and taken to fall with the number of positives; S is
    the rest of that distance's square, averaged over labels. Where labels differ by chance only, S is 0 and all get
    the shared pair.

    Everything is fitted again without each fold, and the logits of the study's mixtures come from those fits: they can
    be compared with `before` on the same pictures, picture by picture, as if the pictures were new.

    Args:
        scores: with image and patch logits; where patches were not kept, the temperature stays as it was.
        lams: to try.
        temperatures: to try.
        folds: into which pictures are parted, 3 or more.
        generator: draws the folds; by default one of seed 0.
    """
    if folds < 3:
        raise InputError("fit_mixing", f"folds is {folds!r}", "give 3 or more")
    target = _check(scores)
    grid = _make_grid(scores, lams, temperatures)
    fold = draw_folds(len(scores), folds=folds, generator=generator)
    tables = _tabulate(grid, target, fold)
    whole = _fit(tables, left_out=frozenset())
    again = [_fit(tables, left_out=frozenset([number])) for number in range(folds)]
    shared = Unseen(tuple(grid.pair(found.shared) for found in again), fold)
    own = Unseen(tuple(grid.pair(found.own) for found in again), fold)
    before = scores.remix().scaled("tde").float()
    by_lam, by_temperature = torch.tensor(grid.lams).argsort(), torch.tensor(grid.temperatures).argsort()
    return MixingStudy(
        Mixture("as scored", scores.lam, scores.temperature, before, average_precision(before, target).mean),
        _judge("shared", scores, grid.pair(whole.shared), shared),
        _judge("per label", scores, grid.pair(whole.own), own),
        tuple(sorted(grid.lams)),
        tuple(sorted(grid.temperatures)),
        whole.means.reshape(len(by_temperature), -1)[by_temperature][:, by_lam],
        whole.weight,
    )


def choose_mixture(study: MixingStudy, low_end: Callable[[Tensor, Tensor], float]) -> Mixture:
    """The plainest mixture that no other beats beyond noise: as scored, else shared, else per label.

    Args:
        study: from `fit_mixing`.
        low_end: given logits (N,L) and those that they are to beat, the lower end of the interval of the gain in mAP,
            for example of a paired bootstrap over pictures.
    """
    chosen = study.before
    for richer in (study.shared, study.per_label):
        if low_end(richer.logits, chosen.logits) > 0:
            chosen = richer
    return chosen


def _check(scores: Scores) -> Tensor:
    """The target (N,L) as floats."""
    image, pooled = scores.get("image"), scores.get("patch")
    target, _ = check_scores(image, scores.target, labels=scores.labels, where="fit_mixing")
    if not (torch.isfinite(image).all() and torch.isfinite(pooled).all()):
        raise InputError("fit_mixing", "a logit is not finite", "find where the model made it")
    if scores.patch_logits is None and isinstance(scores.temperature, Tensor):
        wrong = "temperatures are one a label and the patches were not kept"
        raise InputError("fit_mixing", wrong, "score the pictures again with their patches")
    return target


class _Grid(NamedTuple):
    """Pairs to try, C = T * G of them, temperature by temperature: image logits (N,L), pooled logits (T,N,L)."""

    image: Tensor
    pooled: Tensor
    lams: tuple[float, ...]
    temperatures: tuple[float, ...]

    def pair(self, chosen: Tensor) -> Pair:
        """The pair whose number is `chosen`, or those whose numbers are (L,)."""
        lams, temperatures = chosen % len(self.lams), chosen // len(self.lams)
        if chosen.ndim == 0:
            return Pair(self.lams[int(lams)], self.temperatures[int(temperatures)])
        return Pair(torch.tensor(self.lams)[lams], torch.tensor(self.temperatures)[temperatures])


def _make_grid(scores: Scores, lams: Sequence[float], temperatures: Sequence[float]) -> _Grid:
    """What was scored with comes first, where it is a number: the first of equal ones is chosen."""
    for lam in lams:
        check_lam(lam, "fit_mixing")
    for temperature in temperatures:
        check_temperature(temperature, "fit_mixing")
    used = [() if isinstance(value, Tensor) else (float(value),) for value in (scores.lam, scores.temperature)]
    lams, temperatures = (tuple(dict.fromkeys([*used[0], *lams])), tuple(dict.fromkeys([*used[1], *temperatures])))
    image = scores.get("image").float()
    if scores.patch_logits is None:
        return _Grid(image, scores.get("patch").float()[None], lams, used[1])
    pooled = [scores.mix(lam=1.0, temperature=temperature) - image for temperature in temperatures]
    return _Grid(image, torch.stack(pooled), lams, temperatures)


def _mix_out_of_fold(scores: Scores, whole: Pair, unseen: Unseen | None) -> Tensor:
    """Normalised TDE logits (N,L) whose order owes nothing to a picture's own fold.

    Folds may find other pairs, whose logits have other scales. So a picture takes the place (its rank among all) that
    the pair of its fold gives it, and there the logit that the pair `whole` has; targets have no part in that.
    """
    mixed = _mix(scores, whole)
    if unseen is None:
        return mixed
    ranked, logits = _sort(mixed.T), torch.empty_like(mixed)
    for number, pair in enumerate(unseen.pairs):
        again, rows = _mix(scores, pair).T, unseen.fold == number
        places = torch.searchsorted(_sort(again), again[:, rows].contiguous())
        logits[rows] = ranked.gather(1, places).T
    return logits


def _mix(scores: Scores, pair: Pair) -> Tensor:
    """Normalised TDE logits (N,L); the temperature is as it was where patches were not kept."""
    mixed = scores.remix(lam=pair.lam, temperature=None if scores.patch_logits is None else pair.temperature)
    return mixed.scaled("tde").float()


class _Tables(NamedTuple):
    """AP (S,C,L) of all pairs without S sets of folds, and positives (S,L) that are left."""

    precision: Tensor
    positives: Tensor
    left_out: tuple[frozenset[int], ...]


def _tabulate(grid: _Grid, target: Tensor, fold: Tensor) -> _Tables:
    """AP on all pictures, without each fold, and without each pair of folds, from one sort a fold.

    How many pictures of each fold score at least as much as a positive is counted once; sums over folds then
    give its precision in any set of them.
    """
    folds = int(fold.max()) + 1
    left_out = tuple(frozenset(some) for count in range(3) for some in combinations(range(folds), count))
    inside = torch.tensor([[float(number not in some) for number in range(folds)] for some in left_out])
    shape = (len(left_out), len(grid.temperatures) * len(grid.lams), target.shape[1])
    precision, positives = torch.full(shape, torch.nan), torch.zeros(shape[0], shape[2])
    lams = torch.tensor(grid.lams)[:, None]
    for label in range(target.shape[1]):
        known = _spread(~torch.isnan(target[:, label]), fold)
        present = target[:, label] == 1
        spread = _spread(present, fold)
        counted = inside[:, fold[present]]  # (S,P)
        positives[:, label] = counted.sum(1)
        for place, pooled in enumerate(grid.pooled):
            mixed = (grid.image[:, label] + lams * pooled[:, label]) / (1 + lams)  # (G,N)
            values = mixed[:, present].contiguous()
            hits, given = (torch.einsum("gkp,sk->sgp", _count(mixed, rows, values), inside) for rows in (spread, known))
            part = slice(place * len(lams), (place + 1) * len(lams))
            precision[:, part, label] = (hits / given.clamp(min=1) * counted[:, None]).sum(2) / counted.sum(
                1, keepdim=True
            )
    return _Tables(precision, positives, left_out)


def _spread(chosen: Tensor, fold: Tensor) -> Tensor:
    """Rows (K,M) of the pictures that are chosen (N,), by fold; -1 fills up."""
    rows = [torch.nonzero(chosen & (fold == number))[:, 0] for number in range(int(fold.max()) + 1)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def _count(mixed: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """How many of the rows (K,M) of scores (G,N) are at least as high as the values (G,P), for each fold (G,K,P)."""
    ranked = _sort(mixed[:, rows].masked_fill(rows < 0, -torch.inf))
    asked = values[:, None].expand(-1, len(rows), -1).contiguous()
    return (rows.shape[1] - torch.searchsorted(ranked, asked)).float()


def _sort(values: Tensor) -> Tensor:
    """Values in rising order along the last dimension; torch would sort indices along, ten times slower."""
    values = values.contiguous().clone()
    values.numpy().sort()
    return values


class _Found(NamedTuple):
    """Numbers of the best pairs, one for all () and each label's own (L,); mAP (C,); weight of own curves (L,)."""

    shared: Tensor
    own: Tensor
    means: Tensor
    weight: Tensor


def _fit(tables: _Tables, *, left_out: frozenset[int]) -> _Found:
    """Fit without some folds; the rule is that of `fit_mixing`."""
    whole = tables.left_out.index(left_out)
    smaller = [i for i, some in enumerate(tables.left_out) if some > left_out and len(some) == len(left_out) + 1]
    table, positives = tables.precision[whole], tables.positives[whole]
    means = table.nanmean(1)
    distance = _leave_mean(table)
    resampled = _leave_mean(tables.precision[smaller])
    chance = (resampled - resampled.mean(0)).square().sum(0).mean(0) * (len(smaller) - 1) / len(smaller)  # (L,)
    known = ~torch.isnan(chance)
    noise = (chance * positives)[known].mean()
    signal = (distance.square().mean(0) - chance)[known].mean().clamp(min=0)
    weight = (signal * positives / (signal * positives + noise)).nan_to_num()  # 0 where no label can tell
    own = means[:, None] + weight * distance.nan_to_num()
    return _Found(means.argmax(), own.argmax(0), means, weight)


def _leave_mean(table: Tensor) -> Tensor:
    """What AP (...,C,L) is besides the mean of its label and the mean curve of all labels."""
    curves = table - table.mean(-2, keepdim=True)
    return curves - curves.nanmean(-1, keepdim=True)


def _judge(name: str, scores: Scores, pair: Pair, unseen: Unseen) -> Mixture:
    logits = _mix_out_of_fold(scores, pair, unseen)
    return Mixture(name, *pair, logits, average_precision(logits, scores.target).mean, unseen)
