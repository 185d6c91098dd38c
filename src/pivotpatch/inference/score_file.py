"""Scores as files: Parquet or CSV, written by us or by anybody else."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from pivotpatch.core.counterfactual import check_lam, check_temperature
from pivotpatch.data.decoding import MAX_SIDE
from pivotpatch.data.records import LabelSpace, RecordSet, Tell, keep_common_labels
from pivotpatch.data.table import IMAGE_COLUMNS, find_column
from pivotpatch.data.table_files import open_parquet, read_columns, read_schema
from pivotpatch.errors import InputError, choose_one_of, quote, shorten
from pivotpatch.inference.scores import KINDS, Scores
from pivotpatch.writing import explain_disk_faults, replacing

Scale = Literal["auto", "logits", "probs"]
"""What scores of no stated kind are; "auto" takes them for probabilities where all of them are in [0, 1]."""
SUFFIXES = (".parquet", ".csv")
_SCHEMA = 1
_PICTURE, _TARGET, _UNSTATED = "picture", "target", "scores"  # the last: scores whose kind a file does not tell
_CONSTANTS = ("lam", "temperature", "closer_size")  # columns of a table with one value
_NOTED = (*_CONSTANTS, "overlap", "data", "network")
_NOTE = b"pivotpatch"  # the metadata of a Parquet file that is ours
_GROUP = 1 << 22  # numbers of a Parquet row group
_DAMAGED = "it is damaged, copy or write it again"
_MOST = 0.5  # share of images without scores, or of other truth, above which a file belongs to other data
# Logits of the probabilities 0 and 1: beyond those of any other that float32 holds near 0, and float64 near 1.
_LOWEST, _HIGHEST = -104.0, 37.0


class _Content(NamedTuple):
    """What a file holds, as it stands there; N images, L labels, P patches.

    Attributes:
        where: the file, for messages.
        pictures: N names.
        labels: L names.
        arrays: "target" and each kind of logits, or `_UNSTATED`, (N,L); "patch_logits" and "weights" (N,P,L).
        noted: those of `_NOTED` that it tells.
    """

    where: str
    pictures: tuple[str, ...]
    labels: tuple[str, ...]
    arrays: Mapping[str, NDArray[Any]]
    noted: Mapping[str, Any]


class _Truth(NamedTuple):
    """What is true of images, from another place than the file; `paired` where each image must have scores."""

    where: str
    pictures: tuple[str, ...]
    labels: tuple[str, ...]
    target: Tensor
    indices: Tensor | None
    paired: bool = False


def check_score_file(path: Path, *, patches: bool = False) -> None:
    """Refuse a name that scores cannot be written to, before the work that makes them."""
    _check_suffix(path)
    if patches and path.suffix.lower() == ".csv":
        raise InputError(str(path), "a CSV file cannot hold patches", "write .parquet, or leave them out")
    if not path.absolute().parent.is_dir():
        raise InputError(str(path), f"there is no folder {path.parent}", "make it first")


def check_pictures(pictures: Sequence[str], where: str) -> None:
    """Refuse images of the same name, which nothing could tell apart."""
    twice = [name for name, count in Counter(pictures).items() if count > 1]
    if twice:
        raise InputError(where, f"{len(twice)} images stand twice ({shorten(twice)})", "give each image one row")


def _check_suffix(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(str(path), "is no score file", f"name one that ends in {' or '.join(SUFFIXES)}")


def write_scores(scores: Scores, path: str | Path) -> None:
    """Write scores to a .parquet or .csv file, whole or not at all; `read_scores` returns the same."""
    path = Path(path)
    check_score_file(path, patches=scores.patch_logits is not None)
    check_pictures(scores.pictures, str(path))
    # Unknown is -1, so that the target needs a byte each.
    tensors = {_TARGET: scores.target.nan_to_num(-1).to(torch.int8), **scores.logits}
    tensors |= {name: held for name in ("patch_logits", "weights") if (held := getattr(scores, name)) is not None}
    arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
    with explain_disk_faults(path.parent), replacing(path) as written:
        (_write_csv if path.suffix.lower() == ".csv" else _write_parquet)(scores, arrays, written)


def _write_parquet(scores: Scores, arrays: Mapping[str, NDArray[Any]], path: Path) -> None:
    """One row per image, one list per kind: tens of thousands of columns would take longer than their numbers."""
    columns: dict[str, Any] = {_PICTURE: pa.array(scores.pictures, pa.string())}
    for name, array in arrays.items():
        flat = array.reshape(len(array), -1)
        columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])
    note = {"schema": _SCHEMA, "labels": scores.labels, **{name: getattr(scores, name) for name in _NOTED}}
    table = pa.table(columns).replace_schema_metadata({_NOTE: json.dumps(note)})
    width = max(array[:1].size for array in arrays.values())
    pq.write_table(table, path, compression="zstd", use_dictionary=False, row_group_size=max(_GROUP // width, 1))


def _write_csv(scores: Scores, arrays: Mapping[str, NDArray[Any]], path: Path) -> None:
    """One column per kind and label."""
    columns: dict[str, Any] = {_PICTURE: pa.array(scores.pictures)}
    constants = {name: getattr(scores, name) for name in _CONSTANTS}
    columns |= {name: pa.array(np.full(len(scores), value)) for name, value in constants.items() if value is not None}
    for kind, array in arrays.items():
        by_label = np.asfortranarray(array)
        columns |= {f"{kind}:{label}": pa.array(by_label[:, place]) for place, label in enumerate(scores.labels)}
    pacsv.write_csv(pa.table(columns), path)


def read_scores(
    path: str | Path,
    *,
    records: RecordSet | None = None,
    like: Scores | None = None,
    scale: Scale = "auto",
    tell: Tell | None = None,
) -> Scores:
    """Read scores that `write_scores` wrote, or that other people made.

    Their CSV or Parquet table has a column `picture` (or one of the names that `table:` data sets use) and one column
    per label. `target:LABEL` columns tell the truth: 1 present, 0 absent, -1 or nothing unknown. Columns of logits may
    tell their kind: `image:LABEL`, `patch:LABEL`, `tde:LABEL`, and then `lam` and `temperature` beside them.

    Args:
        path: the file.
        records: the data set of the images. They are found in it by their names, in whatever order, and no others.
            The truth comes from it, also where the file tells one; a file where most of it is another is refused.
            Its labels may be more than the file's, or with `tell` fewer: those that both have are read.
        like: scores of the same images, whose labels, order and truth are taken instead.
        scale: what scores of no stated kind are. Probabilities become logits in float64, 0 and 1 finite ones.
        tell: told a line each about images of `records` that have no scores (they are left out, up to half of
            them; without `tell` there must be none), about labels that `records` lack (likewise), about truth that
            differs, and what "auto" took the scores for.
    """
    path = Path(path)
    _check_suffix(path)
    if not path.is_file():
        raise InputError(str(path), "there is no such file", "check the path")
    schema = read_schema(path)
    note = (schema.metadata or {}).get(_NOTE)
    content = _read_table(path, schema) if note is None else _read_own(path, schema, note)
    truth = None
    if like is not None:
        truth = _Truth("the other scores", like.pictures, like.labels, like.target, like.indices, paired=True)
    elif records is not None:
        truth = _describe_records(records, content, tell)
    return _complete(content, truth, scale=scale, tell=tell)


def _read_own(path: Path, schema: pa.Schema, note: bytes) -> _Content:
    """A file of `_write_parquet`, one column after the other, so that little is held twice."""
    where = str(path)
    try:
        told = json.loads(note)
        version, labels = int(told["schema"]), tuple(map(str, told["labels"]))
        noted = {name: told[name] for name in _NOTED if told.get(name) is not None}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise InputError(where, "its note about labels cannot be read", _DAMAGED) from None
    if version > _SCHEMA:
        raise InputError(where, f"schema {version} is newer than {_SCHEMA}, the newest known", "upgrade pivotpatch")
    if not labels or _PICTURE not in schema.names:
        raise InputError(where, f"it has no labels or no column {_PICTURE!r}", _DAMAGED)
    arrays: dict[str, NDArray[Any]] = {}
    with open_parquet(path) as file:
        pictures = tuple(file.read(columns=[_PICTURE]).column(0).cast(pa.string()).to_pylist())
        for field in schema:
            if field.name == _PICTURE:
                continue
            whole = field.name in (_TARGET, *KINDS)
            size = field.type.list_size if pa.types.is_fixed_size_list(field.type) else 0
            column = file.read(columns=[field.name]).column(0)
            values = column.combine_chunks().flatten() if size else ()
            sized = size % len(labels) == 0 and (size == len(labels) or not whole)
            if not size or not sized or column.null_count or len(values) != len(pictures) * size:
                wrong = f"column {field.name!r} is {field.type} for {len(labels)} labels, or lacks rows"
                raise InputError(where, wrong, _DAMAGED)
            shape = (len(pictures), len(labels)) if whole else (len(pictures), size // len(labels), len(labels))
            arrays[field.name] = np.asarray(values).reshape(shape)
    if ("patch_logits" in arrays) != ("weights" in arrays) or None in pictures or not pictures:
        raise InputError(where, "images, 'patch_logits' or 'weights' are missing", _DAMAGED)
    return _Content(where, pictures, labels, arrays, noted)


def _read_table(path: Path, schema: pa.Schema) -> _Content:
    """A table with a column per label: what other people have, or can make in a line."""
    where = str(path)
    picture, by_kind, constants = _choose_columns(schema.names, where)
    types: dict[str, pa.DataType] = dict.fromkeys(constants, pa.float64())
    for kind, columns in by_kind.items():
        types |= dict.fromkeys(columns.values(), pa.float64() if kind == _UNSTATED else pa.float32())
    table = read_columns(path, [picture, *types], types=types)
    for name in types:
        found = table.schema.field(name).type
        if not (pa.types.is_floating(found) or pa.types.is_integer(found) or pa.types.is_boolean(found)):
            raise InputError(where, f"column {name!r} holds {found}, no numbers", "leave it out, or correct it")
    names = table.column(picture).cast(pa.string())
    if table.num_rows == 0 or names.null_count:
        wrong = f"{names.null_count} rows have no image in {picture!r}" if names.null_count else "the table has no rows"
        raise InputError(where, wrong, "give at least one image, and name each one")
    labels = tuple(next(columns for kind, columns in by_kind.items() if kind != _TARGET))
    arrays = {kind: _stack(table, [columns[label] for label in labels]) for kind, columns in by_kind.items()}
    noted = {name: _read_constant(table, name, where) for name in constants}
    return _Content(where, tuple(names.to_pylist()), labels, arrays, noted)


def _choose_columns(names: Sequence[str], where: str) -> tuple[str, dict[str, dict[str, str]], list[str]]:
    """Which column names the images, which hold a label by kind, and which are constant."""
    unnamed = [name for name in names if not name.strip() or name.startswith("__index_level_")]
    if unnamed:
        todo = "write the table without row numbers (pandas: index=False)"
        raise InputError(where, f"a column is named {unnamed[0]!r}", todo)
    picture = find_column((_PICTURE, *IMAGE_COLUMNS), names)
    if picture is None:
        raise InputError(where, f"no column of images among {shorten(names, limit=5)}", f"name it {_PICTURE!r}")
    by_kind: dict[str, dict[str, str]] = {}
    plain = []
    for name in names:
        kind, colon, label = name.partition(":")
        if colon and kind in (_TARGET, *KINDS):
            by_kind.setdefault(kind, {})[label] = name
        elif name != picture:
            plain.append(name)
    stated = by_kind.keys() & set(KINDS)
    constants = [name for name in plain if stated and name in _CONSTANTS]
    if not stated:
        by_kind[_UNSTATED] = {name: name for name in plain}
    elif len(plain) > len(constants):
        strange = next(name for name in plain if name not in _CONSTANTS)
        todo = "leave it out, or write its kind before all labels, such as image:cat"
        raise InputError(where, f"column {strange!r} stands beside those of a stated kind", todo)
    labels = {kind: set(columns) for kind, columns in by_kind.items()}
    first = next(kind for kind in by_kind if kind != _TARGET)
    for kind, others in labels.items():
        if strange_labels := sorted(labels[first] ^ others):
            wrong = f"{len(strange_labels)} labels have no {first} or no {kind} column ({shorten(strange_labels)})"
            raise InputError(where, wrong, choose_one_of(strange_labels[0], labels[first] & others))
    return picture, by_kind, constants


def _stack(table: pa.Table, names: Sequence[str]) -> NDArray[Any]:
    """Columns of numbers as one array (N,L), NaN where there is none."""
    kinds = {table.schema.field(name).type for name in names}
    by_label = np.empty((len(names), table.num_rows), np.float32 if kinds <= {pa.float32()} else np.float64)
    for place, name in enumerate(names):
        column = table.column(name)
        by_label[place] = (column.cast(pa.int8()) if column.type == pa.bool_() else column).to_numpy()
    stacked: NDArray[Any] = torch.from_numpy(by_label).T.contiguous().numpy()  # NumPy takes several times as long
    return stacked


def _read_constant(table: pa.Table, name: str, where: str) -> float:
    values = table.column(name).to_numpy()
    if not (values == values[0]).all():
        raise InputError(where, f"column {name!r} changes from row to row", "give one value for all images")
    return float(values[0])


def _describe_records(records: RecordSet, content: _Content, tell: Tell | None) -> _Truth:
    """What a data set says of its images, for the labels of a file; it must know all of them, or somebody is told."""
    if content.labels != records.labels.names:
        if tell is None:
            records = records.keep_labels(content.labels)
        else:
            records = keep_common_labels(records, content.labels, whose=content.where, tell=tell)
    names = tuple(records.images.name(records.place(index)) for index in range(len(records)))
    return _Truth(records.name, names, records.labels.names, records.target(), torch.arange(len(records)))


def _complete(content: _Content, truth: _Truth | None, *, scale: Scale, tell: Tell | None) -> Scores:
    """Check what a file holds and make scores of it, in the order of `truth` where that is given."""
    where, arrays, noted = content.where, content.arrays, dict(content.noted)
    LabelSpace(content.labels)
    check_pictures(content.pictures, where)
    own = _read_target(arrays[_TARGET], where) if _TARGET in arrays else None
    rows = columns = None
    if truth is not None:
        truth = _leave_out(truth, content.pictures, where, tell)
        rows = _match(content.pictures, truth.pictures, what="images", where=where, other=truth)
        columns = _match(content.labels, truth.labels, what="labels", where=where, other=truth)

    def arrange(values: NDArray[Any]) -> Tensor:
        values = values if rows is None else values[rows]
        values = values if columns is None else values[..., columns]
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))  # Arrow's arrays are not

    if truth is None:
        if own is None:
            todo = "add columns named target:LABEL, or name the data set of the images"
            raise InputError(where, "it does not say what is true of the images", todo)
        truth = _Truth(where, content.pictures, content.labels, torch.from_numpy(own), None)
    elif own is not None:
        _compare_targets(arrange(own), truth, where, tell)
    logits = {
        "image" if kind == _UNSTATED else kind: _read_logits(
            arrange(arrays[kind]), scale=scale if kind == _UNSTATED else "logits", where=where, tell=tell
        )
        for kind in (_UNSTATED, *KINDS)
        if kind in arrays
    }
    if "closer_size" in noted:
        size = noted["closer_size"]
        if not isinstance(size, int | float) or not 1 <= size <= MAX_SIDE:
            raise InputError(where, f"'closer_size' is {quote(size)}", "give pixels per side, or leave it out")
        noted["closer_size"] = int(size)
    check_lam(noted.get("lam", 1.0), where)
    check_temperature(noted.get("temperature", 1.0), where)
    kept: dict[str, Any] = {name: arrange(arrays[name]) for name in ("patch_logits", "weights") if name in arrays}
    _check_finite({**logits, **kept}, where)
    return Scores(truth.labels, truth.pictures, truth.target, logits, indices=truth.indices, **kept, **noted)


def _leave_out(truth: _Truth, pictures: tuple[str, ...], where: str, tell: Tell | None) -> _Truth:
    """The truth about images that have scores, where the others are few and somebody is told of them."""
    scored = set(pictures)
    rows = torch.tensor([row for row, name in enumerate(truth.pictures) if name in scored], dtype=torch.int64)
    missing, count = len(truth.pictures) - len(rows), len(truth.pictures)
    if tell is None or truth.paired or not 0 < missing <= _MOST * count:
        return truth
    named = shorten(name for name in truth.pictures if name not in scored)
    tell(f"{where}: {missing:,} of {count:,} images of {truth.where} have no scores and are left out ({named})")
    return truth._replace(
        pictures=tuple(truth.pictures[row] for row in rows.tolist()),
        target=truth.target[rows],
        indices=None if truth.indices is None else truth.indices[rows],
    )


def _compare_targets(target: Tensor, truth: _Truth, where: str, tell: Tell | None) -> None:
    """Refuse a file whose own target (N,L) is mostly another than the truth; tell of one that differs somewhere."""
    known = ~(target.isnan() | truth.target.isnan())
    differ, count = int((known & (target != truth.target)).sum()), int(known.sum())
    wrong = f"{differ:,} of {count:,} known targets are not those of {truth.where}"
    if differ > _MOST * count:
        raise InputError(where, wrong, "check that both are of the same images and labels")
    if differ and tell is not None:
        tell(f"{where}: {wrong}, which are taken")


def _match(
    names: Sequence[str], wanted: Sequence[str], *, what: str, where: str, other: _Truth
) -> NDArray[np.int64] | None:
    """Where each wanted name stands among names; None where they are the same."""
    if tuple(names) == tuple(wanted):
        return None
    if what == "images":
        check_pictures(wanted, other.where)
    places = {name: place for place, name in enumerate(names)}
    extra = sorted(places.keys() - set(wanted))
    missing = [name for name in wanted if name not in places]
    if extra and (what == "images" or missing):  # a file may know more labels than are asked for
        hint = choose_one_of(extra[0], wanted) if what == "labels" else f"there they are named like {wanted[0]!r}"
        raise InputError(where, f"{len(extra)} {what} are not in {other.where} ({shorten(extra)})", hint)
    if missing:
        wrong = f"{len(missing)} {what} of {other.where} have no scores ({shorten(missing)})"
        raise InputError(where, wrong, f"score them too, or leave them out of {other.where}")
    return np.array([places[name] for name in wanted], dtype=np.int64)


def _read_logits(values: Tensor, *, scale: Scale, where: str, tell: Tell | None) -> Tensor:
    """Logits of scores (N,L); those of probabilities in float64, so that their order and their ties stay."""
    values = values if values.dtype in (torch.float32, torch.float64) else values.float()
    if scale == "logits" or values.isnan().any():
        return values
    low, high = (value.item() for value in values.aminmax())
    probable = low >= 0 and high <= 1
    if scale == "auto" and tell is not None:
        hint = "; divide by 100 if they are per cent" if not probable and low >= 0 and high <= 100 else ""
        kind = "probabilities" if probable else "logits"
        tell(f"{where}: scores from {low:.3g} to {high:.3g} are taken for {kind}{hint}")
    if scale == "probs" and not probable:
        wrong = f"scores from {low:.3g} to {high:.3g} are no probabilities"
        raise InputError(where, wrong, "read them as logits, or correct them")
    return values.double().logit().clamp_(_LOWEST, _HIGHEST) if probable else values


def _read_target(values: NDArray[Any], where: str) -> NDArray[np.float32]:
    """A target (N,L) with NaN for unknown."""
    target = np.array(values, dtype=np.float32)
    target[target == -1] = np.nan
    wrong = ~(np.isnan(target) | (target == 0) | (target == 1))
    if wrong.any():
        raise InputError(where, f"the target holds {target[wrong][0]:g}", "write 1, 0, or -1 for unknown")
    return target


def _check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    for name, values in tensors.items():
        odd = (~values.isfinite()).nonzero()
        if len(odd):
            place = f"row {int(odd[0, 0])}, label {int(odd[0, -1])}"
            value = values[tuple(odd[0])].item()
            todo = "find where the model made it, or leave that image out"
            raise InputError(where, f"a number of {name!r} is {value:g} ({place})", todo)
