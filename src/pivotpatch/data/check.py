"""Tell, and draw, what a data set holds: its labels, their co-occurrence, missing, broken and doubled images."""

import hashlib
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pivotpatch.data.address import parse_address
from pivotpatch.data.records import FileStore, ImageSource, RecordSet
from pivotpatch.data.table_files import EmbeddedStore
from pivotpatch.errors import InputError, cut, shorten
from pivotpatch.process import Progress, count_cores, ignore
from pivotpatch.runtime.decoding import check_header, decode_image, open_file, read_ahead
from pivotpatch.runtime.files import is_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Depth = Literal["labels", "headers", "pixels"]
"""How far images are looked at: not at all, to their headers and ends, or to their last pixel."""

_CHUNK = 256  # images that wait for a thread
_HEAD = 8192  # bytes that a first comparison of files reads
_MOST = 100  # labels in one figure
_OPENED = 5000  # images that are opened before training
_TAIL = 64  # bytes among which an image's end is looked for
_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89PNG": b"IEND", b"GIF8": b";"}  # how files that begin so end


@dataclass(frozen=True)
class BrokenImage:
    """An image that cannot be decoded, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class DataSummary:
    """What one data set holds."""

    address: str
    num_records: int
    labels: tuple[str, ...]
    label_counts: NDArray[np.int64]  # (L,) images that show each label
    unknown_share: float  # of all image-label pairs
    # (L,L) P(column | row): of the images that show the row's label and of which the column's is known, the share that
    # shows the column's too; NaN where there is no such image.
    cooccurrence: NDArray[np.float64]
    pictures: Literal["files", "embedded", "drawn"]
    checked: Depth
    missing: tuple[str, ...] = ()  # names of images whose files are not there
    broken: tuple[BrokenImage, ...] = ()  # there, but cannot be decoded, as far as was looked
    duplicates: tuple[tuple[str, ...], ...] = ()  # names with the same bytes or, where they were decoded, pixels
    notes: tuple[str, ...] = ()  # rows that were dropped, and labels that are perhaps not meant so

    @property
    def labels_per_image(self) -> float:
        """How many labels an image has on average."""
        return float(self.label_counts.sum()) / self.num_records

    @property
    def never(self) -> tuple[str, ...]:
        """Labels that no image shows."""
        return tuple(name for name, count in zip(self.labels, self.label_counts, strict=True) if count == 0)

    def to_dict(self) -> dict[str, object]:
        """All of it in types that JSON knows; NaN becomes None."""
        counts = dict(zip(self.labels, self.label_counts.tolist(), strict=True))
        shares = [[None if np.isnan(p) else p for p in row] for row in self.cooccurrence.tolist()]
        derived = {"labels_per_picture": self.labels_per_image, "never": self.never}
        return asdict(self) | {"label_counts": counts, "cooccurrence": shares} | derived


class ImageAt(NamedTuple):
    """An image of one of several data sets."""

    address: str
    name: str


class DataReport(NamedTuple):
    """What several data sets hold, and the groups of images with the same content that lie in more than one."""

    summaries: tuple[DataSummary, ...]
    shared: tuple[tuple[ImageAt, ...], ...]

    def to_dict(self) -> dict[str, object]:
        """All of it in types that JSON knows."""
        shared = [[image._asdict() for image in group] for group in self.shared]
        return {"summaries": [summary.to_dict() for summary in self.summaries], "shared": shared}


def check_data(sets: Sequence[RecordSet], *, depth: Depth = "headers", progress: Progress = ignore) -> DataReport:
    """Summarise data sets, and look at their images.

    Equal images are found exactly: files with the same size and beginning are read to their end and compared by
    content. Images that are drawn when asked for cannot be missing or broken, and are not looked at.

    Args:
        sets: one or more data sets.
        depth: how far to look at images. "headers" finds what is missing, no image at all, or a JPEG, PNG, GIF or WebP
            file that does not end as it should and cannot be decoded; only "pixels" finds all other damage.
        progress: told how many images have been looked at.
    """
    for records in sets:
        if not len(records):
            raise InputError(records.name, "holds no records", "give a data set with at least one image")
    depths: list[Depth] = ["labels" if _find_kind(records) == "drawn" else depth for records in sets]
    total = sum(len(records) for records, at in zip(sets, depths, strict=True) if at != "labels")
    looks: list[list[_Look]] = [[] for _ in sets]
    for held, records, at in zip(looks, sets, depths, strict=True):
        for results in _look_at(records, at) if at != "labels" else ():
            held.extend(results)
            progress("look at images", sum(map(len, looks)), total)
    groups = list(_find_equal(sets, looks, depth))
    within = [[[record for at, record in group if at == place] for group in groups] for place in range(len(sets))]
    summaries = map(_summarise, sets, looks, depths, within)
    across = (group for group in groups if len({at for at, _ in group}) > 1)
    shared = (tuple(ImageAt(sets[at].name, sets[at].name_at(record)) for at, record in group) for group in across)
    return DataReport(tuple(summaries), tuple(shared))


# What one look at an image tells: bytes that are the same for the same content (at a file's header, only a first
# sieve), why it cannot be decoded, or None where its file is missing.
_Look = bytes | InputError | None


def _find_kind(records: RecordSet) -> Literal["files", "embedded", "drawn"]:
    if isinstance(records.images, FileStore):
        return "files"
    return "embedded" if isinstance(records.images, EmbeddedStore) else "drawn"


def _look_at(records: RecordSet, depth: Depth, *, step: int = 1) -> Iterator[list[_Look]]:
    """Looks at all images, in order, a chunk at a time so that memory stays flat.

    Only every `step`-th is opened; of the others, files must be there.
    """

    def look(index: int) -> _Look:
        if index % step and not isinstance(records.images, FileStore):
            return b""
        source = records.source_at(index)
        if isinstance(source, Path) and not source.exists():
            return None
        return b"" if index % step else _digest(source, depth)

    # Threads: those that read headers wait for the disk, and decoders let other threads run.
    threads = count_cores() if depth == "pixels" else 8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from read_ahead(range(len(records)), look, batch_size=_CHUNK, threads=threads)


def _digest(source: ImageSource, depth: Depth) -> bytes:
    if depth == "pixels":
        pixels = np.ascontiguousarray(decode_image(source))
        whole = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
        whole.update(pixels.data)
        return whole.digest()
    assert not isinstance(source, np.ndarray)  # drawn images never get here
    with open_file(source) if isinstance(source, Path) else BytesIO(source) as file:
        check_header(file)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL, 0))
        tail = file.read()
        file.seek(0)
        head = file.read(_HEAD)
    end = next((end for start, end in _ENDS.items() if head.startswith(start)), b"")
    if end not in tail or (head.startswith(b"RIFF") and int.from_bytes(head[4:8], "little") + 8 > size):
        decode_image(source, size=(_TAIL, _TAIL))  # is it cut short, or is there only something behind it?
    return hashlib.blake2b(size.to_bytes(8, "little") + head, digest_size=16).digest()


def _find_equal(
    sets: Sequence[RecordSet], looks: Sequence[Sequence[_Look]], depth: Depth
) -> Iterator[list[tuple[int, int]]]:
    """Groups of images with equal content, each given by its data set and record."""
    sieve: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for place, held in enumerate(looks):
        for record, look in enumerate(held):
            if isinstance(look, bytes):
                sieve[look].append((place, record))
    for key, group in sieve.items():
        equal: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for place, record in group if len(group) > 1 else ():
            source = sets[place].source_at(record) if depth == "headers" else key
            content = source.read_bytes() if isinstance(source, Path) else bytes(source)
            equal[hashlib.blake2b(content).digest()].append((place, record))
        yield from (members for members in equal.values() if len(members) > 1)


def _summarise(records: RecordSet, looks: Sequence[_Look], checked: Depth, equal: list[list[int]]) -> DataSummary:
    return DataSummary(
        address=records.name,
        num_records=len(records),
        labels=records.labels.names,
        label_counts=records.count_labels(),
        unknown_share=int((records.states.data < 0).sum()) / (len(records) * len(records.labels)),
        cooccurrence=_count_cooccurrence(records),
        pictures=_find_kind(records),
        checked=checked,
        missing=tuple(records.name_at(i) for i, look in enumerate(looks) if look is None),
        broken=tuple(
            BrokenImage(records.name_at(i), look.parts[1])
            for i, look in enumerate(looks)
            if isinstance(look, InputError)
        ),
        duplicates=tuple(tuple(map(records.name_at, group)) for group in equal if len(group) > 1),
        notes=(*records.notes, *doubt_labels(records)),
    )


def doubt_labels(*sets: RecordSet) -> list[str]:
    """Lines about labels of some sets together that are perhaps not meant so, for example seen in one image alone."""
    names = sets[0].labels.names
    shown = np.sum([records.count_labels() for records in sets], axis=0)
    absent = sum(map(len, sets)) - shown - np.sum([records.count_labels(-1) for records in sets], axis=0)
    alike = defaultdict[str, list[str]](list)
    for name, count in zip(names, shown, strict=True):
        alike["".join(name.split()).casefold()].append(f"{name} ({count:,})")
    found = {
        "{} seen in one image alone, too few to learn and to split (label more, or see data.labels)": [
            name for name, count in zip(names, shown, strict=True) if count == 1
        ],
        "{} in every image where that is known, so not learned (add images without; 0 or no mention means absent)": [
            name for name, seen, none in zip(names, shown, absent, strict=True) if seen and not none
        ],
        "labels that differ by capitals or blanks alone are learned as different ones (write them alike)": [
            " and ".join(group) for group in alike.values() if len(group) > 1
        ],
    }
    return [
        f"{line.format('1 label is' if len(named) == 1 else f'{len(named)} labels are')}: {shorten(named, limit=10)}"
        for line, named in found.items()
        if named
    ]


def find_unreadable(sets: Sequence[RecordSet], *, progress: Progress = ignore) -> list[InputError]:
    """What is wrong with images before any is needed: all files must be there, and 5,000 images in all are opened."""
    sets = [records for records in sets if _find_kind(records) != "drawn"]
    total, faults, done = sum(map(len, sets)), list[InputError](), 0
    for records in sets:
        looks = _look_at(records, "headers", step=-(-total // _OPENED))
        for index, look in enumerate(look for chunk in looks for look in chunk):
            if not isinstance(look, bytes):
                name = records.name_at(index)
                where = records.images.root / name if isinstance(records.images, FileStore) else name
                todo = "replace it, take its row out, or skip such images with data.on_error=skip"
                wrong = look.parts[1] if look else "there is no such file" if faults else _explain_missing(where)
                faults.append(InputError(str(where), wrong, todo))
            done += 1
            if len(faults) == _OPENED:  # enough to see what is wrong, and millions would fill the memory
                return faults
            if done % _CHUNK == 0 or done == total:
                progress("look at images", done, total)
    return faults


def _explain_missing(where: Path | str) -> str:
    """What is wrong where there is no image: perhaps one of nearly that name is, with a suffix or other capitals."""
    path = Path(where)
    if ":/" in str(path):
        return "images are not fetched from the web; download them first"
    wanted = path.name.strip().casefold()
    try:
        names = [name for name in os.listdir(path.parent) if is_image(name)]  # noqa: PTH208 (text, not paths)
    except OSError:
        names = []
    near = next((name for name in names if wanted in (name.casefold(), Path(name).stem.casefold())), None)
    return "there is no such file" + ("" if near is None else f", but {near!r} is there")


def count_shared(records: RecordSet, *others: RecordSet) -> list[int]:
    """How many images of each of the others are among the first, too, by what names them."""
    known = set(_identify(records)) if others else set()
    return [sum(name in known for name in _identify(each)) for each in others]


def digest_images(records: RecordSet | None) -> str:
    """What tells a set of images from others, by their names; nothing for none."""
    if records is None:
        return ""
    return hashlib.sha256("\0".join(sorted(records.names)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _identify(records: RecordSet) -> list[str]:
    """What tells an image from all others: a file's path; else its name in its data set, and the seed of scenes."""
    images = records.images
    if isinstance(images, FileStore):
        root = images.root.resolve()
    else:  # options of an address choose images or say how one is read
        root = Path(parse_address(records.name).location, str(getattr(images, "seed", ""))).resolve()
    return [os.path.normpath(os.path.join(root, name)) for name in records.names]  # noqa: PTH118 (quick, of millions)


def _count_cooccurrence(records: RecordSet) -> NDArray[np.float64]:
    """P(column | row) (L,L) as in `DataSummary.cooccurrence`."""
    shown, unknown = ((records.states == state).astype(np.float64) for state in (1, -1))
    together, doubtful = ((shown.T @ other).toarray() for other in (shown, unknown))
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: nothing is known
        shares: NDArray[np.float64] = together / (together.diagonal()[:, None] - doubtful)
    return shares


def plot_overview(summary: DataSummary) -> "Figure":
    """Images of each label as bars, and P(column | row) of all pairs; of many labels, the 100 most frequent."""
    from matplotlib.figure import Figure

    order = np.argsort(-summary.label_counts, kind="stable")[:_MOST]
    names, places, side = [cut(summary.labels[i], 24) for i in order], np.arange(len(order)), max(0.18 * len(order), 4)
    figure = Figure(figsize=(side + 7, side + 2), layout="constrained", dpi=150)
    each = f"{summary.num_records:,} images, {len(names)} of {len(summary.labels)} labels"
    figure.suptitle(f"{summary.address}: {each}", parse_math=False)
    bars, matrix = figure.subplots(1, 2, width_ratios=[3.6, side + 3.4])
    bars.bar_label(bars.barh(places, summary.label_counts[order]), fmt="{:,.0f}", padding=2, fontsize=7)
    bars.margins(x=0.15)  # for the longest bar's number
    bars.set_yticks(places, names, fontsize=7, parse_math=False)
    bars.set(ylim=(len(order) - 0.5, -0.5), xlabel="images")
    shares = np.where(np.eye(len(order), dtype=bool), np.nan, summary.cooccurrence[np.ix_(order, order)])
    matrix.set_facecolor("lightgrey")  # the diagonal, and what nobody knows
    shades = matrix.imshow(np.ma.masked_invalid(shares), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    matrix.set_xticks(places, names, rotation=90, fontsize=7, parse_math=False)
    matrix.set_yticks(places, names, fontsize=7, parse_math=False)
    matrix.set(ylabel="where this label is ...", xlabel="... this one is there too in this share of the images")
    figure.colorbar(shades, ax=matrix, shrink=0.6, aspect=30, label="P(column | row)")
    return figure
