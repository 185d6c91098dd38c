"""What a file of scores holds, checked, and matched with what is true of its pictures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pivotpatch.core.counterfactual import check_lam, check_temperature
from pivotpatch.core.patches import check_overlap
from pivotpatch.data.decoding import MAX_SIDE
from pivotpatch.data.records import LabelSpace, RecordSet, Tell, keep_common_labels
from pivotpatch.errors import InputError, choose_one_of, shorten
from pivotpatch.inference.scores import KINDS, Scores

Scale = Literal["auto", "logits", "probs"]
"""What scores of no stated kind are; "auto" takes them for probabilities where all of them are in [0, 1]."""
SCALES: tuple[Scale, ...] = ("auto", "logits", "probs")
UNSTATED = "scores"  # the kind of scores that a file does not tell
_MOST = 0.5  # share of pictures without scores, or of other truth, above which a file belongs to other data
_ROUNDING = 0.02  # of a sum of weights that somebody kept in half precision
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
        closer_size: of a closer look in their place.
        data: address of the data set that was scored.
        network: `fingerprint` of the network that scored it.
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
    closer_size: int | None = None
    data: str | None = None
    network: str | None = None


class Truth(NamedTuple):
    """What is true of pictures, from another place than the file: a name for messages, and the rest as in `Scores`.

    `paired` is True where each picture must have scores, for a comparison picture by picture.
    """

    where: str
    pictures: tuple[str, ...]
    labels: tuple[str, ...]
    target: Tensor
    indices: Tensor | None
    paired: bool = False


def describe_records(records: RecordSet, content: ScoreContent, *, tell: Tell | None = None) -> Truth:
    """What a data set says of its pictures: of the labels that a file tells, in their order.

    It must know all of them, unless somebody is told of those that are left out.
    """
    if content.labels is not None and content.labels != records.labels.names:
        if tell is None:
            records = records.keep_labels(content.labels)
        else:
            records = keep_common_labels(records, content.labels, whose=content.where, tell=tell)
    names = tuple(records.images.name(records.place(index)) for index in range(len(records)))
    return Truth(records.name, names, records.labels.names, records.target(), torch.arange(len(records)))


def complete(content: ScoreContent, truth: Truth | None, *, scale: Scale, tell: Tell | None = None) -> Scores:
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
    rows = columns = None
    if truth is not None:
        truth = _leave_out(truth, pictures, where, tell)
        rows = _match(pictures, truth.pictures, what="pictures", where=where, other=truth)
        columns = _match(labels, truth.labels, what="labels", where=where, other=truth)

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
            arrange(content.scores[kind]), kind=kind, scale=scale, where=where, tell=tell
        )
        for kind in (UNSTATED, *KINDS)
        if kind in content.scores
    }
    target = None if content.target is None else _read_target(content.target, where)
    if truth is not None and target is not None:
        _compare_targets(arrange(target.numpy()), truth, where, tell)
    known = target if truth is None else truth.target
    assert known is not None
    held = Scores(
        labels=labels if truth is None else truth.labels,
        pictures=pictures if truth is None else truth.pictures,
        target=known,
        logits=logits,
        patch_logits=None if content.patch_logits is None else arrange(content.patch_logits),
        weights=None if content.weights is None else arrange(content.weights),
        lam=arrange_labels(content.lam),
        temperature=arrange_labels(content.temperature),
        indices=None if truth is None else truth.indices,
        overlap=content.overlap,
        closer_size=content.closer_size,
        data=content.data,
        network=content.network,
    )
    _check_values(held, where)
    return held


def read_closer_size(value: object, where: str) -> int | None:
    """A number of pixels a side; None where a file does not tell one."""
    if value is None:
        return None
    number = np.asarray(value)
    if number.size != 1 or number.dtype.kind not in "iuf" or not 1 <= number.item() <= MAX_SIDE:
        raise InputError(where, f"'closer_size' is {value}", "give pixels a side, or leave it out")
    return int(number.item())


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
        if values is not None and (values.ndim != 3 or (values.shape[0], values.shape[2]) != shape or values.size == 0):
            wanted = f"({shape[0]}, P, {shape[1]})"
            raise InputError(where, f"{name!r} has shape {values.shape}", f"give {wanted}, one row a patch")
    if (content.patch_logits is None) != (content.weights is None):
        raise InputError(where, "'patch_logits' or 'weights' is missing", "give both or neither")
    for name, value in (("lam", content.lam), ("temperature", content.temperature)):
        if isinstance(value, Tensor) and value.shape not in ((), shape[1:]):
            raise InputError(where, f"{name!r} has shape {tuple(value.shape)}", "give a number, or one a label")
    check_overlap(content.overlap, where)
    return shape


def _leave_out(truth: Truth, pictures: tuple[str, ...], where: str, tell: Tell | None) -> Truth:
    """The truth about pictures that have scores, where the others are few and somebody is told of them."""
    scored = set(pictures)
    rows = torch.tensor([row for row, name in enumerate(truth.pictures) if name in scored], dtype=torch.int64)
    missing, count = len(truth.pictures) - len(rows), len(truth.pictures)
    if tell is None or truth.paired or not 0 < missing <= _MOST * count:
        return truth
    named = shorten(name for name in truth.pictures if name not in scored)
    tell(f"{where}: {missing:,} of {count:,} pictures of {truth.where} have no scores and are left out ({named})")
    return truth._replace(
        pictures=tuple(truth.pictures[row] for row in rows.tolist()),
        target=truth.target[rows],
        indices=None if truth.indices is None else truth.indices[rows],
    )


def _compare_targets(target: Tensor, truth: Truth, where: str, tell: Tell | None) -> None:
    """Refuse a file whose own target (N,L) is mostly another than the truth; tell of one that differs somewhere."""
    known = ~(target.isnan() | truth.target.isnan())
    differ, count = int((known & (target != truth.target)).sum()), int(known.sum())
    wrong = f"{differ:,} of {count:,} known targets are not those of {truth.where}"
    if differ > _MOST * count:
        raise InputError(where, wrong, "check that both are of the same pictures and labels")
    if differ and tell is not None:
        tell(f"{where}: {wrong}, which are taken")


def _match(
    names: Sequence[str], wanted: Sequence[str], *, what: str, where: str, other: Truth
) -> NDArray[np.int64] | None:
    """Where each wanted name stands among names; None where they are the same."""
    if tuple(names) == tuple(wanted):
        return None
    if what == "pictures":
        check_pictures(wanted, other.where)
    places = {name: place for place, name in enumerate(names)}
    extra = list(places.keys() - set(wanted))
    missing = [name for name in wanted if name not in places]
    if extra and (what == "pictures" or missing):  # a file may know more labels than are asked for
        extra.sort()
        hint = choose_one_of(extra[0], wanted) if what == "labels" else f"there they are named like {wanted[0]!r}"
        raise InputError(where, f"{len(extra)} {what} are not in {other.where} ({shorten(extra)})", hint)
    if missing:
        wrong = f"{len(missing)} {what} of {other.where} have no scores ({shorten(missing)})"
        without = f"leave them out of {other.where}" if other.paired else "name a data set without them"
        raise InputError(where, wrong, f"score them too, or {without}")
    return np.array([places[name] for name in wanted], dtype=np.int64)


def _read_logits(values: Tensor, *, kind: str, scale: Scale, where: str, tell: Tell | None) -> Tensor:
    """Logits of scores (N,L); those of probabilities in float64, so that their order and their ties stay."""
    values = values if values.dtype in (torch.float32, torch.float64) else values.float()
    if kind != UNSTATED or scale == "logits" or values.isnan().any():
        return values
    low, high = values.aminmax()
    if scale == "auto" and tell is not None:
        tell(f"{where}: {_tell_scale(low.item(), high.item())}")
    if low < 0 or high > 1:
        if scale == "probs":
            wrong = f"scores from {low.item():.3g} to {high.item():.3g} are no probabilities"
            raise InputError(where, wrong, "read them as logits, or correct them")
        return values
    return values.double().logit().clamp_(_LOWEST, _HIGHEST)


def _tell_scale(low: float, high: float) -> str:
    told = f"scores from {low:.3g} to {high:.3g} are taken for"
    if low >= 0 and high <= 1:
        return f"{told} probabilities"
    return f"{told} logits" + ("; divide by 100 if they are per cent" if low >= 0 and high <= 100 else "")


def _read_target(values: NDArray[Any], where: str) -> Tensor:
    """A target (N,L) with NaN for unknown."""
    target = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    target = target.masked_fill_(target == -1, torch.nan)
    wrong = ~(target.isnan() | (target == 0) | (target == 1))
    if wrong.any():
        raise InputError(where, f"the target holds {target[wrong][0].item():g}", "write 1, 0, or -1 for unknown")
    return target


def _check_values(scores: Scores, where: str) -> None:
    """Refuse numbers that no network gives."""
    for kind, values in scores.logits.items():
        if not values.isfinite().all():
            row, column = (~values.isfinite()).nonzero()[0].tolist()
            what = f"the {kind} score of {scores.labels[column]!r} for {scores.pictures[row]!r}"
            todo = "find where the model made it, or leave that picture out"
            raise InputError(where, f"{what} is {values[row, column].item():g}", todo)
    for name, patches in (("patch logits", scores.patch_logits), ("weights", scores.weights)):
        if patches is not None and not patches.isfinite().all():
            raise InputError(where, f"{name} are not all finite", "score the pictures again")
    for numbers, check in ((scores.lam, check_lam), (scores.temperature, check_temperature)):
        for value in torch.as_tensor(numbers).reshape(-1).tolist():
            check(value, where)
    if scores.weights is None:
        return
    lowest, sums = scores.weights.min().item(), scores.weights.sum(dim=1)
    if lowest < 0 or ((sums - 1).abs() > _ROUNDING).any():
        wrong = f"weights sum to {sums.min().item():.3g} up to {sums.max().item():.3g}, the least is {lowest:.3g}"
        raise InputError(where, wrong, "give each patch a share of 0 or more, of 1 in all")
