"""Scores as files: our Parquet, anybody's table with a column per label, and the tags that `predict --out` writes."""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from pivotpatch.data.records import FileStore, LabelSpace, RecordSet, Tell, keep_common_labels
from pivotpatch.data.table import IMAGE_COLUMNS, find_column
from pivotpatch.data.table_files import EmbeddedStore, open_parquet, read_columns, read_schema
from pivotpatch.errors import InputError, choose_one_of, explaining, quote, shorten
from pivotpatch.inference.scores import KINDS, Scores
from pivotpatch.runtime.parts import TagTable, read_tags
from pivotpatch.runtime.values import Calibration, Patching
from pivotpatch.writing import check_place, explain_disk_faults, replacing

SUFFIXES = (".parquet", ".csv", ".jsonl")
WRITTEN = (".parquet",)
_SCHEMA = 1
_PICTURE, _TARGET, _TRUTH, _GIVEN = "picture", "target", "target:", "given"
# What the note of our files holds beside the labels, and how each is read.
_NOTED: dict[str, Callable[[Any], Any]] = {
    "lam": float,
    "temperature": float,
    "closer_size": int,
    "overlap": float,
    "data": str,
    "network": str,
    "thresholds": lambda values: tuple(map(float, values)),
    "calibration": Calibration.from_dict,
}
_PATCHES = ("patch_logits", "weights")
_OURS = b"pivotpatch"  # the metadata of a Parquet file that is ours
_GROUP = 1 << 22  # numbers of a Parquet row group
_DAMAGED = "it is damaged, copy or write it again"
_MOST = 0.5  # share of images without scores, or of other truth, above which a file belongs to other data
# Logits of the probabilities 0 and 1: beyond those of any other that float32 holds near 0, and float64 near 1.
_LOWEST, _HIGHEST = -104.0, 37.0


def check_pictures(pictures: Sequence[str], where: str) -> None:
    """Refuse no images at all, and images of the same name, which nothing could tell apart."""
    if not pictures:
        raise InputError(where, "there are no images", "give at least one")
    twice = [name for name, count in Counter(pictures).items() if count > 1]
    if twice:
        raise InputError(where, f"{len(twice)} images stand twice ({shorten(twice)})", "give each image one row")


def write_scores(scores: Scores, path: str | Path) -> None:
    """Write scores to a .parquet file, whole or not at all; `read_scores` returns the same.

    It has a row per image and a list per kind: a column per kind and label would take longer than their numbers.
    """
    path = Path(path)
    check_place(path, WRITTEN, "scores")
    check_pictures(scores.pictures, str(path))
    LabelSpace(scores.labels)
    held = {**scores.logits, **{name: each for name in _PATCHES if (each := getattr(scores, name)) is not None}}
    # Unknown is -1, so that the target needs a byte each.
    tensors = {_TARGET: scores.target.nan_to_num(-1).to(torch.int8)}
    for name, tensor in held.items():
        _check_finite(name, tensor, str(path))
        tensors[name] = tensor if tensor.dtype == torch.float64 else tensor.float()
    tensors |= {} if scores.given is None else {_GIVEN: scores.given.to(torch.int8)}
    columns: dict[str, Any] = {_PICTURE: pa.array(map(str, scores.pictures), pa.string())}
    widest = 1
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().numpy().reshape(len(scores), -1)
        columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])
        widest = max(widest, flat.shape[1])
    note = {"schema": _SCHEMA, "labels": scores.labels, **{name: getattr(scores, name) for name in _NOTED}}
    table = pa.table(columns).replace_schema_metadata({_OURS: json.dumps(note, default=asdict)})
    with explain_disk_faults(path.parent), replacing(path) as written:
        rows = max(_GROUP // widest, 1)
        pq.write_table(table, written, compression="zstd", use_dictionary=False, row_group_size=rows)


def read_scores(
    path: str | Path,
    *,
    records: RecordSet | None = None,
    like: Scores | None = None,
    tags_alone: bool = False,
    tell: Tell | None = None,
) -> Scores:
    """Read scores that `write_scores` wrote, that other people made, or tags that `pivotpatch predict --out` wrote.

    Other people's CSV or Parquet table has a column `picture` (or one of the names that `table:` data sets use) and one
    column per label, probabilities where all of them are in [0, 1], else logits. Probabilities become logits in
    float64, 0 and 1 finite ones. `target:LABEL` columns tell the truth: 1 present, 0 absent, -1 or nothing unknown.

    Args:
        path: the file.
        records: the data set of the images. They are found in it by their names, in whatever order, and no others.
            The truth comes from it, also where the file tells one; a file where most of it is another is refused.
            The labels that both have are read.
        like: scores of the same images, whose labels, order and truth are taken instead.
        tags_alone: read tags without the probabilities of all labels, too; logits of labels that are not given are NaN.
        tell: told a line each about images of `records` that have no scores (they are left out, up to half of
            them; without `tell` there must be none), about labels that `records` lack, about truth that differs, and
            what the numbers were taken for.
    """
    path, where = Path(path), str(path)
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        wrong = "there is no such file" if path.suffix.lower() in SUFFIXES else "is no score file"
        raise InputError(where, wrong, f"name one that ends in {' or '.join(SUFFIXES)}")
    schema = read_schema(path)
    note = (schema.metadata or {}).get(_OURS)
    if note is not None:
        scores = _read_own(path, schema, note)
    elif (tags := read_tags(path)) is not None:
        scores = _take_tags(where, tags, tags_alone=tags_alone)
    else:
        asked = like.labels if like is not None else () if records is None else records.labels.names
        scores = _read_table(path, schema.names, asked=asked, tell=tell)
    if like is not None or records is not None:
        return _align(scores, where, records=records, like=like, tell=tell)
    if scores.target.isnan().all():
        todo = "add columns named target:LABEL, or name the data set of the images"
        raise InputError(where, "it does not say what is true of the images", todo)
    return scores


def _read_own(path: Path, schema: pa.Schema, note: bytes) -> Scores:
    """A file of `write_scores`, one column after the other, so that little is held twice."""
    where, arrays = str(path), dict[str, NDArray[Any]]()
    with explaining(where, "its note or a column cannot be read", _DAMAGED):
        told = json.loads(note)
        if int(told["schema"]) > _SCHEMA:
            wrong = f"schema {told['schema']} is newer than {_SCHEMA}, the newest known"
            raise InputError(where, wrong, "upgrade pivotpatch")
        labels = tuple(map(str, told["labels"]))
        noted = {name: read(told[name]) for name, read in _NOTED.items() if told.get(name) is not None}
        with open_parquet(path) as file:
            pictures = tuple(file.read(columns=[_PICTURE]).column(0).cast(pa.string()).to_pylist())
            for name in (each for each in (_TARGET, _GIVEN, *KINDS, *_PATCHES) if each in schema.names):
                column = file.read(columns=[name]).column(0)
                shape = (len(pictures), -1, len(labels)) if name in _PATCHES else (len(pictures), len(labels))
                arrays[name] = np.asarray(column.combine_chunks().flatten()).reshape(shape)
                if column.null_count:
                    raise ValueError(f"column {name!r} lacks rows")
        if len(arrays.keys() & set(_PATCHES)) == 1 or None in pictures:
            raise ValueError("names of images, or one of 'patch_logits' and 'weights', are missing")
    try:
        Patching(**{name: noted[name] for name in ("overlap", "lam", "temperature") if name in noted})
    except InputError as error:  # which does not know of which file
        raise InputError(where, *error.parts[1:]) from None
    return _make_scores(where, pictures, labels, arrays, noted)


def _read_table(path: Path, names: Sequence[str], *, asked: Sequence[str], tell: Tell | None) -> Scores:
    """A table with a column per label: what other people have, or can make in a line.

    What its numbers are is seen from labels that are asked for, where it has some: others may be no labels at all.
    """
    where, picture = str(path), find_column((_PICTURE, *IMAGE_COLUMNS), names)
    if picture is None:
        raise InputError(where, f"no column of images among {shorten(names, limit=5)}", f"name it {_PICTURE!r}")
    labels = tuple(name for name in names if name != picture and not name.startswith(_TRUTH))
    truth = tuple(name.removeprefix(_TRUTH) for name in names if name.startswith(_TRUTH))
    if truth and (strange := sorted(set(labels) ^ set(truth))):
        wrong = f"{len(strange)} labels have no scores or no target column ({shorten(strange)})"
        raise InputError(where, wrong, f"name columns like {truth[0]!r} and '{_TRUTH}{truth[0]}', and no others")
    columns = {"image": labels, **({_TARGET: [f"{_TRUTH}{label}" for label in labels]} if truth else {})}
    LabelSpace(labels)
    numbers = [name for each in columns.values() for name in each]
    table = read_columns(path, [picture, *numbers], types=dict.fromkeys(numbers, pa.float64()))
    with explaining(where, "a column holds no numbers", "leave it out", of=pa.ArrowException):
        pictures = tuple(table.column(picture).cast(pa.string()).to_pylist())
        read = {name: table.column(name).cast(pa.float64(), safe=False).to_numpy() for name in numbers}
    if not pictures or None in pictures:
        raise InputError(where, "it has no rows, or one without an image", "give at least one image, and name each")
    arrays = {kind: np.stack([read[name] for name in each], axis=1) for kind, each in columns.items()}
    judged = [place for place, label in enumerate(labels) if label in asked] or slice(None)
    image = arrays["image"]
    within: NDArray[np.bool_] = np.all((image >= 0) & (image <= 1), axis=0)
    low, high, probable = image[:, judged].min(), image[:, judged].max(), within[judged].all()
    if tell is not None and low == low:  # what is not a number is refused below
        tell(f"{where}: scores from {low:.3g} to {high:.3g} are taken for {'probabilities' if probable else 'logits'}")
    if probable:
        image[:, within] = _to_logits(image[:, within])
    return _make_scores(where, pictures, labels, arrays, {})


def _to_logits(probs: NDArray[np.float64]) -> NDArray[np.float64]:
    """In float64, so that their order and their ties stay."""
    return torch.from_numpy(probs).logit().clamp(_LOWEST, _HIGHEST).numpy()


def _take_tags(where: str, table: TagTable, *, tags_alone: bool) -> Scores:
    """The tags of `predict --out`, by the absolute paths of their images."""
    if table.all_probs is None and not tags_alone:
        raise InputError(where, "it holds the tags alone", "write it with predict --all-probs")
    with explaining(where, "its tags or its summary cannot be read", _DAMAGED):
        labels, thresholds = tuple(map(str, table.settings["labels"])), table.settings["thresholds"]
        unknown = {label for tags in table.tags for label in tags} - {*labels}
        if unknown:
            wrong = f"its tags have names of their own, such as {quote(min(unknown))}"
            raise InputError(where, wrong, "write it without --tags")
        given = np.array([[label in tags for label in labels] for tags in table.tags])
        probs = np.array(table.all_probs or [[tags.get(label, np.nan) for label in labels] for tags in table.tags])
        odd = ~((probs >= 0) & (probs <= 1)) & (given | (table.all_probs is not None))
        if odd.any():
            raise ValueError("a probability is not in [0, 1]")
        thresholds = thresholds and tuple(map(float, thresholds))
    images = tuple(map(os.path.abspath, table.images))
    target, logits = torch.full(probs.shape, torch.nan), {"image": torch.from_numpy(_to_logits(probs))}
    return Scores(labels, images, target, logits, thresholds=thresholds, given=torch.from_numpy(given))


def _make_scores(
    where: str,
    pictures: tuple[str, ...],
    labels: tuple[str, ...],
    arrays: Mapping[str, NDArray[Any]],
    noted: Mapping[str, Any],
) -> Scores:
    """Check what a file holds, and make scores of it; the target is unknown where it tells none."""
    LabelSpace(labels)
    check_pictures(pictures, where)
    target = np.array(arrays.get(_TARGET, np.full((len(pictures), len(labels)), -1)), dtype=np.float32)
    target[target == -1] = np.nan
    wrong = ~(np.isnan(target) | (target == 0) | (target == 1))
    if wrong.any():
        raise InputError(where, f"the target holds {target[wrong][0]:g}", "write 1, 0, or -1 for unknown")
    tensors: dict[str, Tensor] = {}
    for name in (each for each in (*KINDS, *_PATCHES) if each in arrays):
        values = torch.from_numpy(np.require(arrays[name], requirements=["C", "W"]))  # Arrow's arrays are not
        tensors[name] = values if values.dtype == torch.float64 else values.float()
        _check_finite(name, values, where)
    others: dict[str, Any] = {name: tensors.pop(name) for name in _PATCHES if name in tensors}
    others |= {_GIVEN: torch.from_numpy(arrays[_GIVEN] == 1)} if _GIVEN in arrays else {}
    return Scores(labels, pictures, torch.from_numpy(target), tensors, **others, **noted)


def _check_finite(name: str, values: Tensor, where: str) -> None:
    odd = (~values.isfinite()).nonzero()
    if len(odd):
        told = f"a number of {name!r} is {values[tuple(odd[0])].item():g} (row {int(odd[0, 0])})"
        raise InputError(where, told, "find where the model made it, or leave that image out")


def _align(scores: Scores, where: str, *, records: RecordSet | None, like: Scores | None, tell: Tell | None) -> Scores:
    """The same scores in the order of a data set or of other scores, and with their truth."""
    other, paired, ends = "the other scores", like is not None, dict[str, str]()
    tags = scores.given is not None and os.path.isabs(scores.pictures[0])  # noqa: PTH117 (as `predict` writes them)
    if like is None:
        assert records is not None
        if scores.labels != records.labels.names:
            records = keep_common_labels(records, scores.labels, whose=where, tell=tell or (lambda _: None))
        other, target, names = records.name, records.target(), tuple(records.names)
        like = Scores(records.labels.names, names, target, {"image": target}, indices=torch.arange(len(records)))
        if tags and isinstance(records.images, EmbeddedStore):
            ends |= {records.images.name_row(records.place(row)): name for row, name in enumerate(names)}
        if tags and isinstance(records.images, FileStore):
            root = os.path.abspath(records.images.root)  # noqa: PTH100 (resolve() would follow links)
            ends |= {os.path.normpath(PurePath(root, name)): name for name in names}
            if tell is not None and ends.keys().isdisjoint(scores.pictures):
                tell(f"{where}: none of its images lies where {other} has them; the ends of their paths have to do")
    if tags:
        lies = not ends.keys().isdisjoint(scores.pictures)  # if some lie there, an end is another image's
        wanted = ends if lies else {name: name for name in like.pictures} | ends
        scores = _name_as(scores, wanted, where, other, tell)
    there = set(scores.pictures)
    missing = [name for name in like.pictures if name not in there]
    if tell is not None and not paired and 0 < len(missing) <= _MOST * len(like):
        told = f"{len(missing):,} of {len(like):,} images of {other} have no scores and are left out"
        tell(f"{where}: {told} ({shorten(missing)})")
        like = like.select(torch.tensor([row for row, name in enumerate(like.pictures) if name in there]))
    if scores.pictures != like.pictures:
        check_pictures(like.pictures, other)
        places = _match(scores.pictures, like.pictures, what="images", where=where, other=other)
        scores = scores.select(torch.tensor(places))
    if scores.labels != like.labels:
        scores = scores.keep_labels(_match(scores.labels, like.labels, what="labels", where=where, other=other))
    known = ~(scores.target.isnan() | like.target.isnan())
    differ, count = int((known & (scores.target != like.target)).sum()), int(known.sum())
    wrong = f"{differ:,} of {count:,} known targets are not those of {other}"
    if differ > _MOST * count:
        raise InputError(where, wrong, "check that both are of the same images and labels")
    if differ and tell is not None:
        tell(f"{where}: {wrong}, which are taken")
    return replace(scores, target=like.target, indices=like.indices)


def _name_as(scores: Scores, wanted: Mapping[str, str], where: str, other: str, tell: Tell | None) -> Scores:
    """Scores of absolute paths, by the names of the wanted ends; images that nobody wants are left out."""
    found = dict[int, str]()
    for row, picture in enumerate(scores.pictures):
        parts = PurePath(picture).parts
        for start in reversed(range(len(parts))):  # the longest of several ends stays
            if (end := str(PurePath(*parts[start:]))) in wanted:
                found[row] = wanted[end]
    if not found:
        return scores
    if tell is not None and len(found) < len(scores):
        tell(f"{where}: {len(scores) - len(found):,} of {len(scores):,} images are not in {other} and are left out")
    kept = replace(scores.select(torch.tensor(list(found))), pictures=tuple(found.values()))
    check_pictures(kept.pictures, where)
    return kept


def _match(names: Sequence[str], wanted: Sequence[str], *, what: str, where: str, other: str) -> list[int]:
    """Where each wanted name stands among names; a file may know more labels than are asked for, but no more images."""
    places = {name: place for place, name in enumerate(names)}
    extra, missing = sorted(places.keys() - set(wanted)), [name for name in wanted if name not in places]
    if extra and (what == "images" or missing):
        hint = choose_one_of(extra[0], wanted) if what == "labels" else f"there they are named like {wanted[0]!r}"
        if what == "images" and len(extra) < len(places):
            hint = f"give one that holds all {len(places):,} that were scored"
        raise InputError(where, f"{len(extra)} {what} are not in {other} ({shorten(extra)})", hint)
    if missing:
        wrong = f"{len(missing)} {what} of {other} have no scores ({shorten(missing)})"
        raise InputError(where, wrong, f"score them too, or leave them out of {other}")
    return [places[name] for name in wanted]
