"""What a file of scores holds, checked, and matched with what is true of its pictures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pivotpatch.core.errors import InputError, choose_one_of, shorten
from pivotpatch.core.patches import check_overlap
from pivotpatch.data.records import LabelSpace, RecordSet
from pivotpatch.inference.scores import KINDS, Scores

Scale = Literal["auto", "logits", "probs"]
"""What scores of no stated kind are; "auto" takes them for probabilities where all of them are in [0, 1]."""
SCALES: tuple[Scale, ...] = ("auto", "logits", "probs")
UNSTATED = "scores"  # the kind of scores that a file does not tell
# Logits of the probabilities 0 and 1: beyond those of any other that float32 holds near 0, and float64 near 1.
_LOWEST, _HIGHEST = -104.0, 37.0


@dataclass(frozen=True, eq=False)
class ScoreContent:
    """The arrays of a file, as they are; N pictures, L labels, P patches.

    Attributes:
        where: the file, for messages.
        scores: (N,L) by kind: logits of those in `KINDS`, or `UNSTATED`.
        labels: L names, where the file tells them.
        pictures: N names, likewise.
        target: (N,L), 1 present, 0 absent, -1 or NaN unknown, likewise.
        patch_logits: (N,P,L).
        weights: (N,P,L).
        lam: a number or (L,).
        temperature: a number or (L,).
        overlap: of the patches.
    """

    where: str
    scores: Mapping[str, NDArray[Any]]
    labels: tuple[str, ...] | None = None
    pictures: tuple[str, ...] | None = None
    target: NDArray[Any] | None = None
    patch_logits: NDArray[Any] | None = None
    weights: NDArray[Any] | None = None
    lam: float | Tensor = 1.0
    temperature: float | Tensor = 1.0
    overlap: float = 0.0


class Truth(NamedTuple):
    """What is true of pictures, from another place than the file: a name for messages, and the rest as in `Scores`."""

    where: str
    pictures: tuple[str, ...]
    labels: tuple[str, ...]
    target: Tensor
    indices: Tensor | None


def describe_records(records: RecordSet, labels: tuple[str, ...] | None) -> Truth:
    """What a data set says of its pictures; of these labels alone, in this order, where they are told."""
    if labels is not None and labels != records.labels.names:
        records = records.keep_labels(labels)
    names = tuple(records.images.name(records.place(index)) for index in range(len(records)))
    return Truth(records.name, names, records.labels.names, records.target(), torch.arange(len(records)))


def complete(content: ScoreContent, truth: Truth | None, *, scale: Scale) -> Scores:
    """Check what a file holds and make scores of it, in the order of `truth` where that is given."""
    where = content.where
    count, width = _check_shapes(content)
    labels = content.labels or (truth.labels if truth else tuple(f"label {place}" for place in range(width)))
    pictures = content.pictures or (truth.pictures if truth else tuple(f"row {place}" for place in range(count)))
    if len(labels) != width:
        raise InputError(where, f"{len(labels)} labels for {width} columns of scores", "give one a column")
    if len(pictures) != count:
        raise InputError(where, f"{len(pictures)} pictures for {count} rows of scores", "give one a row")
    LabelSpace(labels)
    check_pictures(pictures, where)
    rows = None if truth is None else _match(pictures, truth.pictures, what="pictures", where=where, other=truth.where)
    columns = None if truth is None else _match(labels, truth.labels, what="labels", where=where, other=truth.where)

    def arrange(values: NDArray[Any]) -> Tensor:
        values = values if rows is None else values[rows]
        values = values if columns is None else values[..., columns]
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))  # Arrow's and a reversed array are not

    def arrange_labels(values: float | Tensor) -> float | Tensor:
        return values[columns] if isinstance(values, Tensor) and values.ndim and columns is not None else values

    if truth is None and content.target is None:
        todo = "add columns named target:LABEL (an array 'target' in npz), or name the data set of the pictures"
        raise InputError(where, "it does not say what is true of the pictures", todo)
    logits = {
        "image" if kind == UNSTATED else kind: _read_logits(
            arrange(content.scores[kind]), kind=kind, scale=scale, where=where
        )
        for kind in (UNSTATED, *KINDS)
        if kind in content.scores
    }
    held = Scores(
        labels=labels if truth is None else truth.labels,
        pictures=pictures if truth is None else truth.pictures,
        target=_read_target(content.target, where) if truth is None else truth.target,
        logits=logits,
        patch_logits=None if content.patch_logits is None else arrange(content.patch_logits),
        weights=None if content.weights is None else arrange(content.weights),
        lam=arrange_labels(content.lam),
        temperature=arrange_labels(content.temperature),
        indices=None if truth is None else truth.indices,
        overlap=content.overlap,
    )
    _refuse_unfinite(held, where)
    return held


def check_pictures(pictures: Sequence[str], where: str) -> None:
    """Refuse pictures of the same name, which nothing could tell apart."""
    twice = [name for name, count in Counter(pictures).items() if count > 1]
    if twice:
        raise InputError(where, f"{len(twice)} pictures stand twice ({shorten(twice)})", "give each picture one row")


def _check_shapes(content: ScoreContent) -> tuple[int, int]:
    """Rows and columns of the scores; all arrays must agree in them."""
    where = content.where
    if not content.scores:
        raise InputError(where, "there are no scores", f"give some, of one of the kinds {', '.join(KINDS)} or of none")
    if UNSTATED in content.scores and len(content.scores) > 1:
        raise InputError(where, f"{UNSTATED!r} stand beside {', '.join(KINDS)}", "say of each which kind it is")
    shape = next(iter(content.scores.values())).shape
    if len(shape) != 2 or 0 in shape:
        raise InputError(where, f"scores have shape {shape}", "give one row a picture and one column a label")
    for name, values in {**content.scores, "target": content.target}.items():
        if values is not None and values.shape != shape:
            raise InputError(where, f"{name!r} has shape {values.shape}, the scores {shape}", "give both alike")
    for name, values in (("patch_logits", content.patch_logits), ("weights", content.weights)):
        if values is not None and (values.ndim != 3 or (values.shape[0], values.shape[2]) != shape):
            wanted = f"({shape[0]}, P, {shape[1]})"
            raise InputError(where, f"{name!r} has shape {values.shape}", f"give {wanted}, one row a patch")
    if (content.patch_logits is None) != (content.weights is None):
        raise InputError(where, "'patch_logits' or 'weights' is missing", "give both or neither")
    for name, value in (("lam", content.lam), ("temperature", content.temperature)):
        if isinstance(value, Tensor) and value.shape not in ((), shape[1:]):
            raise InputError(where, f"{name!r} has shape {tuple(value.shape)}", "give a number, or one a label")
    check_overlap(content.overlap, where)
    return shape


def _match(
    names: Sequence[str], wanted: Sequence[str], *, what: str, where: str, other: str
) -> NDArray[np.int64] | None:
    """Where each wanted name stands among names; None where they are the same."""
    if tuple(names) == tuple(wanted):
        return None
    if what == "pictures":
        check_pictures(wanted, other)
    places = {name: place for place, name in enumerate(names)}
    extra = list(places.keys() - set(wanted))
    missing = [name for name in wanted if name not in places]
    if extra:
        extra.sort()
        hint = choose_one_of(extra[0], wanted) if what == "labels" else f"there they are named like {wanted[0]!r}"
        raise InputError(where, f"{len(extra)} {what} are not in {other} ({shorten(extra)})", hint)
    if missing:
        wrong = f"{len(missing)} {what} of {other} have no scores ({shorten(missing)})"
        raise InputError(where, wrong, "score them too, or name a data set without them")
    return np.array([places[name] for name in wanted], dtype=np.int64)


def _read_logits(values: Tensor, *, kind: str, scale: Scale, where: str) -> Tensor:
    """Logits of scores (N,L); those of probabilities in float64, so that their order and their ties stay."""
    values = values if values.dtype in (torch.float32, torch.float64) else values.float()
    if kind != UNSTATED or scale == "logits" or values.isnan().any():
        return values
    low, high = values.aminmax()
    if low < 0 or high > 1:
        if scale == "probs":
            wrong = f"scores from {low.item():.3g} to {high.item():.3g} are no probabilities"
            raise InputError(where, wrong, "read them as logits, or correct them")
        return values
    return values.double().logit().clamp_(_LOWEST, _HIGHEST)


def _read_target(values: NDArray[Any] | None, where: str) -> Tensor:
    """A target (N,L) with NaN for unknown."""
    assert values is not None
    target = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    target = target.masked_fill_(target == -1, torch.nan)
    wrong = ~(target.isnan() | (target == 0) | (target == 1))
    if wrong.any():
        raise InputError(where, f"the target holds {target[wrong][0].item():g}", "write 1, 0, or -1 for unknown")
    return target


def _refuse_unfinite(scores: Scores, where: str) -> None:
    for kind, values in scores.logits.items():
        if not values.isfinite().all():
            row, column = (~values.isfinite()).nonzero()[0].tolist()
            what = f"the {kind} score of {scores.labels[column]!r} for {scores.pictures[row]!r}"
            todo = "find where the model made it, or leave that picture out"
            raise InputError(where, f"{what} is {values[row, column].item():g}", todo)
    for name, patches in (("patch logits", scores.patch_logits), ("weights", scores.weights)):
        if patches is not None and not patches.isfinite().all():
            raise InputError(where, f"{name} are not all finite", "score the pictures again")
