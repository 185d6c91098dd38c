"""How long a large table takes to open, and what each of its records costs in memory (Linux only).

`python benchmarks/records.py --rows 1000000` writes tables into a temporary folder and opens each in a fresh process,
after a table of one row, so that loading libraries does not count. `resident` is what that process grew by (of which up
to 64 MB in all may be freed memory that the C library keeps), `columns` the bytes of the arrays that the records are.

`--address table:DIR@train` instead fetches pictures of a data set of yours in random order, twice.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table

from pivotpatch import __version__
from pivotpatch.data.address import open_records
from pivotpatch.data.records import FileStore
from pivotpatch.data.table import read_table

LABELS = [f"label {i:02d}" for i in range(80)]
MOST = 5  # labels of a picture


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def write_tables(folder: Path, rows: int) -> Iterator[tuple[str, Path]]:
    generator = np.random.default_rng(0)
    names = [f"train/{i // 1000:04d}/{i:012d}.jpg" for i in range(rows)]
    lengths = generator.integers(1, MOST + 1, rows)
    ids = generator.integers(0, len(LABELS), (rows, MOST))
    lists = [[LABELS[i] for i in line[:length]] for line, length in zip(ids, lengths, strict=True)]
    table = pa.table({"image": names, "labels": ["|".join(labels) for labels in lists]})
    pacsv.write_csv(table, folder / "text.csv")
    yield "CSV, delimited text", folder / "text.csv"
    hot = {"image": pa.array(names)} | {
        name: pa.array((ids == i).any(1).astype(np.int8)) for i, name in enumerate(LABELS)
    }
    pacsv.write_csv(pa.table(hot), folder / "hot.csv")
    yield f"CSV, {len(LABELS)} columns 0/1", folder / "hot.csv"
    with (folder / "lists.jsonl").open("w") as file:
        file.writelines(json.dumps({"image": n, "labels": ls}) + "\n" for n, ls in zip(names, lists, strict=True))
    yield "JSON lines, lists", folder / "lists.jsonl"
    pq.write_table(pa.table({"image": names, "labels": lists}), folder / "lists.parquet")
    yield "Parquet, lists", folder / "lists.parquet"


def measure(path: Path) -> dict[str, float]:
    """Open a table in this process."""
    with tempfile.TemporaryDirectory() as folder:
        for _, tiny in write_tables(Path(folder), 1):
            read_table(str(tiny), None)
    before, start, busy = resident_bytes(), time.perf_counter(), time.process_time()
    records = read_table(str(path), None)
    seconds, busy, grown = time.perf_counter() - start, time.process_time() - busy, resident_bytes() - before
    assert isinstance(records.images, FileStore)
    states = records.states
    held = records.images.paths.nbytes + sum(part.nbytes for part in (states.data, states.indices, states.indptr))
    return {"seconds": seconds, "busy": busy, "resident": grown / len(records), "columns": held / len(records)}


def fetch(address: str, console: Console) -> None:
    """Fetch up to 10,000 pictures of a data set, undecoded, in random order."""
    start = time.perf_counter()
    records = open_records(address)
    console.print(
        f"{len(records):,} records open after {time.perf_counter() - start:.2f} s, first use of libraries included"
    )
    order = np.random.default_rng(0).permutation(len(records))[:10_000].tolist()
    for turn in ("first", "second"):
        before, start = resident_bytes(), time.perf_counter()
        for index in order:
            image = records[index].image
            if isinstance(image, Path):
                image.read_bytes()
        rate = len(order) / (time.perf_counter() - start)
        console.print(
            f"{turn} time: {rate:,.0f} pictures/s, resident memory grew by {(resident_bytes() - before) / 1e6:.1f} MB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--address")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    console = Console(highlight=False)
    versions = f"pivotpatch {__version__}, pyarrow {pa.__version__}, torch {torch.__version__}"
    console.print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}")
    if args.address:
        fetch(args.address, console)
        return
    shown = Table(title=f"A table of {args.rows:,} rows")
    for heading in ("table", "file\nMB", "open\ns", "CPU\ns", "resident\nB/record", "columns\nB/record"):
        shown.add_column(heading, justify="left" if heading == "table" else "right")
    with tempfile.TemporaryDirectory() as folder:
        for kind, path in write_tables(Path(folder), args.rows):
            command = [sys.executable, __file__, "--measure", str(path)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            shown.add_row(
                kind,
                f"{path.stat().st_size / 1e6:.0f}",
                f"{found['seconds']:.2f}",
                f"{found['busy']:.2f}",
                f"{found['resident']:.0f}",
                f"{found['columns']:.0f}",
            )
    console.print(shown)


if __name__ == "__main__":
    main()
