"""The data set that is always there: real handwritten digits in cluttered scenes with a set co-occurrence.

A scene is a function of seed, split and index. A companion is a guest and brings nobody, so P(next | label) over all
images is lower than `company`: 0.36, 0.49 and 0.55 at 0.5, 0.8 and 1.0 (measured on `train`). In `test-broken` a
stranger comes in a companion's place; in `test-removed` the first host has brought its companion, which is taken out.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt
from sklearn.datasets import load_digits

from pivotpatch.data.address import choose_split
from pivotpatch.data.records import LabelSpace, RecordSet, pack_states
from pivotpatch.errors import InputError
from pivotpatch.runtime.values import PatchBox

Split = Literal["train", "val", "test-same", "test-broken", "test-removed"]
SPLITS: tuple[Split, ...] = get_args(Split)
SCENE_LABELS = LabelSpace(("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"))

# The difficulty: a small model that sees these scenes at 64 pixels tells the digits apart after a minute of training,
# but not well enough to do without their co-occurrence.
CELLS = (2, 6)  # cells per side, the fewest and the most: a scene is seen from near or from afar
SIDES = (0.6, 1.0)  # side of an object, in sides of its cell
CONTRAST = (60.0, 110.0)  # grey levels that full ink adds to the ground or takes from it
DISTRACTORS = 2
SCRATCHES = 2
NOISE = 8.0  # grey levels up and down

MAX_SIZE = 4096  # pixels per side; such a scene takes some 200 MB while it is drawn


def companion(label: int) -> int:
    """The label that `label` brings along: the next, and of nine, zero."""
    return (label + 1) % len(SCENE_LABELS)


class SceneObject(NamedTuple):
    """One digit of a scene."""

    label: int  # of a distractor, what it was before its quarters were swapped
    sample: int  # its number among scikit-learn's digits
    box: PatchBox  # the pixels it may touch
    shade: tuple[float, float, float]  # what full ink adds to red, green and blue


@dataclass(frozen=True, kw_only=True)
class ScenePlan:
    """All that chance decides about a scene, of which `draw_scene` makes the pixels."""

    size: int  # pixels per side
    objects: tuple[SceneObject, ...]  # the digits, no label twice
    distractors: tuple[SceneObject, ...]  # digits with their quarters swapped: ink, but no label
    ground: int  # seed of background, scratches and noise
    removed: frozenset[int]  # labels whose objects the split leaves out of its image

    @property
    def labels(self) -> tuple[int, ...]:
        """The labels that the image shows, in rising order."""
        return tuple(sorted(item.label for item in self.objects if item.label not in self.removed))


def draw_scene(plan: ScenePlan, *, without: frozenset[int] = frozenset()) -> NDArray[np.uint8]:
    """Draw a scene, all of its planned objects or all but some.

    Ink is added to the ground, so taking an object out changes no pixel outside its box.

    Args:
        plan: what to draw.
        without: labels to leave out; give `plan.removed` for the image that the split shows.

    Returns:
        RGB pixels (H,W,3).
    """
    generator = np.random.default_rng(plan.ground)
    canvas = _draw_ground(generator, plan.size)
    ink, _ = _load_digits()
    for item in plan.objects:
        if item.label not in without:
            _add_ink(canvas, item, ink[item.sample])
    for item in plan.distractors:
        _add_ink(canvas, item, np.roll(ink[item.sample], (4, 4), axis=(0, 1)))
    # Raw bytes are ten times as fast as bounded integers, and drawing is what training waits for.
    noise = np.frombuffer(generator.bytes(canvas.size), dtype=np.uint8).reshape(canvas.shape)
    canvas += noise * np.float32(2 * NOISE / 255)
    canvas -= np.float32(NOISE)
    return np.clip(canvas, 0, 255, out=canvas).astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class SceneStore:
    """The images of one split, drawn when asked for, the same in every process; attributes as in `read_scenes`."""

    split: Split
    count: int
    seed: int = 0
    size: int = 128
    company: float = 0.8

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        """Split and number of the scene."""
        return f"{self.split}/{index}"

    def source(self, index: int) -> NDArray[np.uint8]:
        """RGB pixels (H,W,3) of the scene."""
        plan = self.plan(index)
        return draw_scene(plan, without=plan.removed)

    def plan(self, index: int) -> ScenePlan:
        """What the scene is drawn from: objects, their boxes, what was removed."""
        generator = np.random.default_rng((self.seed, SPLITS.index(self.split), index))
        shown, removed = _draw_cast(generator, self.split, self.company)
        labels = [*shown, *generator.integers(0, len(SCENE_LABELS), DISTRACTORS).tolist()]
        cells = int(generator.integers(CELLS[0], CELLS[1] + 1))
        order = generator.permutation(cells * cells).tolist()
        shift = (generator.random(2) / 2).tolist()
        chances = generator.random((len(labels), 8)).tolist()
        pools = _load_digits()[1][self.split.partition("-")[0]]
        # The lattice is half a cell smaller than the image and lies somewhere within it, so that objects may lie
        # across the cuts of any patch grid.
        room, drawn = self.size / (cells + 0.5), []
        for label, cell, chance in zip(labels, order, chances, strict=False):
            row, column = divmod(cell, cells)
            corner = (column + shift[0], row + shift[1])
            drawn.append(_place_object(label, pools[label], corner=corner, room=room, chance=chance))
        return ScenePlan(
            size=self.size,
            objects=tuple(drawn[: len(shown)]),
            distractors=tuple(drawn[len(shown) :]),
            ground=int(generator.integers(2**63)),
            removed=removed,
        )


def read_scenes(
    location: str,
    split: str | None,
    *,
    count: PositiveInt | None = None,
    size: Annotated[int, Field(ge=32, le=MAX_SIZE)] = 128,
    company: Annotated[float, Field(ge=0, le=1)] = 0.8,
    seed: NonNegativeInt = 0,
) -> RecordSet:
    """Make the records of a split; images are drawn one by one when they are asked for.

    Args:
        location: empty, there is nothing on disk.
        split: one of `SPLITS`; `train` by default.
        count: how many scenes; 16,000 for `train` and 2,000 for the others by default.
        size: pixels per side, 32 to 4,096.
        company: probability that a host brings its companion; guests bring nobody.
        seed: 0 or more; another seed is another data set over the same digits.
    """
    if location:
        raise InputError("scenes", f"location {location!r}", "scenes are drawn, not read: write scenes: or scenes:@val")
    chosen = cast("Split", choose_split(split or "train", SPLITS, where="scenes"))
    usual = 16_000 if chosen == "train" else 2_000
    images = SceneStore(split=chosen, count=usual if count is None else count, seed=seed, size=size, company=company)
    shown = [(index, label) for index in range(len(images)) for label in images.plan(index).labels]
    states = pack_states(*np.array(shown).T, shape=(len(images), len(SCENE_LABELS)))
    return RecordSet(f"scenes:@{chosen}", SCENE_LABELS, images=images, states=states)


@cache
def _load_digits() -> tuple[NDArray[np.float32], dict[str, list[list[int]]]]:
    """Scikit-learn's digits: ink (N,8,8) in [0,1], and sample numbers by part and label."""
    pixels, target = load_digits(return_X_y=True)
    by_label = [np.flatnonzero(target == label) for label in range(len(SCENE_LABELS))]
    # Of five samples of a label three are for training; neighbours are often by one hand.
    places = {"train": (0, 3), "val": (3, 4), "test": (4, 5)}
    pools = {
        part: [samples[len(samples) * start // 5 : len(samples) * end // 5].tolist() for samples in by_label]
        for part, (start, end) in places.items()
    }
    return pixels.reshape(-1, 8, 8).astype(np.float32) / 16, pools


def _draw_cast(generator: np.random.Generator, split: Split, company: float) -> tuple[list[int], frozenset[int]]:
    """The labels that a scene is planned with, and those of them that are then removed."""
    hosts = int(generator.integers(1, 3))
    # Labels of which none is another's companion: hosts first, then a stranger for each. Four always fit.
    apart: list[int] = []
    for label in generator.permutation(len(SCENE_LABELS)).tolist():
        if not any(label == companion(other) or other == companion(label) for other in apart):
            apart.append(label)
    guests = apart[hosts:] if split == "test-broken" else [companion(label) for label in apart[:hosts]]
    brings = (generator.random(hosts) < company).tolist()
    if split == "test-removed":
        brings[0] = True
    came = [guest for guest, comes in zip(guests, brings, strict=False) if comes]
    return [*apart[:hosts], *came], frozenset(guests[:1] if split == "test-removed" else [])


def _place_object(
    label: int, pool: list[int], *, corner: tuple[float, float], room: float, chance: list[float]
) -> SceneObject:
    """Turn eight numbers in [0,1) into an object that lies within its cell."""
    pick, extent, right, down, strength, *tint = chance
    side = int(room * (SIDES[0] + extent * (SIDES[1] - SIDES[0])))
    left = int(room * corner[0] + right * (room - side))
    top = int(room * corner[1] + down * (room - side))
    # Half of the objects are darker than the ground, half lighter.
    signed = 2 * strength - 1
    contrast = math.copysign(CONTRAST[0], signed) + signed * (CONTRAST[1] - CONTRAST[0])
    red, green, blue = (contrast * (0.6 + 0.4 * share) for share in tint)
    box = PatchBox(left, top, left + side, top + side)
    return SceneObject(label, pool[int(pick * len(pool))], box, (red, green, blue))


def _draw_ground(generator: np.random.Generator, size: int) -> NDArray[np.float32]:
    """Smooth colours with straight scratches across them, (H,W,3)."""
    stretch = _stretch(4, size)
    corners = generator.uniform(90, 165, (4, 3, 4)).astype(np.float32)
    rows = (corners @ stretch.T).swapaxes(1, 2).reshape(4, -1)
    pixels = (stretch @ rows).reshape(-1, 3)
    places = np.arange(size, dtype=np.float32)
    for angle, cut, width, *shade in generator.random((SCRATCHES, 6)).tolist():
        x, y = math.cos(math.pi * angle), math.sin(math.pi * angle)
        middle = size * (0.2 + 0.6 * cut) * (x + y)
        distance = np.abs(np.add.outer(places * y - middle, places * x)).ravel()
        reach = (1 + 1.5 * width) * size / 128
        near = np.flatnonzero(distance < reach)
        ink = 1 - distance[near] / reach
        pixels[near] += np.outer(ink, np.array(shade, dtype=np.float32) * 120 - 60)
    return pixels.reshape(size, size, 3)


def _add_ink(canvas: NDArray[np.float32], item: SceneObject, ink: NDArray[np.float32]) -> None:
    left, top, right, bottom = item.box
    stretch = _stretch(8, right - left)
    mask = stretch @ ink @ stretch.T
    canvas[top:bottom, left:right] += mask[..., None] * np.array(item.shade, dtype=np.float32)


@cache
def _stretch(short: int, long: int) -> NDArray[np.float32]:
    """Matrix (long,short) of linear interpolation between pixel centres."""
    places = np.clip((np.arange(long) + 0.5) * short / long - 0.5, 0, short - 1)
    return np.clip(1 - np.abs(places[:, None] - np.arange(short)), 0, None).astype(np.float32)
