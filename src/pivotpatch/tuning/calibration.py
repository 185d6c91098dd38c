"""Calibration fitted on validation logits, and how far probabilities are from the truth."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from pivotpatch.core.calibration import Calibration
from pivotpatch.core.metrics import check_scores
from pivotpatch.core.policies import check_probabilities
from pivotpatch.errors import InputError, choose_one_of
from pivotpatch.tuning.folds import FOLDS, draw_folds

Method = Literal["temperature", "platt", "platt_per_label"]
METHODS: tuple[Method, ...] = get_args(Method)
_RIDGE = 1e-3  # in units of one image: keeps a fit of scores without a mistake finite and changes nothing else
_STEPS = 100
_HIGHEST_TEMPERATURE = 100.0
_Z = 1.959964  # two-sided 95 % of the normal distribution


def fit_calibration(logits: Tensor, target: Tensor, *, kind: str, method: Method = "platt_per_label") -> Calibration:
    """Fit probabilities to validation data, by least log loss.

    "temperature" divides all logits by one number, at most 100; "platt" gives all labels one slope and one offset;
    "platt_per_label" gives each label its own, with a normal prior around those of "platt". The variance of the prior
    is what the labels' own slopes differ by beyond chance (empirical Bayes), where chance is the variance that each
    fit knows of itself; the same for the offsets.

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
    if method not in METHODS:
        raise InputError("calibration", f"unknown method {method!r}", choose_one_of(method, METHODS))
    target, _ = check_scores(logits, target, labels=None, where="calibration")
    if not ((target == 1).any() and (target == 0).any()):
        raise InputError("calibration", "there is no positive or no negative image", "check the target")
    logits, target = logits.detach().double(), target.double()
    start = torch.tensor([[1.0], [0.0]], dtype=torch.float64, device=logits.device)
    weak = torch.full_like(start, _RIDGE)
    pooled = logits.reshape(-1, 1), target.reshape(-1, 1)
    fitted = _minimise(*pooled, centre=start, strength=weak, offset=method != "temperature").values
    if method == "temperature":
        # The loss is convex in this one number, so that within a bound it is least at the nearest to its minimum.
        fitted[0].clamp_(min=1 / _HIGHEST_TEMPERATURE)
    if method == "platt_per_label":
        fitted = _minimise(logits, target, centre=fitted, strength=_prior_strength(logits, target, fitted)).values
    slope, offset = fitted.expand(2, logits.shape[1]).tolist()
    return Calibration(kind, method, tuple(slope), tuple(offset))


def calibrate_out_of_fold(
    logits: Tensor,
    target: Tensor,
    *,
    method: Method = "platt_per_label",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Calibrated probabilities (N,L), each fitted without the fold that its image is in.

    They say honestly what a calibration is worth where no other data are left to judge it by. Arguments are those of
    `fit_calibration` and `draw_folds`.
    """
    fold = draw_folds(len(logits), generator=generator).to(logits.device)
    probs = torch.empty_like(logits, dtype=torch.promote_types(logits.dtype, torch.float32))
    for number in range(FOLDS):
        inside = fold == number
        fitted = fit_calibration(logits[~inside], target[~inside], kind="", method=method)
        probs[inside] = fitted.apply(logits[inside])
    return probs


class _Fit(NamedTuple):
    """Slopes and offsets (2,L), and the curvature (2,2,L) of the loss there."""

    values: Tensor
    curvature: Tensor


def _minimise(logits: Tensor, target: Tensor, *, centre: Tensor, strength: Tensor, offset: bool = True) -> _Fit:
    """Slope and offset of each label by Newton's method, all labels at once.

    Args:
        logits: (N,L).
        target: (N,L), NaN unknown.
        centre: (2,1) where the prior is, and where the search begins.
        strength: (2,1) of the prior, one over its variance.
        offset: False leaves the offset where it is.
    """
    known = ~torch.isnan(target)
    truth = target.nan_to_num()

    def loss(values: Tensor) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(values[0] * logits + values[1], truth, reduction="none")
        prior = strength * (values - centre).square() / 2
        return (losses * known).sum(0) + prior.sum(0)

    values = centre.expand(2, logits.shape[1]).clone()
    current = loss(values)
    for _ in range(_STEPS):
        probs = torch.sigmoid(values[0] * logits + values[1])
        error, spread = (probs - truth) * known, probs * (1 - probs) * known
        gradient = torch.stack([(error * logits).sum(0), error.sum(0)]) + strength * (values - centre)
        mixed = (spread * logits).sum(0)
        curvature = torch.stack([(spread * logits**2).sum(0), mixed, mixed, spread.sum(0)]).reshape(2, 2, -1)
        curvature = curvature + torch.diag(strength[:, 0])[..., None]
        if not offset:
            gradient[1], curvature[0, 1], curvature[1, 0] = 0, 0, 0
        step = torch.linalg.solve(curvature.permute(2, 0, 1), gradient.T).T
        size = torch.ones_like(current)
        bound = current + 1e-12 * current.abs()  # what rounding may add at the minimum
        while ((worse := (loss(values - size * step) > bound)) & (size > 1e-9)).any():
            size = torch.where(worse, size / 2, size)
        size = torch.where(worse, 0.0, size)
        values = values - size * step
        current = loss(values)
        if (size * step).abs().amax() < 1e-10:
            break
    return _Fit(values, curvature)


def _prior_strength(logits: Tensor, target: Tensor, centre: Tensor) -> Tensor:
    """One over the variance (2,1) of the labels' true slopes and offsets around the common ones (2,1).

    A label's own fit has variance v by chance. With weights 1 / v the squared distances from the centre then sum to
    (number of labels) + (true variance) * (sum of weights) on average, which is solved for the true variance.
    """
    alone = _minimise(logits, target, centre=centre, strength=torch.full_like(centre, _RIDGE))
    chance = torch.linalg.inv(alone.curvature.permute(2, 0, 1)).diagonal(dim1=1, dim2=2).T
    distance = ((alone.values - centre) ** 2 / chance).sum(1, keepdim=True)
    variance: Tensor = (distance - logits.shape[1]) / (1 / chance).sum(1, keepdim=True)
    return variance.clamp(min=1e-6).reciprocal()


class Reliability(NamedTuple):
    """Mean probability and share of positives in bins that hold a decision; each (K,), rising.

    Attributes:
        mean_prob: mean probability in a bin.
        share: share of positives among its decisions.
        low: lower end of the 95 % interval of the share (Wilson).
        high: its upper end.
        counts: decisions in the bin.
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


def reliability(probs: Tensor, target: Tensor, *, bins: int = 15) -> Reliability:
    """The data of a reliability diagram in bins of equal width, over all decisions that are known.

    Args:
        probs: of any shape, in [0,1].
        target: of the same shape, 1 present, 0 absent, NaN unknown.
        bins: how many.
    """
    check_probabilities(probs, "reliability")
    known = ~torch.isnan(target)
    return _bin(probs.detach()[known].double(), target[known].double(), bins=bins, by="width")


def _bin(probs: Tensor, truth: Tensor, *, bins: int, by: Literal["width", "mass"]) -> Reliability:
    """Bins of probabilities (M,) whose truth (M,) is known, of equal width or with equal numbers of decisions."""
    if by == "width":
        place = (probs * bins).long().clamp(max=bins - 1)
    else:  # equal probabilities share a bin
        place = torch.searchsorted(probs.sort().values, probs) * bins // len(probs)
    count, said, came = (torch.bincount(place, weights, bins) for weights in (None, probs, truth))
    filled = count > 0
    count, said, came = count[filled], said[filled], came[filled]
    share = came / count
    middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z * (share * (1 - share) / count + _Z**2 / (4 * count**2)).sqrt() / (1 + _Z**2 / count)
    return Reliability(said / count, share, middle - half, middle + half, count)


@dataclass(frozen=True)
class Faults:
    """How far probabilities are from the truth; 0 is best.

    Attributes:
        ece_width: expected calibration error in bins of equal width.
        ece_mass: the same in bins of equal numbers of decisions.
        brier: mean squared distance from the target.
        log_loss: mean negative logarithm of the probability of what is true.
    """

    ece_width: float
    ece_mass: float
    brier: float
    log_loss: float


@dataclass(frozen=True)
class CalibrationQuality:
    """Faults of probabilities, overall and per label.

    Even perfect probabilities have an expected calibration error above 0, by chance, and labels with few images the
    most: compare before and after, not one label with another.

    Attributes:
        bins: of both kinds of expected calibration error.
        overall: over all decisions as one.
        mean: mean over the labels.
        labels: names of the L labels.
        per_label: L; None where nothing is known of a label.
    """

    bins: int
    overall: Faults
    mean: Faults
    labels: tuple[str, ...]
    per_label: tuple[Faults | None, ...]


def judge_calibration(
    probs: Tensor, target: Tensor, *, bins: int = 15, labels: Sequence[str] | None = None
) -> CalibrationQuality:
    """Expected calibration error, Brier score and log loss.

    Args:
        probs: (N,L) in [0,1].
        target: (N,L), 1 present, 0 absent, NaN unknown.
        bins: of the expected calibration error.
        labels: names of the L labels.
    """
    target, names = check_scores(probs, target, labels=labels, where="judge_calibration")
    check_probabilities(probs, "judge_calibration")
    eps = torch.finfo(probs.dtype).eps
    probs, target = probs.detach().double(), target.double()
    overall = _judge(probs.flatten(), target.flatten(), bins=bins, eps=eps)
    if overall is None:
        raise InputError("judge_calibration", "no label is known", "check the target")
    per_label = [_judge(*column, bins=bins, eps=eps) for column in zip(probs.T, target.T, strict=True)]
    judged = torch.tensor([astuple(faults) for faults in per_label if faults is not None], dtype=torch.float64)
    return CalibrationQuality(bins, overall, Faults(*judged.mean(0).tolist()), names, tuple(per_label))


def _judge(probs: Tensor, target: Tensor, *, bins: int, eps: float) -> Faults | None:
    """Faults of probabilities (M,); for the log loss, which would be infinite, a sure mistake has probability `eps`."""
    known = ~torch.isnan(target)
    if not known.any():
        return None
    probs, truth = probs[known], target[known]
    return Faults(
        ece_width=_bin(probs, truth, bins=bins, by="width").ece,
        ece_mass=_bin(probs, truth, bins=bins, by="mass").ece,
        brier=F.mse_loss(probs, truth).item(),
        log_loss=F.binary_cross_entropy(probs.clamp(eps, 1 - eps), truth).item(),
    )
