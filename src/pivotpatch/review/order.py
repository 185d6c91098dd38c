"""Which images to look at first, and why: a function of arrays alone. N images, L labels.

Every label of every image has a doubt, the largest of four: its probability is near its threshold; the whole image and
its patches disagree; a given label is contradicted; it is claimed beside a label that is known to mislead the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pivotpatch.runtime.values import rate_self_confidence

Floats = NDArray[np.floating]
NEAR, DISAGREE, CONTRADICTED, PAIR = range(4)
_ERROR = 2.0  # of a given label that is surely wrong; of all other doubts `_RARE[1]` is the most
_RARE = (0.5, 1.5)  # weights of the most frequent and of the rarest labels
_SHARES = (1.0, 0.5, 0.25)  # what the largest doubts of an image count
_TIRED = 0.1  # each image that a label has led takes so much from the next that it leads
_WORTH = 0.3  # of a doubt that is shown beside the tags of an image
_MORE = 4  # labels at most that are shown so: who reads ten labels an image reads half as many images
_LEAST = 1e-6
_SEED = 0
_ALL = slice(None)
KEYS = 10
"""Where there are no more labels, all are asked about: one for each number key."""


class Pair(NamedTuple):
    """Places of a label and of a context that makes a model claim it, and how often it does, from 0 to 1."""

    label: int
    context: int
    rate: float


@dataclass(frozen=True, eq=False)
class Doubts:
    """How doubtful each label of each image is, and why."""

    labels: tuple[str, ...]  # names of the L labels
    thresholds: Floats  # (L,)
    probs: Floats  # (N,L), NaN where the model was not asked
    image_probs: Floats  # (N,L) of the whole image; NaN where they are not known, as the next
    patch_probs: Floats  # (N,L) of the patches
    given: Floats  # (N,L), 1 present, 0 absent, NaN unknown
    level: Floats  # (N,L) the probability as it would be with a threshold of one half; NaN likewise
    doubt: Floats  # (N,L), 0 for none
    kind: NDArray[np.int8]  # (N,L), which of the four doubts is the largest
    context: NDArray[np.intp]  # (N,L), the place of the misleading label of a `PAIR`

    def claims(self, images: int | slice, labels: int | slice = _ALL) -> NDArray[np.bool_]:
        """Whether these labels of these images are given or, where that is unknown, above their thresholds."""
        given, level = self.given[images, labels], self.level[images, labels]
        return np.where(np.isnan(given), np.nan_to_num(level) > 0.5, given == 1)

    def explain(self, image: int, label: int) -> str:
        """Why one label of an image is worth a look, in words."""
        name, prob = self.labels[label], self.probs[image, label]
        if np.isnan(prob):
            return f"{name}: the model does not know it"
        text = f"{name}: {prob:.2f}"
        if self.doubt[image, label] < _WORTH:
            return f"{text}, the model is sure"
        kind = self.kind[image, label]
        if kind == CONTRADICTED:
            return f"{name}: {'given' if self.given[image, label] else 'not given'}, but its probability is {prob:.2f}"
        if kind == DISAGREE:
            whole, parts = self.image_probs[image, label], self.patch_probs[image, label]
            return f"{text}; the whole image says {whole:.2f}, its patches {parts:.2f}"
        if kind == PAIR:
            return f"{text}; often claimed where there is {self.labels[self.context[image, label]]}"
        return f"{text}, near its threshold {self.thresholds[label]:.2f}"

    def explain_image(self, image: int) -> str:
        """Why an image is worth a look, by its most doubtful label."""
        return self.explain(image, int(self.doubt[image].argmax()))

    def choose(self, image: int) -> list[int]:
        """The labels to ask about: all of a few; else those claimed, then the most doubtful; the likeliest first."""
        probs = np.nan_to_num(self.probs[image], nan=-1.0)
        claimed, doubt = self.claims(image), self.doubt[image]
        count = len(self.labels)
        if count > KEYS:
            worth = min(int((~claimed & (doubt >= _WORTH)).sum()), _MORE)
            count = max(int(claimed.sum()) + worth, 3)
        chosen = np.lexsort((-doubt, ~claimed))[:count]
        return chosen[np.lexsort((-probs[chosen], ~claimed[chosen]))].tolist()


def rate_doubts(
    probs: Floats,
    *,
    labels: Sequence[str],
    thresholds: Floats,
    image_probs: Floats | None = None,
    patch_probs: Floats | None = None,
    given: Floats | None = None,
    counts: Floats | None = None,
    pairs: Sequence[Pair] = (),
) -> Doubts:
    """Rate the doubt about every label of every image.

    Args:
        probs: (N,L), NaN where the model was not asked: there is no doubt.
        labels: names of the L labels.
        thresholds: (L,); one of 1 or more is never reached and counts as one half.
        image_probs: (N,L) of the whole image alone.
        patch_probs: (N,L) of the patches alone, NaN where they were not looked at.
        given: (N,L) what a table says, 1 present, 0 absent, NaN unknown.
        counts: (L,) images that show each label, so that rare ones weigh more; what the model expects by default.
        pairs: labels that are claimed from their co-occurrence, such as the worst of an audit.
    """
    whole, parts, truth = (
        np.full(probs.shape, np.nan) if each is None else each for each in (image_probs, patch_probs, given)
    )
    limits = np.where(thresholds >= 1, 0.5, thresholds)
    level = _shift(probs, limits)
    known = ~np.isnan(truth)
    near = 4 * level * (1 - level) * np.where(known, 0.5, 1.0)  # what a table says is half settled
    apart = np.abs(_shift(whole, limits) - _shift(parts, limits))
    wrong = _ERROR * (1 - np.clip(rate_self_confidence(level, truth), 0, 1)) ** 2
    misled, context = np.zeros(probs.shape), np.zeros(probs.shape, np.intp)
    there = np.where(known, truth, np.nan_to_num(level))
    for label, other, rate in pairs:
        claim = rate * np.nan_to_num(level[:, label]) * there[:, other] * ~(known[:, label])
        better = claim > misled[:, label]
        misled[better, label], context[better, label] = claim[better], other
    expected = np.nansum(level, axis=0) if counts is None else counts
    rare = np.clip(np.sqrt((np.median(expected) + 1) / (expected + 1)), *_RARE)
    kinds = np.nan_to_num(np.stack([near * rare, apart * rare, wrong, misled * rare]))
    kinds[:, np.isnan(level)] = 0
    return Doubts(
        labels=tuple(labels),
        thresholds=thresholds,
        probs=probs,
        image_probs=whole,
        patch_probs=parts,
        given=truth,
        level=level,
        doubt=kinds.max(axis=0),
        kind=kinds.argmax(axis=0).astype(np.int8),
        context=context,
    )


def order_images(doubts: Doubts) -> NDArray[np.intp]:
    """All images (N,), the one most worth a look first.

    An image counts its largest doubts; of images that one label leads the more doubtful comes first, and the longer one
    label has led, the sooner it is another's turn, so that no label fills an hour. Images without any doubt come last,
    in a random order, always the same: of labels that the model does not know, the first are a sample.
    """
    top = -np.sort(-doubts.doubt, axis=1)[:, : len(_SHARES)]
    score, lead = top @ np.array(_SHARES[: top.shape[1]]), doubts.doubt.argmax(axis=1)
    sure = np.random.default_rng(_SEED).permutation(np.flatnonzero(score == 0))
    images = np.flatnonzero(score > 0)
    images = images[np.lexsort((-score[images], lead[images]))]  # label by label, the more doubtful first
    _, first, which = np.unique(lead[images], return_index=True, return_inverse=True)
    led = np.arange(len(images)) - first[which]  # by the same label, before each
    return np.concatenate([images[np.lexsort((images, -score[images] / (1 + _TIRED * led)))], sure])


def order_label(doubts: Doubts, label: int, *, claimed: bool = True) -> NDArray[np.intp]:
    """The images (M,) that claim the label at a place, or else those that do not, the most doubtful first."""
    images = np.flatnonzero(doubts.claims(_ALL, label) == claimed)
    return images[np.argsort(-doubts.doubt[images, label], kind="stable")]


def _shift(probs: Floats, thresholds: Floats) -> Floats:
    """Probabilities (N,L) as they would be if each threshold (L,) were one half: moved by its logit."""
    odds, limit = (
        np.log(held / (1 - held)) for held in (np.clip(each, _LEAST, 1 - _LEAST) for each in (probs, thresholds))
    )
    return 1 / (1 + np.exp(limit - odds))
