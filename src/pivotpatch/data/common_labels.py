"""The labels that a data set has in common with a network or a file of scores."""

from collections.abc import Callable, Sequence

from pivotpatch.data.records import RecordSet
from pivotpatch.errors import InputError, choose_one_of, shorten

Tell = Callable[[str], None]
"""Takes one line about what can be used, but perhaps not as its owner thinks."""
_NAMED = 10  # labels that are judged


def keep_common_labels(records: RecordSet, labels: Sequence[str], *, whose: str, tell: Tell) -> RecordSet:
    """The same pictures with the labels that both know alone, in the order of `labels`.

    Args:
        records: the data set.
        labels: of a network or a file of scores.
        whose: they are, for messages.
        tell: told in one line what is judged and what is left out, where the data set lacks some of `labels`. Labels
            that only the data set has are named there too, and by themselves are nothing to tell of.
    """
    asked, there = set(labels), set(records.labels.names)
    common = [name for name in labels if name in there]
    missing = [name for name in labels if name not in there]
    others = [name for name in records.labels.names if name not in asked]
    if not common:
        wrong = f"{whose} knows none of its labels ({shorten(others)})"
        raise InputError(records.name, wrong, choose_one_of(others[0], labels))
    if missing:
        judged = f"judging {len(common)} of {len(labels)} labels: {shorten(common, limit=_NAMED)}"
        unknown = f"; not known to {whose}: {shorten(others)}" if others else ""
        tell(f"{judged}; not in {records.name}: {shorten(missing)}{unknown}")
    return records if tuple(common) == records.labels.names else records.keep_labels(common)
