"""A model beside a baseline, pair by pair: the paper's sorted curves, and DeT beside InT."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pivotpatch.audit.cooccurrence import PairRates
from pivotpatch.errors import InputError


@dataclass(frozen=True, eq=False)
class Curve:
    """One rate of all pairs that have it, of a model beside a baseline, sorted by the baseline.

    Attributes:
        pairs: (K,) positions of the pairs, by rising rate of the baseline.
        baseline: (K,) the baseline's rates.
        model: (K,) the model's rates of the same pairs.
        improved: pairs whose rate is better in the model: a lower FPR, a higher TPR.
        worse: pairs whose rate is worse.
        tied: pairs whose rates are equal.
        undefined: pairs that no picture tells this rate of; they are in no other count.
    """

    pairs: Tensor
    baseline: Tensor
    model: Tensor
    improved: int
    worse: int
    tied: int
    undefined: int

    @property
    def share_improved(self) -> float:
        """Part of the K pairs that improved; a tie is no improvement. NaN where there is no pair."""
        return self.improved / len(self.pairs) if len(self.pairs) else float("nan")

    def to_dict(self) -> dict[str, object]:
        """The counts in plain types, for JSON."""
        names = ("improved", "worse", "tied", "undefined")
        share = self.share_improved if len(self.pairs) else None
        return {"share_improved": share} | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, eq=False)
class PairComparison:
    """A model beside a baseline on the same pictures, pair by pair.

    Attributes:
        model: rates of the model.
        baseline: rates of the baseline, of the same pairs.
        cfpr: the conditional FPR as curves.
        ctpr: the conditional TPR as curves.
    """

    model: PairRates
    baseline: PairRates
    cfpr: Curve
    ctpr: Curve

    def to_dict(self) -> dict[str, object]:
        """All of it in plain types, for JSON."""
        return {name: getattr(self, name).to_dict() for name in ("cfpr", "ctpr", "model", "baseline")}


def compare_pairs(model: PairRates, baseline: PairRates) -> PairComparison:
    """Set the pairs of a model beside those of a baseline, such as PAT-T beside ASL, or DeT beside InT."""
    for what in ("label", "company", "tpr_counts", "fpr_counts"):
        if model.labels != baseline.labels or not torch.equal(getattr(model, what), getattr(baseline, what)):
            wrong = "the two models were not judged on the same pictures, labels and pairs"
            raise InputError("compare_pairs", wrong, "score the same data with both and take the same pairs")
    return PairComparison(
        model,
        baseline,
        cfpr=_make_curve(model.fpr, baseline.fpr, lower_is_better=True),
        ctpr=_make_curve(model.tpr, baseline.tpr, lower_is_better=False),
    )


def _make_curve(model: Tensor, baseline: Tensor, *, lower_is_better: bool) -> Curve:
    """The curve of rates (M,), NaN for pairs that have none."""
    known = ~torch.isnan(baseline)
    (pairs,) = known.nonzero(as_tuple=True)
    pairs = pairs[baseline[pairs].argsort(stable=True)]
    model, baseline = model[pairs], baseline[pairs]
    better, worse = (model < baseline, model > baseline) if lower_is_better else (model > baseline, model < baseline)
    return Curve(
        pairs,
        baseline=baseline,
        model=model,
        improved=int(better.sum()),
        worse=int(worse.sum()),
        tied=int((model == baseline).sum()),
        undefined=int((~known).sum()),
    )
