"""Read the objects of Visual Genome as multi-label data (VG-256), with a label map given or built here."""

import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray
from pydantic import NonNegativeInt, PositiveInt, TypeAdapter
from scipy.sparse import csr_array

from pivotpatch.data.address import choose_split
from pivotpatch.data.records import FileStore, LabelSpace, RecordSet
from pivotpatch.errors import InputError, explaining
from pivotpatch.runtime.files import read_json

# What the published protocol takes from the front of a name.
_ADJECTIVES = frozenset({
    "white", "black", "blue", "green", "red", "brown", "yellow", "small", "large", "silver", "wooden", "orange", "gray",
    "grey", "metal", "pink", "tall", "long", "dark",
})  # fmt: skip


def read_visual_genome(
    location: str,
    split: str | None,
    *,
    label_map: str | None = None,
    min_images: PositiveInt = 500,
    num_labels: PositiveInt = 256,
    seed: NonNegativeInt = 1,
    protocol: Literal["own", "published"] = "own",
) -> RecordSet:
    """Read Visual Genome: a label is present where an image has an object that goes by one of the label's names.

    Every image of `objects.json` is a record, also one without any label, in the order of the image ids. The published
    protocol takes each object's first name alone, as `clean_published` leaves it, compares it with the names of
    `label_map` as they are written, leaves images without a label out, and splits with `RandomState(seed)`.

    Args:
        location: the folder that holds `objects.json` (release 1.0, 1.2 or 1.4) and the images in `VG_100K` and
            `VG_100K_2`.
        split: train (70 %), test (30 %), or None for all images.
        label_map: JSON file, relative to `location`, that gives each label the list of its names:
            `{"bicycle": ["bicycle", "bike"], ...}`; one under two labels goes to the later. By default the map of
            `build_label_map`.
        min_images: without `label_map`, the images a label needs, 1 or more.
        num_labels: without `label_map`, the most labels to keep, 1 or more.
        seed: seed of the split.
        protocol: "own", or "published" for labels and split of the paper; it needs its `label_map`.
    """
    published = protocol == "published"
    if published and label_map is None:
        raise InputError(location, "the published protocol needs its label map", "give label_map=FILE")
    if split is not None:
        choose_split(split, ["train", "test"], where=location)
    root = Path(location)
    named = read_named_images(root / "objects.json", published=published)
    if label_map is None:
        forms = build_label_map(named, min_images=min_images, num_labels=num_labels)
    else:
        forms = _read_label_map(root / label_map)
    clean = str if published else clean_name
    label_at = {clean(name): label for label, names in enumerate(forms.values()) for name in names}
    states = _group(named, [label_at.get(name, -1) for name in named.names], count=len(forms)).astype(np.int8)
    images = FileStore(root, _find_paths(root, named.image_ids))
    records = RecordSet(location, LabelSpace(tuple(forms)), images=images, states=states)
    if published:
        records = records.select(np.flatnonzero(states.sum(1)))
    if split is None:
        return records
    count = len(records)
    order = (np.random.RandomState(seed) if published else np.random.default_rng(seed)).permutation(count)
    cut = count - round(0.3 * count) if published else count * 7 // 10
    return records.select(np.sort(order[:cut] if split == "train" else order[cut:]))


class NamedImages(NamedTuple):
    """The images of `objects.json`, by ascending id, and the names of their objects."""

    image_ids: NDArray[np.int64]
    names: list[str]  # every one that occurs, cleaned
    shown: csr_array  # (images, names) bool, which image has an object of which name
    synsets: list[Counter[str]]  # for each name, how many objects of that name have which synset


def clean_name(name: str) -> str:
    """A name in lower case, with single spaces between its words and no punctuation around it.

    >>> clean_name("  Traffic   Light. ")
    'traffic light'
    """
    return " ".join(name.lower().split()).strip(" .,;:!?'\"")


def clean_published(name: str) -> str:
    """A name as the published protocol compares it: in lower case, without a last full stop, and without adjectives.

    Only if every word but the last is one of 19 adjectives, the last word alone is left.

    >>> clean_published("Tall wooden Pole."), clean_published("tall street light")
    ('pole', 'tall street light')
    """
    cleaned = name.lower().strip()
    if cleaned.endswith("."):
        cleaned = cleaned[:-1].strip()
    *first, last = cleaned.split() or [""]
    return last if first and set(first) <= _ADJECTIVES else cleaned


def read_named_images(path: Path, *, published: bool = False) -> NamedImages:
    """Read the names of all objects of `objects.json`; of each object only the first where `published`."""
    clean = cache(clean_published if published else clean_name)
    at: dict[str, int] = {}
    synsets: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def convert(item: dict[str, Any]) -> object:
        """Positions of names in place of each object and each image: the file's own tree would fill the memory."""
        if "objects" in item:
            return item.get("image_id", item.get("id")), sorted({name for names in item["objects"] for name in names})
        names, kinds = item["names"], item.get("synsets") or []  # release 1.0 has no synsets
        if not isinstance(names, list):
            raise TypeError
        places = [at.setdefault(name, len(at)) for each in names[: 1 if published else None] if (name := clean(each))]
        if len(places) == len(names) == len(kinds) == 1:  # of several nothing says which belong together
            synsets[places[0]][kinds[0]] += 1
        return places

    wrong = "not a list of images with their objects, names and synsets"
    faults = (TypeError, ValueError, KeyError, AttributeError, OverflowError)
    with explaining(str(path), wrong, "give objects.json of Visual Genome", of=faults):
        images = cast("list[tuple[int, list[int]]]", read_json(path, convert=convert))
        if not images:
            raise ValueError
        image_ids = np.array([image_id for image_id, _ in images], dtype=np.int64)
        rows = np.repeat(np.arange(len(images)), [len(names) for _, names in images])
        shown = _mark(rows, [name for _, names in images for name in names], (len(images), len(at)))
    order = np.argsort(image_ids, kind="stable")
    image_ids = image_ids[order]
    twice = image_ids[1:][np.diff(image_ids) == 0]
    if len(twice):
        raise InputError(str(path), f"image {twice[0]} stands twice", "remove one of them")
    return NamedImages(image_ids, list(at), shown[order], [synsets[place] for place in range(len(at))])


def build_label_map(named: NamedImages, *, min_images: int = 500, num_labels: int = 256) -> dict[str, list[str]]:
    """Merge the names that mean the same and keep the labels with most images.

    1. Spelling: names that differ only in spaces and punctuation are one ("t-shirt", "tshirt").
    2. Meaning: names with the same synset are one, where a name's synset is the one that more than half of its
       objects with a synset have ("tree", "trees"); a name without such a synset stays on its own.

    A label is called by its name with most images, which comes first in its list. Labels stand by falling number of
    images, equal ones in alphabetical order; those with fewer than `min_images` are left out.
    """
    _, group_of = np.unique(_group_names(named), return_inverse=True)
    group_images = _group(named, group_of, count=len(named.names)).sum(0).tolist()
    members: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for name, group, images in zip(named.names, group_of.tolist(), named.shown.sum(0).tolist(), strict=True):
        if group_images[group] >= min_images:
            members[group].append((-images, name))
    ranked = sorted((-group_images[group], [name for _, name in sorted(held)]) for group, held in members.items())
    if not ranked:
        wrong = f"no label has min_images={min_images} among {len(named.image_ids)} images"
        raise InputError("label map", wrong, "lower min_images")
    return {names[0]: names for _, names in ranked[:num_labels]}


def _group_names(named: NamedImages) -> list[str]:
    """What each name is merged under: a synset, or its spelling."""
    keys = [re.sub(r"[\W_]+", "", name) or name for name in named.names]
    synsets: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for key, counts in zip(keys, named.synsets, strict=True):
        synsets[key].update(counts)
    return [_main_synset(synsets[key]) or key for key in keys]


def _main_synset(counts: Counter[str]) -> str | None:
    """The synset that more than half of the objects have."""
    return next((synset for synset, count in counts.items() if 2 * count > counts.total()), None)


def _read_label_map(path: Path) -> dict[str, list[str]]:
    with explaining(str(path), "does not give each label a list of names", 'write {"label": ["name", ...], ...}'):
        return TypeAdapter(dict[str, list[str]]).validate_python(read_json(path))


def _group(named: NamedImages, group_of: ArrayLike, *, count: int) -> csr_array:
    """Which image has a name of which group, (images, count) bool; names whose group is negative have none."""
    groups = np.asarray(group_of)
    names = np.flatnonzero(groups >= 0)
    return (named.shown @ _mark(names, groups[names], (len(groups), count))).sorted_indices()


def _mark(rows: ArrayLike, columns: ArrayLike, shape: tuple[int, int]) -> csr_array:
    """True at these places; products of such matrices are True where any path leads."""
    return csr_array((np.ones(np.size(rows), dtype=bool), (rows, columns)), shape=shape)


def _find_paths(root: Path, image_ids: NDArray[np.int64]) -> pa.Array:
    """The path of each image; one listing of a folder tells in which of the two all of them are."""
    first, second = root / "VG_100K", root / "VG_100K_2"
    if not first.is_dir() and not second.is_dir():
        raise InputError(str(root), "there is neither VG_100K nor VG_100K_2", "unpack the images there")
    in_second = {path.name for path in second.iterdir()} if second.is_dir() else set()
    names = (f"{image_id}.jpg" for image_id in image_ids.tolist())
    return pa.array([f"{(second if name in in_second else first).name}/{name}" for name in names], pa.string())
