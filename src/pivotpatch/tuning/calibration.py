"""Calibration fitted on validation logits, out of fold too, and how far probabilities are from the truth."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from pivotpatch.core.bootstrap import wilson_interval
from pivotpatch.core.metrics import check_scores
from pivotpatch.core.policies import check_probabilities
from pivotpatch.errors import InputError, check_known
from pivotpatch.runtime.values import Calibration

FOLDS = 5
BINS = 15  # of equal width, for expected calibration errors
Method = Literal["none", "temperature", "platt", "platt_per_label"]
METHODS: tuple[Method, ...] = get_args(Method)
_RIDGE = 1e-3  # in units of one image: keeps a fit of scores without a mistake finite and changes nothing else
_PINNED = 1e30  # strength of a prior that nothing moves
_STEPS = 100
_HIGHEST_TEMPERATURE = 100.0


def draw_folds(count: int) -> Tensor:
    """Which of `count` images (FOLDS,N) are in each fold; always the same, so that a fit can be repeated.

    >>> sorted(draw_folds(7).sum(1).tolist())
    [1, 1, 1, 2, 2]
    """
    if count < FOLDS:
        raise InputError("folds", f"there are {count} images", f"give {FOLDS} or more; hundreds are usual")
    fold = (torch.arange(count) % FOLDS)[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
    return fold == torch.arange(FOLDS)[:, None]


def fit_calibration(logits: Tensor, target: Tensor, *, kind: str, method: Method = "platt_per_label") -> Calibration:
    """Fit probabilities to validation data, by least log loss.

    "none" leaves them as they are; "temperature" divides all logits by one number, at most 100; "platt" gives all
    labels one slope and one offset; "platt_per_label" gives each label its own, with a normal prior around those of
    "platt". The variance of the prior is what the labels' own slopes differ by beyond chance (empirical Bayes), where
    chance is the variance that each fit knows of itself; the same for the offsets.

    A temperature never reverses a ranking. It has no offset, so that where most logits have the wrong sign, as after
    a loss that makes all of them too high, 100 is taken: probabilities near 0.5. With "platt" a slope below 0 says
    that a label's scores are worse than a guess. The loss is convex and solved by Newton's method, so that the same
    data always give the same numbers.

    Args:
        logits: (N,L), of a model's scale: those of "tde" in the normalised form, (p + lam q) / (1 + lam).
        target: (N,L), 1 present, 0 absent, NaN unknown.
        kind: of the logits: "image", "patch" or "tde".
        method: see above.
    """
    check_known(method, METHODS, where="calibration", what="method")
    if method == "none":
        return Calibration(kind, method, (1.0,) * logits.shape[1], (0.0,) * logits.shape[1])
    target, _ = check_scores(logits, target, labels=None, where="calibration")
    if not ((target == 1).any() and (target == 0).any()):
        raise InputError("calibration", "there is no positive or no negative image", "check the target")
    logits, target = logits.detach().double(), target.double()
    start = torch.tensor([[1.0], [0.0]], dtype=torch.float64, device=logits.device)
    prior = torch.full_like(start, _RIDGE)
    if method == "temperature":
        prior[1] = _PINNED
    fitted, _ = minimise_log_loss(logits.reshape(-1, 1), target.reshape(-1, 1), centre=start, strength=prior)
    if method == "temperature":
        # The loss is convex in this one number, so that within a bound it is least at the nearest to its minimum.
        fitted = torch.stack([fitted[0].clamp(min=1 / _HIGHEST_TEMPERATURE), start[1]])
    if method == "platt_per_label":
        fitted, _ = minimise_log_loss(logits, target, centre=fitted, strength=_prior_strength(logits, target, fitted))
    slope, offset = fitted.expand(2, logits.shape[1]).tolist()
    return Calibration(kind, method, tuple(slope), tuple(offset))


def calibrate_out_of_fold(logits: Tensor, target: Tensor, *, method: Method = "platt_per_label") -> Tensor:
    """Calibrated probabilities (N,L), each fitted without the fold that its image is in.

    They say honestly what a calibration is worth where no other data are left to judge it by. Arguments are those of
    `fit_calibration`.
    """
    probs = torch.empty_like(logits, dtype=torch.promote_types(logits.dtype, torch.float32))
    for inside in draw_folds(len(logits)):
        fitted = fit_calibration(logits[~inside], target[~inside], kind="tde", method=method)
        probs[inside] = fitted.apply(logits[inside])
    return probs


def minimise_log_loss(logits: Tensor, target: Tensor, *, centre: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and offset of each label by Newton's method, from logits (N,L) and target (N,L), NaN unknown.

    A normal prior has its `centre` (2,1) where the search begins, and a `strength` (2,1), one over its variance.
    Returns slopes and offsets (2,L), and the curvature (L,2,2) of the loss there.
    """
    known, truth = ~torch.isnan(target), target.nan_to_num()

    def loss(values: Tensor) -> Tensor:
        moved = values[0] * logits + values[1]
        return ((F.softplus(moved) - truth * moved) * known).sum(0) + (strength * (values - centre).square() / 2).sum(0)

    values = centre.expand(2, logits.shape[1]).clone()
    current = loss(values)
    for _ in range(_STEPS):
        probs = torch.sigmoid(values[0] * logits + values[1])
        error, spread = (probs - truth) * known, probs * (1 - probs) * known
        gradient = torch.stack([(error * logits).sum(0), error.sum(0)]) + strength * (values - centre)
        mixed = (spread * logits).sum(0)
        rows = torch.stack([(spread * logits**2).sum(0), mixed, mixed, spread.sum(0)], dim=1).reshape(-1, 2, 2)
        curvature = rows + torch.diag(strength[:, 0])
        step = torch.linalg.solve(curvature, gradient.T).T
        size, tried = torch.ones_like(current), loss(values - step)
        bound = current + 1e-12 * current.abs()  # what rounding may add at the minimum
        while ((worse := tried > bound) & (size > 1e-9)).any():
            size = torch.where(worse, size / 2, size)
            tried = loss(values - size * step)
        step = torch.where(worse, 0.0, size) * step
        values, current = values - step, torch.where(worse, current, tried)
        if step.abs().amax() < 1e-10:
            break
    return values, curvature


def _prior_strength(logits: Tensor, target: Tensor, centre: Tensor) -> Tensor:
    """One over the variance (2,1) of the labels' true slopes and offsets around the common ones (2,1).

    A label's own fit has variance v by chance. With weights 1 / v the squared distances from the centre then sum to
    (number of labels) + (true variance) * (sum of weights) on average, which is solved for the true variance.
    """
    alone, curvature = minimise_log_loss(logits, target, centre=centre, strength=torch.full_like(centre, _RIDGE))
    chance = torch.linalg.inv(curvature).diagonal(dim1=1, dim2=2).T
    distance = ((alone - centre) ** 2 / chance).sum(1, keepdim=True)
    variance: Tensor = (distance - logits.shape[1]) / (1 / chance).sum(1, keepdim=True)
    return variance.clamp(min=1e-6).reciprocal()


class Reliability(NamedTuple):
    """Mean probability and share of positives in bins that hold a decision, rising; each (K,).

    `low` and `high` are the ends of the share's 95 % interval (Wilson), `counts` the decisions in a bin.
    """

    mean_prob: Tensor
    share: Tensor
    low: Tensor
    high: Tensor
    counts: Tensor

    @property
    def ece(self) -> float:
        """Expected calibration error: the mean distance of share and probability, over decisions."""
        return ((self.share - self.mean_prob).abs() * self.counts).sum().item() / self.counts.sum().item()


def reliability(probs: Tensor, target: Tensor) -> Reliability:
    """The data of a reliability diagram in bins of equal width, over all decisions that are known.

    Args:
        probs: of any shape, in [0,1].
        target: of the same shape, 1 present, 0 absent, NaN unknown.
    """
    check_probabilities(probs, "reliability")
    known = ~torch.isnan(target)
    said, truth = probs.detach()[known].double(), target[known].double()
    place = (said * BINS).long().clamp(max=BINS - 1)
    count, expected, came = (torch.bincount(place, weights, BINS) for weights in (None, said, truth))
    filled = count > 0
    count, expected, came = count[filled], expected[filled], came[filled]
    share = came / count
    return Reliability(expected / count, share, *wilson_interval(share, count), count)


@dataclass(frozen=True)
class CalibrationQuality:
    """How far probabilities are from the truth; 0 is best.

    Even perfect probabilities have an expected calibration error above 0, by chance, and labels with few images the
    most: compare before and after.
    """

    ece: float  # the expected calibration error, over all decisions
    ece_per_label: float  # the mean of that of each label of which anything is known
    brier: float
    log_loss: float


def judge_calibration(probs: Tensor, target: Tensor) -> CalibrationQuality:
    """Expected calibration error, Brier score and log loss.

    Args:
        probs: (N,L) in [0,1].
        target: (N,L), 1 present, 0 absent, NaN unknown.
    """
    target, _ = check_scores(probs, target, labels=None, where="judge_calibration")
    known = ~torch.isnan(target)
    if not known.any():
        raise InputError("judge_calibration", "no label is known", "check the target")
    columns = zip(probs.T, target.T, strict=True)
    labels = [reliability(said, truth).ece for said, truth in columns if not truth.isnan().all()]
    said, truth = probs.detach()[known].double(), target[known].double()
    eps = torch.finfo(probs.dtype).eps  # of a sure mistake, whose log loss would be infinite
    return CalibrationQuality(
        ece=reliability(probs, target).ece,
        ece_per_label=sum(labels) / len(labels),
        brier=F.mse_loss(said, truth).item(),
        log_loss=F.binary_cross_entropy(said.clamp(eps, 1 - eps), truth).item(),
    )
