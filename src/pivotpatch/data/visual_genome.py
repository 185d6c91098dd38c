"""Read the objects of Visual Genome as multi-label data (VG-256), with a label map given or built here."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pivotpatch.data.address import Address
from pivotpatch.data.files import read_json
from pivotpatch.data.records import FileStore, LabelLists, LabelSpace, RecordSet
from pivotpatch.errors import InputError, choose_one_of

# Words that look like the plural of another thing's name.
_OWN_WORDS = frozenset({"glasses"})
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
    min_images: int = 500,
    num_labels: int = 256,
    seed: int = 1,
    protocol: Literal["own", "published"] = "own",
) -> RecordSet:
    """Read Visual Genome: a label is present where an image has an object that goes by one of the label's names.

    Every image of `objects.json` is a record, also one without any label, in the order of the image ids. That an image
    file exists is not checked here. The published protocol takes each object's first name alone, as `clean_published`
    leaves it, compares it with the names of `label_map` as they are written, leaves images without a label out, and
    splits with `numpy.random.RandomState(seed)` in place of `default_rng`.

    Args:
        location: the folder that holds `objects.json` (release 1.0, 1.2 or 1.4) and the images in `VG_100K` and
            `VG_100K_2`.
        split: train (70 %), test (30 %), or None for all images.
        label_map: JSON file, relative to `location`, that gives each label the list of its names:
            `{"bicycle": ["bicycle", "bike"], ...}`. Names are compared as `clean_name` leaves them; one that is
            listed under two labels goes to the later. By default the map of `build_label_map`.
        min_images: without `label_map`, the images a label needs, 1 or more.
        num_labels: without `label_map`, the most labels to keep, 1 or more.
        seed: seed of the split.
        protocol: "own", or "published" for labels and split of the paper; it needs its `label_map`.
    """
    published = protocol == "published"
    if published and label_map is None:
        raise InputError(location, "the published protocol needs its label map", "give label_map=FILE")
    if split not in (None, "train", "test"):
        raise InputError(location, f"there is no split {split!r}", choose_one_of(split, ["train", "test"]))
    if seed < 0:
        raise InputError(location, f"seed is {seed}", "give a whole number, 0 or more")
    root = Path(location)
    named = read_named_images(root / "objects.json", published=published)
    if label_map is None:
        forms = build_label_map(named, min_images=min_images, num_labels=num_labels)
    else:
        forms = _read_label_map(root / label_map)
    records = RecordSet(
        str(Address("vg", location, split)),
        LabelSpace(tuple(forms)),
        images=FileStore(root, _find_paths(root, named.image_ids)),
        positive=_apply_label_map(named, forms, clean=str if published else clean_name),
    )
    if published:
        records = records.select(np.unique(records.positive.rows()))
    if split is None:
        return records
    generator = np.random.RandomState(seed) if published else np.random.default_rng(seed)
    return records.select(split_images(len(records), split, generator=generator))


def split_images(
    count: int, split: str, *, generator: np.random.Generator | np.random.RandomState
) -> NDArray[np.int64]:
    """Positions of train, the first 70 % of a permutation of `count` images, or of test, the rest.

    With a `Generator` the 70 % are rounded down, with a `RandomState` the 30 % to the nearest, as published.

    >>> [len(split_images(108_249, part, generator=np.random.default_rng(1))) for part in ("train", "test")]
    [75774, 32475]
    """
    order, cut = generator.permutation(count), count * 7 // 10
    if isinstance(generator, np.random.RandomState):
        cut = count - round(0.3 * count)
    return np.sort(order[:cut] if split == "train" else order[cut:])


class NamedImages(NamedTuple):
    """The images of `objects.json`, by ascending id, and the names of their objects.

    Attributes:
        image_ids: (N,) the ids.
        names: every name that occurs, cleaned.
        shown: positions in `names` of the names in each image.
    """

    image_ids: NDArray[np.int64]
    names: list[str]
    shown: LabelLists


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
    kinds: dict[tuple[str, ...], int] = {}  # each combination is kept once: the file's own tree would fill the memory

    def convert(item: dict[str, Any]) -> object:
        if "objects" in item:
            return item.get("image_id", item.get("id")), item["objects"]  # release 1.0 says id
        return kinds.setdefault(tuple(item["names"]), len(kinds)) if isinstance(item.get("names"), list) else item

    try:
        images: Any = read_json(path, convert=convert)
        image_ids = np.array([image_id for image_id, _ in images], dtype=np.int64)
        codes = np.array([kind for _, objects in images for kind in objects], dtype=np.int64)
        rows = np.repeat(np.arange(len(images)), [len(objects) for _, objects in images])
        if published:
            cleaned = [[clean_published(name) for name in names[:1]] for names in kinds]
        else:
            cleaned = [[clean_name(name) for name in names] for names in kinds]
    except InputError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        images = []
    if not images:
        todo = "give objects.json of Visual Genome"
        raise InputError(str(path), "not a list of images with their objects and names", todo)
    order = np.argsort(image_ids, kind="stable")
    twice = image_ids[order][1:][np.diff(image_ids[order]) == 0]
    if len(twice):
        raise InputError(str(path), f"image {twice[0]} stands twice", "remove one of them")
    at: dict[str, int] = {}
    named = LabelLists.from_lists([[at.setdefault(name, len(at)) for name in names if name] for names in cleaned])
    each = named.select(codes)
    shown = LabelLists.from_pairs(rows[each.rows()], each.indices.astype(np.int64), count=len(images)).select(order)
    return NamedImages(image_ids[order], list(at), shown)


def build_label_map(named: NamedImages, *, min_images: int = 500, num_labels: int = 256) -> dict[str, list[str]]:
    """Merge the names that mean the same and keep the labels with most images.

    Names that differ only in spaces and punctuation are one ("t-shirt", "tshirt"); a name joins the one without its -s,
    -es or -ies, where that occurs. Labels stand by falling number of images, equal ones in alphabetical order.

    Args:
        named: the images and names.
        min_images: images a label needs, 1 or more.
        num_labels: the most labels to keep, 1 or more.

    Returns:
        The names of each label, that with most images first; it is the label's own.
    """
    if min_images < 1 or num_labels < 1:
        wrong = f"min_images is {min_images} and num_labels {num_labels}"
        raise InputError("label map", wrong, "give 1 or more for both")
    keys = [re.sub(r"[\W_]+", "", name) or name for name in named.names]
    root_of: dict[str, str] = {}
    for key in sorted(set(keys), key=len):  # the singular is shorter, so its own root is known by then
        root_of[key] = next((root_of[one] for one in _singulars(key) if one in root_of), key)
    at = {root: place for place, root in enumerate(dict.fromkeys(root_of.values()))}
    group_of = np.array([at[root_of[key]] for key in keys], dtype=np.int64)
    by_group = LabelLists.from_pairs(named.shown.rows(), group_of[named.shown.indices], count=len(named.image_ids))
    group_images = np.bincount(by_group.indices, minlength=len(at))
    name_images = np.bincount(named.shown.indices, minlength=len(named.names)).tolist()

    members: dict[int, list[tuple[int, str]]] = {}
    for name, group, images in zip(named.names, group_of.tolist(), name_images, strict=True):
        if group_images[group] >= min_images:
            members.setdefault(group, []).append((-images, name))
    ranked = sorted((-int(group_images[group]), [name for _, name in sorted(held)]) for group, held in members.items())
    if not ranked:
        wrong = f"no label has min_images={min_images} among {len(named.image_ids)} images"
        raise InputError("label map", wrong, "lower min_images")
    return {names[0]: names for _, names in ranked[:num_labels]}


def _singulars(key: str) -> Iterator[str]:
    """What a word may be the plural of, likeliest first."""
    if len(key) < 4 or key in _OWN_WORDS or not key.endswith("s") or key.endswith(("ss", "us", "is")):
        return
    if key.endswith("ies"):
        yield key[:-3] + "y"
    if key.endswith(("sses", "xes", "ches", "shes")):
        yield key[:-2]
    yield key[:-1]
    if key.endswith("ses"):  # horses have an e of their own, buses have not
        yield key[:-2]


def _read_label_map(path: Path) -> dict[str, list[str]]:
    content = read_json(path)
    lists = content.values() if isinstance(content, dict) else [None]
    if not all(
        isinstance(names, list) and all(isinstance(name, str) and clean_name(name) for name in names) for names in lists
    ):
        raise InputError(str(path), "it does not give each label a list of names", 'give {"label": ["name", ...], ...}')
    return cast("dict[str, list[str]]", content)


def _apply_label_map(
    named: NamedImages, forms: Mapping[str, Sequence[str]], *, clean: Callable[[str], str]
) -> LabelLists:
    """The labels of each image."""
    label_at = {clean(name): label for label, names in enumerate(forms.values()) for name in names}
    label_of = np.array([label_at.get(name, -1) for name in named.names], dtype=np.int64)
    labels = label_of[named.shown.indices]
    return LabelLists.from_pairs(named.shown.rows()[labels >= 0], labels[labels >= 0], count=len(named.image_ids))


def _find_paths(root: Path, image_ids: NDArray[np.int64]) -> pa.Array:
    """The path of each image; one listing of a folder tells in which of the two all of them are."""
    first, second = root / "VG_100K", root / "VG_100K_2"
    if not first.is_dir() and not second.is_dir():
        raise InputError(str(root), "there is neither VG_100K nor VG_100K_2", "unpack the images there")
    in_second = {path.name for path in second.iterdir()} if second.is_dir() else set()
    names = (f"{image_id}.jpg" for image_id in image_ids.tolist())
    return pa.array([f"{(second if name in in_second else first).name}/{name}" for name in names], pa.string())
