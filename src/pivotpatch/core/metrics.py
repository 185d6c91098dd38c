"""Average precision in both published definitions, and precision, recall and F1 under a named policy.

Unknown labels (NaN in the target) are left out. Values are fractions, not per cent.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from typing import Literal, get_args

import torch
from torch import Tensor

from pivotpatch.core.checks import check_shapes
from pivotpatch.core.policies import SWEPT, Fixed, ThresholdPolicy
from pivotpatch.errors import InputError, check_known, shorten

Definition = Literal["step", "envelope"]
DEFINITIONS: dict[str, str] = {
    "step": "step-wise sum over recall (scikit-learn)",
    "envelope": "all points under the monotone precision envelope (VOC 2010)",
}
MEASURES = ("CP", "CR", "CF1", "OP", "OR", "OF1")
"""What the literature's tables print, in their order."""
EmptyRule = Literal["zero", "skip"]
_DEFAULT_POLICY = Fixed(0.5)


@dataclass(frozen=True)
class AveragePrecision:
    """Average precision of each label and their mean."""

    definition: Definition  # "step" or "envelope", see `DEFINITIONS`
    labels: tuple[str, ...]  # names of the L labels
    per_label: tuple[float | None, ...]  # L values; None for a label without a positive image
    positives: tuple[int, ...]  # L counts of positive images
    skipped: tuple[str, ...]  # names of the labels without a positive image; they are not in the mean

    @property
    def mean(self) -> float:
        """MAP over the labels that are not skipped."""
        values = [value for value in self.per_label if value is not None]
        return sum(values) / len(values)

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        return {"mean": self.mean, **asdict(self)}

    def __str__(self) -> str:
        text = f"mAP {100 * self.mean:.2f} ({DEFINITIONS[self.definition]}; {len(self.labels)} labels"
        return text + (f", without a positive and skipped: {shorten(self.skipped)})" if self.skipped else ")")


@dataclass(frozen=True)
class PrecisionRecall:
    """Precision, recall and F1, per class (C) and overall (O), as the literature writes them.

    CF1 and OF1 are the harmonic means of the two values before them; `macro_f1` is the mean of the
    labels' own F1, which other fields call macro F1.
    """

    definition: str  # the threshold policy in words
    empty: EmptyRule  # "zero" counts the precision of a label that was never given as 0, "skip" leaves it out of CP
    CP: float  # mean precision of the labels
    CR: float  # mean recall of the labels
    CF1: float  # harmonic mean of CP and CR
    OP: float  # precision over all decisions
    OR: float  # recall over all decisions
    OF1: float  # harmonic mean of OP and OR
    macro_f1: float  # mean F1 of the labels
    labels: tuple[str, ...]  # names of the L labels
    # L values; None for a label without a positive image, or never given under "skip".
    precision: tuple[float | None, ...]
    recall: tuple[float | None, ...]  # L values; None for a label without a positive image
    skipped: tuple[str, ...]  # labels without a positive image: in OP and OR, not in CP, CR and `macro_f1`
    never_given: tuple[str, ...]  # labels, among those not skipped, that no image was given

    def __str__(self) -> str:
        values = " ".join(f"{k} {100 * getattr(self, k):.1f}" for k in MEASURES)
        skipped = f"; without a positive and skipped: {shorten(self.skipped)}" if self.skipped else ""
        return f"{values} ({self.definition}; labels never given: {self.empty}{skipped})"


def average_precision(
    scores: Tensor, target: Tensor, *, definition: Definition = "step", labels: Sequence[str] | None = None
) -> AveragePrecision:
    """Average precision of each label.

    Equal scores share one threshold, so the order of the images never matters.

    Args:
        scores: (B,L), higher means more likely; any scale.
        target: (B,L), 1 present, 0 absent, NaN unknown.
        definition: "step" or "envelope", see `DEFINITIONS`; the second is the higher.
        labels: names of the L labels.

    >>> average_precision(torch.tensor([[0.9], [0.8], [0.1]]), torch.tensor([[1.0], [0.0], [1.0]])).mean
    0.8333333333333333
    """
    check_known(definition, DEFINITIONS, where="average_precision", what="definition")
    target, names = check_scores(scores, target, labels=labels, where="average_precision")
    by_label = scores.detach().to(torch.promote_types(scores.dtype, torch.float32)).t().contiguous()
    target = target.t().contiguous()
    all_known = not torch.isnan(target).any()
    values: list[float | None] = []
    positives: list[int] = []
    for label_scores, label_target in zip(by_label, target, strict=True):
        present = _sort(label_scores[label_target == 1])
        known = _sort(label_scores if all_known else label_scores[~torch.isnan(label_target)])
        positives.append(len(present))
        values.append(_average_precision_sorted(present, known, definition) if len(present) else None)
    skipped = tuple(name for name, value in zip(names, values, strict=True) if value is None)
    if len(skipped) == len(names):
        raise InputError("average_precision", "no label has a positive image", "check the target")
    return AveragePrecision(definition, names, tuple(values), tuple(positives), skipped)


def _sort(values: Tensor) -> Tensor:
    """Sort a vector (N,) upwards."""
    if values.is_cuda:
        return values.sort().values
    # torch always sorts indices along; without them NumPy is ten times faster on the same memory.
    values = values.clone()
    values.numpy().sort()
    return values


def _average_precision_sorted(present: Tensor, known: Tensor, definition: Definition) -> float:
    """Average precision from the ascending scores of the positives (P,) and of all images (N,).

    The precision at a positive's score is the share of positives among all that score at least as
    much, and recall rises by 1 / P at each positive: the sum over recall is a mean over positives.
    """
    hits = len(present) - torch.searchsorted(present, present)
    given = len(known) - torch.searchsorted(known, present)
    precision = hits.double() / given
    if definition == "envelope":  # the best precision at this recall or a higher one
        precision = precision.cummax(0).values
    return precision.mean().item()


def precision_recall(
    scores: Tensor,
    target: Tensor,
    *,
    policy: ThresholdPolicy = _DEFAULT_POLICY,
    empty: EmptyRule = "zero",
    labels: Sequence[str] | None = None,
) -> PrecisionRecall:
    """CP, CR, CF1, OP, OR and OF1 of the decisions that a policy makes.

    Args:
        scores: (B,L); probabilities where the policy needs them.
        target: (B,L), 1 present, 0 absent, NaN unknown.
        policy: `Fixed`, `PerLabel`, `PriorMatched` or `TopK`.
        empty: what the precision of a label that is never given counts: "zero" or "skip".
        labels: names of the L labels.

    >>> result = precision_recall(torch.tensor([[0.9, 0.8], [0.1, 0.2]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> result.OP, result.CR, result.definition
    (0.5, 0.5, 'fixed threshold 0.5')
    """
    check_known(empty, get_args(EmptyRule), where="precision_recall", what="rule")
    target, names = check_scores(scores, target, labels=labels, where="precision_recall")
    known = ~torch.isnan(target)
    given = policy.decide(scores.detach(), known=known) & known
    present = target == 1
    hits, gives, presents = (each.sum(0).double().cpu() for each in (given & present, given, present))
    counted, ever_given = presents > 0, gives > 0
    if not counted.any():
        raise InputError("precision_recall", "no label has a positive image", "check the target")
    precision, recall = hits / gives.clamp(min=1), hits / presents.clamp(min=1)
    return PrecisionRecall(
        policy.definition,
        empty,
        **{name: value.item() for name, value in measure_counts(hits, gives, presents, empty=empty).items()},
        macro_f1=(2 * hits / (gives + presents).clamp(min=1))[counted].mean().item(),
        labels=names,
        precision=_known_values(precision, counted if empty == "zero" else counted & ever_given),
        recall=_known_values(recall, counted),
        skipped=tuple(compress(names, ~counted)),
        never_given=tuple(compress(names, counted & ~ever_given)),
    )


def measure_counts(hits: Tensor, gives: Tensor, presents: Tensor, *, empty: EmptyRule = "zero") -> dict[str, Tensor]:
    """CP, CR, CF1, OP, OR and OF1, each (...), of counts (...,L) of images; NaN where no image has a label.

    Args:
        hits: images that have the label and are given it.
        gives: images that are given it.
        presents: images that have it.
        empty: as in `precision_recall`.

    >>> counts = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0])
    >>> measure_counts(*counts)["CP"].item(), measure_counts(*counts, empty="skip")["CP"].item()
    (0.25, 0.5)
    """
    counted, total = presents > 0, hits.sum(-1)
    values = {
        "CP": _mean(hits / gives.clamp(min=1), counted if empty == "zero" else counted & (gives > 0)),
        "CR": _mean(hits / presents.clamp(min=1), counted),
        "OP": total / gives.sum(-1).clamp(min=1),
        "OR": total / presents.sum(-1).clamp(min=1),
    }
    for kind in "CO":
        precision, recall = values[f"{kind}P"], values[f"{kind}R"]
        values[f"{kind}F1"] = (2 * precision * recall / (precision + recall)).nan_to_num(0.0)
    return {name: value.masked_fill(~counted.any(-1), torch.nan) for name, value in values.items()}


def find_best_fixed(probs: Tensor, target: Tensor, *, empty: EmptyRule = "zero") -> Fixed:
    """The fixed threshold of the highest CF1 on these very images; of equal ones the lowest.

    Args:
        probs: (B,L) probabilities.
        target: (B,L), 1 present, 0 absent, NaN unknown.
        empty: as in `precision_recall`.

    >>> find_best_fixed(torch.tensor([[0.9], [0.72], [0.1]]), torch.tensor([[1.0], [0.0], [0.0]])).threshold
    0.75
    """
    found = {each: precision_recall(probs, target, policy=Fixed(each), empty=empty).CF1 for each in SWEPT}
    return Fixed(max(SWEPT, key=found.__getitem__), best=True)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """The mean (...) of those of values (...,L) that are counted; 0 where none is."""
    return (values * counted).sum(-1) / counted.sum(-1).clamp(min=1)


def _known_values(values: Tensor, known: Tensor) -> tuple[float | None, ...]:
    """Values (L,) with None where they are not known."""
    return tuple(v if k else None for v, k in zip(values.tolist(), known.tolist(), strict=True))


def check_scores(
    scores: Tensor, target: Tensor, *, labels: Sequence[str] | None, where: str
) -> tuple[Tensor, tuple[str, ...]]:
    """The target (B,L) as floats on the device of the scores (B,L), and the names of the labels, where they fit.

    >>> check_scores(torch.zeros(1, 2), torch.ones(1, 2), labels=None, where="here")
    (tensor([[1., 1.]]), ('label 0', 'label 1'))
    """
    check_shapes(where, "BL BL", scores=scores, target=target)
    names = tuple(labels) if labels is not None else tuple(f"label {i}" for i in range(scores.shape[1]))
    target = target.to(device=scores.device, dtype=torch.float32)
    broken = torch.isnan(scores).any(0)
    wrong = ~(torch.isnan(target) | (target == 0) | (target == 1))
    if len(scores) == 0:
        raise InputError(where, "there is no image", "give at least one")
    if len(names) != scores.shape[1]:
        raise InputError(where, f"{len(names)} label names for {scores.shape[1]} columns", "give one name a column")
    if broken.any():
        told = f"scores of {shorten(compress(names, broken))} hold NaN"
        raise InputError(where, told, "find where the model made it")
    if wrong.any():
        raise InputError(where, f"target holds {target[wrong][0].item():g}", "write 1, 0, or NaN for unknown")
    return target, names
