"""The model that a report is about: its scores, how it decides, and what else is known of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pivotpatch.core.calibration import Calibration
from pivotpatch.core.policies import Fixed, PerLabel
from pivotpatch.inference.scores import Scores
from pivotpatch.training.plots import LogEntries

_FIXED = Fixed(0.5)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model to report on.

    Attributes:
        name: for headings.
        scores: what it says of the pictures, and what is true.
        policy: how the probabilities to rank by become decisions; those of a fixed threshold are told of all kinds.
        calibration: of these probabilities, where the policy was fitted to calibrated ones.
        facts: what else is known of it, in words, by name.
        log: of its training, where it comes from a run.
        fitted_here: whether what decides may have been fitted on these very pictures, which the report then says.
    """

    name: str
    scores: Scores
    policy: Fixed | PerLabel = _FIXED
    calibration: Calibration | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    log: LogEntries = ()
    fitted_here: bool = False

    @property
    def thresholds(self) -> tuple[float, ...]:
        """L thresholds."""
        policy = self.policy
        return policy.thresholds if isinstance(policy, PerLabel) else (policy.threshold,) * len(self.scores.labels)
