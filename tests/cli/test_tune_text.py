"""The line about effort."""

import pytest

from pivotpatch.cli.tune_text import tell_effort
from pivotpatch.tuning.effort import EffortCurve, EffortPoint


def make_curve(*means: float, closer: bool) -> EffortCurve:
    points = (EffortPoint(place / 2, place / 2, 1 + 2 * place, mean) for place, mean in enumerate(means))
    return EffortCurve(tuple(points), closer=closer)


@pytest.mark.parametrize(
    ("means", "closer", "line"),
    [
        (
            (0.6, 0.65, 0.7),
            True,
            "1.00 keeps 90 % of the patches' gain (+10.00 mAP) at 5.00 passes over an image instead of 5.00",
        ),
        (
            (0.6, 0.7, 0.7),
            False,
            "0.50 keeps 90 % of the patches' gain (+10.00 mAP) at 3.00 passes over an image instead of 5.00",
        ),
        ((0.6, 0.7, 0.5), False, "the patches gain nothing (-10.00 mAP), so that 0 does as well as 1"),
        ((0.6, 0.5, 0.5), True, "the patches gain nothing (-10.00 mAP), so that 0 does as well as 1"),
        (
            (0.6, 0.7, 0.5),
            True,
            "the patches gain nothing (-10.00 mAP), closer looks at most +10.00 mAP, at effort 0.50 and 3.00 passes",
        ),
    ],
)
def test_the_cheapest_that_keeps_most_is_told(means: tuple[float, ...], closer: bool, line: str) -> None:
    assert tell_effort(make_curve(*means, closer=closer)) == line
