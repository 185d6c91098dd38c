"""Tables of pictures and labels in all formats, and what is read from them."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pivotpatch.data.records import RecordSet

Labels = tuple[set[str], set[str]]
TEXT = {"image": ["a.jpg", "b.jpg", "c.jpg"], "labels": ["dog|cat", "", "dog | ?bird|"]}


def labels_of(records: RecordSet) -> dict[str, Labels]:
    """Present and unknown labels of each picture, by its name."""
    names = records.labels.names
    return {r.name: ({names[i] for i in r.positive}, {names[i] for i in r.unknown}) for r in records}


def write_table(path: Path, columns: Mapping[str, Sequence[Any]]) -> str:
    """Write columns as the suffix says: CSV and TSV by Python's module, JSON lines, Parquet."""
    rows = list(zip(*columns.values(), strict=True))
    if path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerows([list(columns), *rows])
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    else:
        pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), path)
    return str(path)
