"""What a model says of one image: its tags, and for each the patch that speaks for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from pivotpatch.errors import check_known
from pivotpatch.runtime.checks import check_rule
from pivotpatch.runtime.decoding import ImageSource, decode_image
from pivotpatch.runtime.values import PatchBox, patch_boxes

LONGEST = 640
"""Pixels of the longer side of the copy that figures show."""


def fit(size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a copy whose sides are `LONGEST` at most; a very long and narrow one becomes a little wider.

    >>> fit((480, 1280)), fit((9, 5)), fit((10000, 20))
    ((240, 640), (9, 5), (640, 16))
    """
    scale = min(1.0, LONGEST / max(size))
    rows, columns = (max(round(side * scale), min(side, 16)) for side in size)
    return rows, columns


class Tag(NamedTuple):
    """A label and what is known of it in one image.

    Attributes:
        label: its name.
        prob: its probability, to compare with the threshold.
        threshold: the label is given where `prob` is above.
        image_prob: from the whole image alone.
        patch_prob: from the patches alone; None where they were not looked at, as the next two.
        weights: P shares of the patches, row by row.
        box: of the pivot patch, the one with the largest share, in the image's own pixels.
    """

    label: str
    prob: float
    threshold: float
    image_prob: float
    patch_prob: float | None = None
    weights: tuple[float, ...] | None = None
    box: PatchBox | None = None

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON, with six decimals; the box is [left, top, right, bottom]."""
        return {name: _to_plain(value) for name, value in self._asdict().items()}


def _to_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_plain(part) for part in value]
    return round(value, 6) if isinstance(value, float) else value


@dataclass(frozen=True)
class TagRule:
    """Which labels an image gets; the fitted thresholds decide by default.

    Attributes:
        threshold: takes the place of all thresholds.
        top_k: most labels; without a threshold, the most probable ones whatever their thresholds.
    """

    threshold: float | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        check_rule(self.threshold, self.top_k)

    def choose(self, prediction: "Prediction") -> tuple[Tag, ...]:
        """The tags of one image, the most probable first."""
        if self.threshold is not None:
            prediction = replace(prediction, thresholds=np.full_like(prediction.thresholds, self.threshold))
        ranked = np.argsort(-prediction.probs, kind="stable")
        if self.threshold is not None or self.top_k is None:
            ranked = ranked[prediction.probs[ranked] > prediction.thresholds[ranked]]
        return tuple(map(prediction.tag_at, ranked[: self.top_k]))


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """What a model says of one image; L labels, P patches.

    In a notebook it shows itself, with `print` as a line.

    Attributes:
        picture: the name of its file; None for pixels without one.
        source: where figures take the image from: its file or the file's bytes, or a copy (h,w,3) of its pixels.
        size: the image's own rows and columns, turned as its EXIF data say.
        labels: names of the L labels.
        probs: (L,) to decide with.
        image_probs: (L,) from the whole image alone.
        patch_probs: (L,) from the pooled patches; None without patches, and where they were not looked at.
        weights: (P,L) share of each patch, row by row; None likewise.
        thresholds: (L,); a label is given where `probs` are above.
        overlap: of the patches, see `patch_boxes`.
    """

    picture: str | None
    source: ImageSource
    size: tuple[int, int]
    labels: tuple[str, ...]
    probs: NDArray[np.float32]
    image_probs: NDArray[np.float32]
    patch_probs: NDArray[np.float32] | None
    weights: NDArray[np.float32] | None
    thresholds: NDArray[np.float32]
    overlap: float = 0.0

    @property
    def tags(self) -> tuple[Tag, ...]:
        """The labels above their thresholds, the most probable first."""
        return TagRule().choose(self)

    def top(self, count: int) -> tuple[Tag, ...]:
        """The most probable labels, above their thresholds or not."""
        return TagRule(top_k=count).choose(self)

    def get(self, label: str) -> Tag:
        """What is known of one label, given or not."""
        check_known(label, self.labels, where="label", what="label")
        return self.tag_at(self.labels.index(label))

    def tag_at(self, place: int) -> Tag:
        """What is known of the label at a place of `labels`."""
        known = self.labels[place], float(self.probs[place]), float(self.thresholds[place])
        tag = Tag(*known, float(self.image_probs[place]))
        if self.weights is None or self.patch_probs is None:
            return tag
        weights = self.weights[:, place]
        box = self._boxes[int(weights.argmax())]
        return tag._replace(patch_prob=float(self.patch_probs[place]), weights=tuple(weights.tolist()), box=box)

    def to_dict(self) -> dict[str, Any]:
        """The image's name, its size [H, W] and its tags in plain types, for JSON."""
        return {"picture": self.picture, "size": list(self.size), "tags": [tag.to_dict() for tag in self.tags]}

    @cached_property
    def image(self) -> NDArray[np.uint8]:
        """RGB pixels (h,w,3) for figures, at most `LONGEST` rows and columns; a file is read again for them."""
        return decode_image(self.source, size=fit(self.size))

    def plot(self, label: str | None = None) -> Image:
        """Show why; `.save("why.png")` writes it.

        Args:
            label: one label, given or not: its probability from the whole image, from the patches and from both, and
                the share of each patch. By default all tags (8 at most), each with the frame of its pivot patch; the
                three most probable labels where there are no tags.
        """
        return self.draw((self.tags or self.top(3)) if label is None else self.get(label))

    def draw(self, chosen: Tag | Sequence[Tag]) -> Image:
        """As `plot`, with tags that were chosen before."""
        from pivotpatch.runtime.drawing import draw_tag, draw_tags

        if isinstance(chosen, Tag):
            return draw_tag(self.image, chosen, overlap=self.overlap)
        return draw_tags(self.image, chosen, size=self.size)

    @cached_property
    def _boxes(self) -> list[PatchBox]:
        """Pixels of each patch."""
        assert self.weights is not None
        grid = math.isqrt(len(self.weights))
        # The model sees the image enlarged: where it has fewer pixels than patches, they share them.
        (height, width), (rows, columns) = self.size, (max(side, grid) for side in self.size)
        return [
            PatchBox(
                box.left * width // columns,
                box.top * height // rows,
                math.ceil(box.right * width / columns),
                math.ceil(box.bottom * height / rows),
            )
            for box in patch_boxes(rows, columns, grid=grid, overlap=self.overlap)
        ]

    def __repr__(self) -> str:
        tags = ", ".join(f"{tag.label} {tag.prob:.2f}" for tag in self.tags) or "no tags"
        return f"<Prediction of {self.picture or 'an image'}, {self.size[0]} x {self.size[1]} pixels: {tags}>"

    def _repr_png_(self) -> bytes:
        """The figure of all tags, for notebooks."""
        written = BytesIO()
        self.plot().save(written, format="png")
        return written.getvalue()
