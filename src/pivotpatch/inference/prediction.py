"""What a model says of one image: its tags, and for each the patch that speaks for it."""

import math
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from pivotpatch.core.patches import PatchBox, patch_boxes
from pivotpatch.data.decoding import decode_image
from pivotpatch.errors import InputError, choose_one_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 640
"""Pixels of the longer side of the copy that figures show."""
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""One per tag, in the order of their probabilities; the Okabe-Ito set: told apart by every kind of colour vision."""
_THUMBNAIL = 256  # pixels of the longer side in a notebook


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
    source: Path | bytes | NDArray[np.uint8]
    size: tuple[int, int]
    labels: tuple[str, ...]
    probs: Tensor
    image_probs: Tensor
    patch_probs: Tensor | None
    weights: Tensor | None
    thresholds: Tensor
    overlap: float = 0.0

    @property
    def tags(self) -> tuple[Tag, ...]:
        """The labels above their thresholds, the most probable first."""
        return tuple(map(self._tag, self._ranked[(self.probs > self.thresholds)[self._ranked]].tolist()))

    def top(self, count: int) -> tuple[Tag, ...]:
        """The most probable labels, above their thresholds or not."""
        if count < 1:
            raise InputError("top", f"count is {count}", "give 1 or more")
        return tuple(map(self._tag, self._ranked[:count].tolist()))

    def get(self, label: str) -> Tag:
        """What is known of one label, given or not."""
        if label not in self.labels:
            raise InputError("label", f"unknown label {label!r}", choose_one_of(label, self.labels))
        return self._tag(self.labels.index(label))

    def to_dict(self) -> dict[str, Any]:
        """The image's name, its size [H, W] and its tags in plain types, for JSON."""
        return {"picture": self.picture, "size": list(self.size), "tags": [tag.to_dict() for tag in self.tags]}

    @cached_property
    def image(self) -> NDArray[np.uint8]:
        """RGB pixels (h,w,3) for figures, at most `LONGEST` rows and columns; a file is read again for them."""
        return decode_image(self.source, size=fit(self.size))

    def plot(self, label: str | None = None) -> "Figure":
        """Show why.

        Args:
            label: one label, given or not: its probability from the whole image, from the patches and from both, and
                the share of each patch. By default all tags (8 at most), each with the frame of its pivot patch; the
                three most probable labels where there are no tags.
        """
        from pivotpatch.inference.plots import plot_tag, plot_tags

        if label is None:
            return plot_tags(self.image, self._shown, size=self.size)
        return plot_tag(self.image, self.get(label), overlap=self.overlap)

    @cached_property
    def _ranked(self) -> Tensor:
        """Places (L,) of the labels, the most probable first; of equal ones the first."""
        return self.probs.argsort(descending=True, stable=True)

    @property
    def _shown(self) -> tuple[Tag, ...]:
        return self.tags[: len(COLOURS)] or self.top(3)

    @cached_property
    def _boxes(self) -> list[PatchBox]:
        if self.weights is None:
            return []
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

    def _tag(self, place: int) -> Tag:
        known = self.labels[place], self.probs[place].item(), self.thresholds[place].item()
        if self.weights is None or self.patch_probs is None:
            return Tag(*known, self.image_probs[place].item())
        weights = self.weights[:, place]
        return Tag(
            *known,
            self.image_probs[place].item(),
            self.patch_probs[place].item(),
            tuple(weights.tolist()),
            self._boxes[int(weights.argmax())],
        )

    def __repr__(self) -> str:
        tags = ", ".join(f"{tag.label} {tag.prob:.2f}" for tag in self.tags) or "no tags"
        return f"<Prediction of {self.picture or 'an image'}, {self.size[0]} x {self.size[1]} pixels: {tags}>"

    def _repr_html_(self) -> str:
        """The image with the frames of its pivot patches, beside a table of its tags, for notebooks."""
        shown = list(zip(self._shown, COLOURS, nest_boxes(self._shown), strict=False))
        frames = (_frame(tag.box, self.size, colour=colour, depth=depth) for tag, colour, depth in shown if tag.box)
        page = _PAGE.format(
            address=_encode(self.image),
            text=repr(self)[1:-1],
            name=self.picture or "an image",
            size="{} x {}".format(*self.size),
            note="" if self.tags else _NO_TAGS,
            frames=Markup("").join(frames),
            head=_HEAD if self.weights is not None else Markup(""),
            rows=Markup("").join(_describe(tag, colour) for tag, colour, _ in shown),
        )
        return str(page)


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
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise InputError("threshold", f"{self.threshold} is no probability", "give 0 to 1")
        if self.top_k is not None and self.top_k < 1:
            raise InputError("top_k", f"it is {self.top_k}", "give 1 or more")

    def choose(self, prediction: Prediction) -> tuple[Tag, ...]:
        """The tags of one image, the most probable first."""
        if self.threshold is not None:
            prediction = replace(prediction, thresholds=0 * prediction.thresholds + self.threshold)
        elif self.top_k is not None:
            return prediction.top(self.top_k)
        return prediction.tags[: self.top_k]


_NO_TAGS = Markup("<br>No label is above its threshold; these are the most probable.")
_HEAD = Markup("<th>whole image<th>its patches<th>pivot patch")
_PAGE = Markup(
    '<div style="display:flex;gap:1em;align-items:flex-start">'
    '<div style="position:relative;line-height:0;flex:none"><img src="{address}" alt="{text}">{frames}</div>'
    '<div style="overflow-x:auto"><table><caption>{name}, {size} pixels{note}</caption>'
    "<thead><tr><th>tag<th>probability<th>threshold{head}</thead><tbody>{rows}</tbody></table></div></div>"
)
_FRAME = Markup(
    '<span style="position:absolute;left:{:.2f}%;top:{:.2f}%;width:{:.2f}%;height:{:.2f}%;'
    'outline:3px solid {};outline-offset:-{}px"></span>'
)
_ROW = Markup('<tr><td style="border-left:6px solid {};text-align:left">{}<td><b>{:.2f}</b><td>{:.2f}')
_EVIDENCE = Markup('<td>{:.2f}<td>{:.2f}<td style="white-space:nowrap">{}, {} to {}, {}')


def nest_boxes(tags: Sequence[Tag]) -> list[int]:
    """How many of the tags before each have the same box, so that frames of the same patch lie inside each other."""
    seen: Counter[PatchBox | None] = Counter()
    depths = []
    for tag in tags:
        depths.append(seen[tag.box])
        seen[tag.box] += 1
    return depths


def _frame(box: PatchBox, size: tuple[int, int], *, colour: str, depth: int) -> Markup:
    height, width = (100 / side for side in size)
    place = box.left * width, box.top * height, (box.right - box.left) * width, (box.bottom - box.top) * height
    return _FRAME.format(*place, colour, 3 + 4 * depth)


def _describe(tag: Tag, colour: str) -> Markup:
    row = _ROW.format(colour, tag.label, tag.prob, tag.threshold)
    return row if tag.box is None else row + _EVIDENCE.format(tag.image_prob, tag.patch_prob, *tag.box)


def _encode(image: NDArray[np.uint8]) -> Markup:
    """A small copy of an image (h,w,3) as an address that holds it."""
    small = Image.fromarray(image)
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    written = BytesIO()
    small.save(written, "JPEG", quality=85)
    return Markup("data:image/jpeg;base64,{}").format(b64encode(written.getvalue()).decode("ascii"))
