"""All images of a review: what the model and a table say of them, and the order in which they are looked at."""

import base64
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pivotpatch.errors import InputError
from pivotpatch.process import Progress, ignore
from pivotpatch.review.order import Doubts, Pair, order_images, rate_doubts
from pivotpatch.runtime.prediction import Prediction
from pivotpatch.runtime.predictor import Predictor
from pivotpatch.writing import explain_disk_faults

TOLD = 10  # images that cannot be read
WORST_PAIRS = 20
SEED = 0
BATCH = 32  # images that the model is asked about at once
Order = Literal["doubt", "random", "source"]


@dataclass(frozen=True, eq=False)
class Source:
    """Images to review, and what is known of them beside what a model says."""

    name: str  # what a user calls it
    paths: list[Path]  # files of the N images
    given: NDArray[np.float32] | None = None  # (N,K) of a table, 1 present, 0 absent, NaN unknown; None without one
    given_labels: tuple[str, ...] = ()  # names of the K labels
    # By image, labels and their probabilities that an earlier `predict --out` wrote, so that no model need look
    # at all images first; None without.
    tags: list[dict[str, float]] | None = None
    model: str = "tagger"  # to ask where a user names none


@dataclass(frozen=True, eq=False)
class Pile:
    """All images of a review."""

    source: str  # what it was made from, in words
    names: tuple[str, ...]  # of the N images, as the table has them
    paths: tuple[Path, ...]  # their files
    doubts: Doubts  # about their labels
    order: NDArray[np.intp]  # (N,), the first to look at first


def make_pile(
    source: Source,
    predictor: Predictor,
    labels: Sequence[str],
    *,
    out: Path,
    order: Order = "doubt",
    tell: Callable[[str], None],
    progress: Progress = ignore,
) -> Pile:
    """Have the model look at all images, unless it has before, and put them in order, see `order_images`.

    The model need not know all labels of the review. Its answers are kept beside the table `out`; `tell` is told which
    images are left out, and what the order does not know.
    """
    if source.tags is None:
        looks = _look_at(predictor, source.paths, out.with_name(f"{out.name}.looks.jsonl"), progress=progress)
        errors, opinions = looks.errors, spread(looks.probs.transpose(1, 0, 2), predictor.labels, labels)
    else:
        errors, opinions = {}, np.full((3, len(source.paths), len(labels)), np.nan, np.float32)
        opinions[0] = [[tags.get(label, np.nan) for label in labels] for tags in source.tags]
        if any(label in predictor.labels and np.isnan(opinions[0, :, at]).any() for at, label in enumerate(labels)):
            tell("tags below their thresholds are not in the file, nor in the order; predict --all-probs writes them")
    for place, path in enumerate(source.paths):
        if not path.is_file():
            errors.setdefault(place, f"{path}: there is no such file; check the path")
        elif not str(path).isprintable():
            errors.setdefault(place, f"{str(path)!r}: a table cannot hold such a name; rename it")
    for error in list(errors.values())[:TOLD]:
        tell(f"not read: {error}")
    if len(errors) > TOLD:
        tell(f"not read: {len(errors) - TOLD:,} more images")
    kept = np.array([place for place in range(len(source.paths)) if place not in errors], np.int64)
    if not len(kept):
        raise InputError(source.name, "none of its images can be read", "check the files")
    opinions, paths = opinions[:, kept], [source.paths[place] for place in kept]
    given = None if source.given is None else spread(source.given[kept], source.given_labels, labels)
    limits = np.array(predictor.engine.thresholds or (0.5,) * len(predictor.labels), np.float32)
    doubts = rate_doubts(
        opinions[0],
        labels=labels,
        thresholds=np.nan_to_num(spread(limits, predictor.labels, labels), nan=0.5),
        image_probs=opinions[1],
        patch_probs=opinions[2],
        given=given,
        counts=None if given is None else np.nansum(given, axis=0),
        pairs=() if given is None else find_worst_pairs(opinions[0], given, labels),
    )
    if order == "doubt":
        places = order_images(doubts)
    else:
        places = np.arange(len(paths)) if order == "source" else np.random.default_rng(SEED).permutation(len(paths))
    return Pile(source.name, tuple(name_image(path, out) for path in paths), tuple(paths), doubts, places)


class Looks(NamedTuple):
    """Three opinions of a model about N images; what could not be read has an error."""

    # (N,3,L) to decide with, of the whole image, and of the patches; NaN where there is none.
    probs: NDArray[np.float16]
    errors: dict[int, str]  # by the index of the image


def stack_opinions(prediction: Prediction) -> NDArray[np.float32]:
    """(3,L): probabilities to decide with, of the whole image, and of the patches; NaN where there are none."""
    parts = np.full_like(prediction.probs, np.nan) if prediction.patch_probs is None else prediction.patch_probs
    return np.stack([prediction.probs, prediction.image_probs, parts])


def _look_at(predictor: Predictor, paths: Sequence[Path], cache: Path, *, progress: Progress) -> Looks:
    """Ask a model about images, unless a file of lines, which begins anew for another model, has its answer.

    An image whose file has changed since is asked about again.
    """
    model = json.dumps([predictor.engine.digest(), predictor.engine.effort, predictor.labels])
    known, errors = _read(cache, model, labels=len(predictor.labels)), dict[int, str]()
    stamps = [_stamp(path) for path in paths]
    left = [place for place, stamp in enumerate(stamps) if stamp not in known]
    with explain_disk_faults(cache.parent), cache.open("ab" if known else "wb") as file:
        if not known:
            file.write(model.encode() + b"\n")
        asked = Predictor(predictor.engine, batch_size=BATCH).predict([paths[place] for place in left], skip=True)
        for done, (place, answer) in enumerate(zip(left, asked, strict=True), len(paths) - len(left) + 1):
            if isinstance(answer, InputError):
                errors[place] = str(answer)
            else:
                known[stamps[place]] = held = stack_opinions(answer).astype(np.float16)
                line = json.dumps([stamps[place], base64.b64encode(held.tobytes()).decode()])
                file.write(b"\n" + line.encode() + b"\n")  # the first ends a line that a crash has torn
            progress("look at images", done, len(paths))
    nothing = np.full((3, len(predictor.labels)), np.nan, np.float16)
    return Looks(np.stack([known.get(stamp, nothing) for stamp in stamps]), errors)


def _stamp(path: Path) -> str:
    """Tells whether a file is still the same."""
    with suppress(OSError):
        state = path.stat()
        return f"{state.st_size} {state.st_mtime_ns} {os.path.abspath(path)}"  # noqa: PTH100 (links stay)
    return f"missing {path}"


def _read(cache: Path, model: str, *, labels: int) -> dict[str, NDArray[np.float16]]:
    """What was kept of this model, by stamp; nothing of another."""
    known: dict[str, NDArray[np.float16]] = {}
    with suppress(FileNotFoundError), cache.open("rb") as lines:
        for line in lines if next(lines, b"") == model.encode() + b"\n" else ():
            with suppress(ValueError, TypeError):  # torn by a crash: that image is asked about again
                stamp, text = json.loads(line)
                known[stamp] = np.frombuffer(base64.b64decode(text), np.float16).reshape(3, labels)
    return known


def name_image(path: Path, out: Path) -> str:
    """An image as the table names it: from the table's folder where it lies inside, else by its whole path."""
    whole, folder = Path(os.path.abspath(path)), Path(os.path.abspath(out.parent))  # noqa: PTH100 (links stay)
    return (whole.relative_to(folder) if whole.is_relative_to(folder) else whole).as_posix()


def find_worst_pairs(probs: NDArray[np.float32], given: NDArray[np.float32], labels: Sequence[str]) -> list[Pair]:
    """The pairs of labels of which the first is claimed most from the second, as `audit pairs` finds them."""
    import torch  # there where a table with labels can be read

    from pivotpatch.audit.cooccurrence import rank_pairs, rate_pairs
    from pivotpatch.core.bootstrap import wilson_interval
    from pivotpatch.inference.scores import Scores

    known = [place for place in range(len(labels)) if not np.isnan(probs[:, place]).any()]
    target = torch.from_numpy(given[:, known])
    if not known or not (target == 1).any():
        return []
    logits = torch.from_numpy(probs[:, known]).logit(eps=1e-6)
    names = tuple(labels[place] for place in known)
    scores = Scores(names, tuple(map(str, range(len(probs)))), target, {"image": logits})
    ranked = rank_pairs(rate_pairs(scores), by="gap")
    worst = ranked.select(torch.arange(min(WORST_PAIRS, len(ranked))))
    least = wilson_interval(worst.fpr, worst.fpr_counts)[0]
    return [
        Pair(list(labels).index(label), list(labels).index(context), rate)
        for (label, context), rate in zip(worst.names, least.tolist(), strict=True)
        if rate > 0
    ]


def spread(values: NDArray[np.floating], labels: Sequence[str], wanted: Sequence[str]) -> NDArray[np.float32]:
    """Values (...,K) of K labels as those (...,L) of the wanted ones; NaN for labels that have none."""
    there = [place for place, label in enumerate(wanted) if label in labels]
    found = np.full((*values.shape[:-1], len(wanted)), np.nan, np.float32)
    found[..., there] = values[..., [labels.index(wanted[place]) for place in there]]
    return found
