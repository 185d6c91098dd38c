"""Scores in tables with a column a label, CSV or Parquet: what other people have, or can make in a line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import torch
from numpy.typing import NDArray
from torch import Tensor

from pivotpatch.data.table import IMAGE_COLUMNS, find_column
from pivotpatch.data.table_files import read_columns, read_schema
from pivotpatch.errors import InputError, choose_one_of, shorten
from pivotpatch.inference.score_content import UNSTATED, ScoreContent, read_closer_size
from pivotpatch.inference.scores import KINDS, Scores

PICTURE = "picture"
TARGET = "target"
_MIXING = ("lam", "temperature")
_OPTIONS = (*_MIXING, "closer_size")


class _Columns(NamedTuple):
    """Which column is what: that of the pictures' names, those of the labels by kind, and the constant ones."""

    picture: str
    by_kind: Mapping[str, Mapping[str, str]]
    options: Sequence[str]


def write_score_table(scores: Scores, path: Path) -> None:
    """Write scores as CSV, each kind with its name before the label."""
    columns: dict[str, Any] = {PICTURE: pa.array(scores.pictures)}
    for name in _MIXING:
        value = getattr(scores, name)
        if isinstance(value, Tensor) and value.ndim:
            wrong = f"a CSV file cannot hold a {name} for each label"
            raise InputError(str(path.with_suffix("")), wrong, "write .parquet or .npz")
        columns[name] = pa.array(np.full(len(scores), float(value)))
    if scores.closer_size is not None:
        columns["closer_size"] = pa.array(np.full(len(scores), scores.closer_size))
    target = scores.target.nan_to_num(-1).char()
    for kind, values in {TARGET: target, **scores.logits}.items():
        array = np.asfortranarray(values.numpy())  # one column after the other
        columns |= {f"{kind}:{label}": pa.array(array[:, place]) for place, label in enumerate(scores.labels)}
    pacsv.write_csv(pa.table(columns), path)


def read_score_table(path: Path) -> ScoreContent:
    """Read a table with a column a label."""
    where, schema = str(path), read_schema(path)
    chosen = _choose_columns(schema.names, where)
    numbers: dict[str, pa.DataType] = dict.fromkeys(chosen.options, pa.float64())
    for kind, columns in chosen.by_kind.items():
        numbers |= dict.fromkeys(columns.values(), pa.float64() if kind == UNSTATED else pa.float32())
    table = read_columns(path, [chosen.picture, *numbers], types=numbers)
    for name in numbers:
        kind = table.schema.field(name).type
        if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
            raise InputError(where, f"column {name!r} holds {kind}, no numbers", "leave it out, or correct it")
    if table.num_rows == 0:
        raise InputError(where, "the table has no rows", "give at least one picture")
    names = table.column(chosen.picture).cast(pa.string())
    if names.null_count:
        raise InputError(where, f"{names.null_count} rows have no picture in {chosen.picture!r}", "name each one")
    labels = tuple(chosen.by_kind[next(kind for kind in chosen.by_kind if kind != TARGET)])
    held = {kind: _stack(table, [columns[label] for label in labels]) for kind, columns in chosen.by_kind.items()}
    options: dict[str, Any] = {name: _read_constant(table, name, where) for name in chosen.options}
    options["closer_size"] = read_closer_size(options.get("closer_size"), where)
    return ScoreContent(
        where,
        {kind: values for kind, values in held.items() if kind != TARGET},
        labels=labels,
        pictures=tuple(names.to_pylist()),
        target=held.get(TARGET),
        **options,
    )


def _choose_columns(names: Sequence[str], where: str) -> _Columns:
    unnamed = [name for name in names if not name.strip() or name.startswith("__index_level_")]
    if unnamed:
        todo = "write the table without row numbers (pandas: index=False)"
        raise InputError(where, f"a column is named {unnamed[0]!r}", todo)
    picture = find_column((PICTURE, *IMAGE_COLUMNS), names)
    if picture is None:
        raise InputError(where, f"no column of pictures among {shorten(names, limit=5)}", f"name it {PICTURE!r}")
    by_kind: dict[str, dict[str, str]] = {}
    plain = []
    for name in names:
        kind, colon, label = name.partition(":")
        if colon and kind in (TARGET, *KINDS):
            by_kind.setdefault(kind, {})[label] = name
        elif name != picture:
            plain.append(name)
    options: list[str] = []
    if not by_kind.keys() & set(KINDS):
        by_kind[UNSTATED] = {name: name for name in plain}
    else:
        options = [name for name in plain if name in _OPTIONS]
        strange = [name for name in plain if name not in _OPTIONS]
        if strange:
            todo = "leave it out, or write its kind before all labels, such as image:cat"
            raise InputError(where, f"column {strange[0]!r} stands beside those of a stated kind", todo)
    _check_labels(by_kind, where)
    return _Columns(picture, by_kind, options)


def _check_labels(by_kind: Mapping[str, Mapping[str, str]], where: str) -> None:
    """Refuse kinds that do not have the same labels."""
    first = next(kind for kind in by_kind if kind != TARGET)
    for kind, columns in by_kind.items():
        for one, other in ((first, kind), (kind, first)):
            strange = [label for label in by_kind[one] if label not in by_kind[other]]
            if strange:
                has, lacks = ("scores" if name == UNSTATED else name for name in (one, other))
                wrong = f"{len(strange)} labels have a {has} column but no {lacks} column ({shorten(strange)})"
                raise InputError(where, wrong, choose_one_of(strange[0], by_kind[other]) if columns else "add them")


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
    """The value of a column that is the same in each row."""
    values = table.column(name).to_numpy()
    if not (values == values[0]).all():
        raise InputError(where, f"column {name!r} changes from row to row", "give one value for all pictures")
    return float(values[0])
