"""What `--policy` may say, for all verbs that decide."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pivotpatch.errors import InputError, choose_one_of

if TYPE_CHECKING:
    from pivotpatch.core.policies import ThresholdPolicy

POLICIES = ("fixed", "top", "prior")


def read_policy(text: str, labels: Sequence[str], *, others: tuple[str, ...] = ()) -> "ThresholdPolicy | None":
    """The policy that a word names.

    Args:
        text: fixed:P, top:K, prior:DATA, or one that the verb has to complete.
        labels: whose shares `prior:DATA` counts, in this order.
        others: names of policies that only this verb knows.

    Returns:
        The policy; None for `prior` alone and for one of `others`.
    """
    from pivotpatch.core.policies import Fixed, PriorMatched, TopK

    name, _, value = text.partition(":")
    if name not in (*POLICIES, *others):
        raise InputError("--policy", f"unknown policy {name!r}", choose_one_of(name, (*POLICIES, *others)))
    try:
        if name == "fixed":
            return Fixed(float(value))
        if name == "top":
            return TopK(int(value))
    except InputError:
        raise
    except ValueError:
        raise InputError("--policy", f"{text!r} has no number", "write for example fixed:0.5 or top:3") from None
    if name in others or not value:
        return None
    from pivotpatch.data.address import read_address
    from pivotpatch.training.build import open_aligned

    address = read_address(value)
    if address is None:
        raise InputError("--policy", f"{value!r} is no address nor a table or folder that is there", "check the path")
    return PriorMatched.from_target(open_aligned(address, labels).target())
