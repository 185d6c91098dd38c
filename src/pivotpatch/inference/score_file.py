"""Scores as files: written by us as Parquet, npz or CSV, read from us or from anybody.

Other people's files are tables with one column for the picture's name and one a label, or npz files; see `read_scores`.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from pivotpatch.data.records import RecordSet, Tell
from pivotpatch.data.table_files import open_parquet, read_schema
from pivotpatch.errors import InputError, choose_one_of, cut, shorten
from pivotpatch.inference.score_content import (
    SCALES,
    UNSTATED,
    Scale,
    ScoreContent,
    Truth,
    check_pictures,
    complete,
    describe_records,
    read_closer_size,
)
from pivotpatch.inference.score_table import read_score_table, write_score_table
from pivotpatch.inference.scores import KINDS, Scores
from pivotpatch.writing import explain_disk_faults, replacing

SUFFIXES = (".parquet", ".npz", ".csv")
_SCHEMA = 1
_OPTIONS = ("lam", "temperature", "overlap")
_ORIGINS = ("data", "network")  # what was scored, and by what
_ARRAYS = (
    "labels",
    "pictures",
    *_ORIGINS,
    "target",
    UNSTATED,
    *KINDS,
    "patch_logits",
    "weights",
    "closer_size",
    *_OPTIONS,
)
MAX_UNPACKED, MAX_RATIO = 100 << 20, 20
"""Bytes that the arrays of an npz file may unpack to however small it is, and times its size that larger ones may."""
_NOTE = b"pivotpatch"  # the metadata of a Parquet file that is ours
_GROUP = 1 << 22  # numbers of a Parquet row group
_DAMAGED = "it is damaged, copy or write it again"


def check_score_file(path: Path, *, patches: bool = False) -> None:
    """Refuse a name that scores cannot be written to, before the work that makes them."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(str(path), "is of no known kind of file", f"end it in {', '.join(SUFFIXES)}")
    if patches and path.suffix.lower() == ".csv":
        raise InputError(str(path), "a CSV file cannot hold patches", "write .parquet or .npz, or leave them out")
    if not path.absolute().parent.is_dir():
        raise InputError(str(path), f"there is no folder {path.parent}", "make it first")


def write_scores(scores: Scores, path: str | Path) -> None:
    """Write scores to a .parquet, .npz or .csv file, whole or not at all; `read_scores` returns the same."""
    path = Path(path)
    check_score_file(path, patches=scores.patch_logits is not None)
    check_pictures(scores.pictures, str(path))
    write: dict[str, Callable[[Scores, Path], None]]
    write = {".parquet": _write_parquet, ".npz": _write_npz, ".csv": write_score_table}
    with explain_disk_faults(path.parent), replacing(path) as written:
        write[path.suffix.lower()](scores, written)


def read_scores(
    path: str | Path,
    *,
    records: RecordSet | None = None,
    like: Scores | None = None,
    scale: Scale = "auto",
    tell: Tell | None = None,
) -> Scores:
    """Read scores that `write_scores` wrote, or that other people made.

    A CSV or Parquet table has a column `picture` (or one of the names that `table:` data sets use) and one column a
    label. `target:LABEL` columns tell the truth: 1 present, 0 absent, -1 or nothing unknown. Columns of logits may
    tell their kind: `image:LABEL`, `patch:LABEL`, `tde:LABEL`, and then `lam` and `temperature` beside them.

    An npz file has arrays `scores` (N,L), or logits `image`, `patch` and `tde`; `target` (N,L); names `labels` (L,)
    and `pictures` (N,), without which columns and rows are those of the data set, or numbered; `patch_logits` and
    `weights` (N,P,L); `lam`, `temperature`, and the `overlap` of the patches; `data`, the address of the data set;
    `network`, the fingerprint of what scored it; `closer_size`, where a closer look took the place of the patches.

    Args:
        path: the file.
        records: the data set of the pictures. They are found in it by their names, in whatever order, and no others.
            The truth comes from it, also where the file tells one; a file where most of it is another is refused.
            Its labels may be more than the file's, or with `tell` fewer: those that both have are read.
        like: scores of the same pictures, whose labels, order and truth are taken instead.
        scale: what scores of no stated kind are. Probabilities become logits in float64, 0 and 1 finite ones.
        tell: told a line each about pictures of `records` that have no scores (they are left out, up to half of
            them; without `tell` there must be none), about labels that `records` lack (likewise), about truth that
            differs, and what "auto" took the scores for.
    """
    path, where = Path(path), str(path)
    if scale not in SCALES:
        raise InputError("scale", f"unknown scale {scale!r}", choose_one_of(scale, SCALES))
    read: dict[str, Callable[[Path], ScoreContent]]
    read = {".parquet": _read_parquet, ".npz": _read_npz, ".csv": read_score_table}
    if path.suffix.lower() not in read:
        raise InputError(where, "is of no known kind of file", f"give one that ends in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise InputError(where, "there is no such file", "check the path")
    try:
        content = read[path.suffix.lower()](path)
    except OSError as error:
        raise InputError(
            where, f"cannot be read ({error.strerror or error})", "check the path and its rights"
        ) from None
    truth = None
    if like is not None:
        truth = Truth("the other scores", like.pictures, like.labels, like.target, like.indices, paired=True)
    elif records is not None:
        truth = describe_records(records, content, tell=tell)
    return complete(content, truth, scale=scale, tell=tell)


def _to_arrays(scores: Scores) -> dict[str, NDArray[Any]]:
    """Target and logits as arrays; unknown is -1, so that the target needs a byte each."""
    target = scores.target.nan_to_num(-1).to(torch.int8)
    patches = {"patch_logits": scores.patch_logits, "weights": scores.weights}
    tensors = {"target": target, **scores.logits, **{name: held for name, held in patches.items() if held is not None}}
    return {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}


def _to_plain(value: float | Tensor) -> Any:
    """A number, or a list of one a label."""
    return value.tolist() if isinstance(value, Tensor) else value


def _list_origins(scores: Scores) -> dict[str, str | None]:
    return {name: getattr(scores, name) for name in _ORIGINS}


def _write_npz(scores: Scores, path: Path) -> None:
    with path.open("wb") as file:  # a name without .npz would get it
        np.savez(
            file,
            allow_pickle=False,
            labels=np.array(scores.labels, dtype=np.str_),
            pictures=np.array(scores.pictures, dtype=np.str_),
            lam=_to_plain(scores.lam),
            temperature=_to_plain(scores.temperature),
            overlap=scores.overlap,
            **({} if scores.closer_size is None else {"closer_size": scores.closer_size}),
            **{name: np.array(text, dtype=np.str_) for name, text in _list_origins(scores).items() if text is not None},
            **_to_arrays(scores),
        )


def _read_npz(path: Path) -> ScoreContent:
    where = str(path)
    try:
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise InputError(where, "holds one array without a name", "write it with np.savez(..., scores=...)")
            _check_unpacked(file.zip.infolist(), path)
            return _read_arrays(file, where)
    except (InputError, OSError):
        raise
    except Exception as error:  # the parsers of archives and headers raise whatever they trip over
        # What is no archive at all numpy takes for a pickle, and advises to load it.
        reason = "" if "pickle" in str(error) else f" ({cut(str(error).partition(chr(10))[0] or type(error).__name__)})"
        raise InputError(where, f"is no npz file{reason}", _DAMAGED) from None


def _check_unpacked(members: Sequence[ZipInfo], path: Path) -> None:
    """Refuse a small file that claims to be a huge one."""
    size = sum(member.file_size for member in members if member.filename.removesuffix(".npy") in _ARRAYS)
    if size > max(MAX_UNPACKED, MAX_RATIO * path.stat().st_size):
        wrong = f"its arrays claim {size >> 20} MB, more than {MAX_UNPACKED >> 20} MB and {MAX_RATIO} times the file"
        raise InputError(str(path), wrong, "write it without compression (np.savez) if they are right")


def _read_arrays(file: Any, where: str) -> ScoreContent:
    held = {name: _read_array(file, name, where) for name in _ARRAYS if name in file.files}
    kinds = {kind: held[kind] for kind in (UNSTATED, *KINDS) if kind in held}
    if not kinds:
        wrong = f"there are no scores among its arrays ({shorten(file.files, limit=10) or 'none'})"
        raise InputError(where, wrong, f"name them {UNSTATED!r}, or {', '.join(KINDS)} where they are such logits")
    options: dict[str, Any] = {name: _read_number(held[name]) for name in _OPTIONS if name in held}
    options |= {name: (_read_names(held.get(name)) or (None,))[0] for name in _ORIGINS}
    return ScoreContent(
        where,
        kinds,
        labels=_read_names(held.get("labels")),
        pictures=_read_names(held.get("pictures")),
        target=held.get("target"),
        patch_logits=held.get("patch_logits"),
        weights=held.get("weights"),
        closer_size=read_closer_size(held.get("closer_size"), where),
        **options,
    )


def _read_array(file: Any, name: str, where: str) -> NDArray[Any]:
    """One array of an npz file: of text, or of numbers that torch knows."""
    try:
        array = file[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        todo = "write lists of text with np.array(list, dtype=str), and numbers as floats"
        raise InputError(where, f"{name!r} holds Python objects, which are never loaded", todo) from None
    if not isinstance(array, np.ndarray):  # numpy returns the bytes of what is no array
        raise InputError(where, f"{name!r} is no array", _DAMAGED)
    text = name in ("labels", "pictures", *_ORIGINS)
    if array.dtype.kind not in ("USiu" if text else "fiub") or not array.dtype.itemsize:
        raise InputError(where, f"{name!r} holds {cut(str(array.dtype))}", f"give {'text' if text else 'numbers'}")
    wide = array.dtype.kind == "f" and array.dtype.itemsize > 8
    return array.astype(np.float64 if wide else array.dtype.newbyteorder("="), copy=False)


def _read_names(values: NDArray[Any] | None) -> tuple[str, ...] | None:
    if values is None:
        return None
    flat = values.ravel().tolist()
    return tuple(value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in flat)


def _read_number(values: NDArray[Any]) -> float | Tensor:
    return float(values) if values.ndim == 0 else torch.from_numpy(values.astype(np.float32))


def _write_parquet(scores: Scores, path: Path) -> None:
    """One row a picture, one list a kind: tens of thousands of columns would take longer than their numbers."""
    columns: dict[str, Any] = {"picture": pa.array(scores.pictures, pa.string())}
    for name, array in _to_arrays(scores).items():
        flat = array.reshape(len(array), -1)
        columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])
    note = {
        "schema": _SCHEMA,
        "labels": scores.labels,
        "lam": _to_plain(scores.lam),
        "temperature": _to_plain(scores.temperature),
        "overlap": scores.overlap,
        "closer_size": scores.closer_size,
        **_list_origins(scores),
    }
    table = pa.table(columns).replace_schema_metadata({_NOTE: json.dumps(note)})
    width = max(column.type.list_size for name, column in columns.items() if name != "picture")
    pq.write_table(table, path, compression="zstd", use_dictionary=False, row_group_size=max(_GROUP // width, 1))


def _read_parquet(path: Path) -> ScoreContent:
    where, schema = str(path), read_schema(path)
    note = (schema.metadata or {}).get(_NOTE)
    if note is None:
        return read_score_table(path)
    try:
        told = json.loads(note)
        version, labels = int(told["schema"]), tuple(map(str, told["labels"]))
        told.setdefault("overlap", 0.0)  # files from before it was written
        options: dict[str, Any]
        options = {name: _read_number(np.asarray(told[name], dtype=np.float64)) for name in _OPTIONS}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise InputError(where, "its note about labels cannot be read", _DAMAGED) from None
    if not labels or "picture" not in schema.names:
        raise InputError(where, "it has no labels or no column 'picture'", _DAMAGED)
    if version > _SCHEMA:
        raise InputError(where, f"schema {version} is newer than {_SCHEMA}, the newest known", "upgrade pivotpatch")
    pictures, arrays = _read_lists(path, schema, labels=len(labels))
    return ScoreContent(
        where,
        {kind: arrays[kind] for kind in KINDS if kind in arrays},
        labels=labels,
        pictures=pictures,
        target=arrays.get("target"),
        patch_logits=arrays.get("patch_logits"),
        weights=arrays.get("weights"),
        closer_size=read_closer_size(told.get("closer_size"), where),
        **{name: told.get(name) for name in _ORIGINS},
        **options,
    )


def _read_lists(path: Path, schema: pa.Schema, *, labels: int) -> tuple[tuple[str, ...], dict[str, NDArray[Any]]]:
    """The names and the arrays of a file that is ours, a row group at a time, so that nothing is held twice."""
    pictures: list[str] = []
    arrays: dict[str, NDArray[Any]] = {}
    with open_parquet(path) as file:
        for field in schema:
            kind = field.type
            if field.name == "picture":
                continue
            size = kind.list_size if pa.types.is_fixed_size_list(kind) else 0
            whole = field.name in ("target", *KINDS)
            numbers = size > 0 and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type))
            if not numbers or size % labels or (whole and size != labels):
                raise InputError(str(path), f"column {field.name!r} is {kind} for {labels} labels", _DAMAGED)
            patches = () if whole else (size // labels,)
            shape = (file.metadata.num_rows, *patches, labels)
            arrays[field.name] = np.empty(shape, kind.value_type.to_pandas_dtype())
        for group in range(file.num_row_groups):
            table, start = file.read_row_group(group), len(pictures)
            lacking = [name for name in ("picture", *arrays) if table.column(name).null_count]
            if lacking:
                raise InputError(str(path), f"column {lacking[0]!r} lacks rows", _DAMAGED)
            for name, array in arrays.items():
                rows = array[start : start + table.num_rows]
                rows[...] = table.column(name).combine_chunks().flatten().to_numpy().reshape(rows.shape)
            pictures += table.column("picture").cast(pa.string()).to_pylist()
    return tuple(pictures), arrays
