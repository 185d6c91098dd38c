"""The tables that most figures of docs/results.md are measured on, made from MS-COCO 2014.

    pivotpatch data prepare coco --root /data/coco
    python benchmarks/make_coco.py /data/coco --out .      # coco256 (21,000 images) and coco_all (87,081)

Both are folders of Parquet files, `table:coco256` and `table:coco_all`, whose images are squashed to 256 x 256 pixels.
Split train holds 16,000 images of train2014, or all that have a label; split test the same 5,000 of val2014. Which ones
`coco256_images.json` says. The images behind our figures were squashed and compressed by other programs, so yours
differ from them a little.
"""

import argparse
import io
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from rich.progress import track

from pivotpatch.data import RecordSet, open_records
from pivotpatch.runtime import decode_image
from pivotpatch.writing import replacing_folder

SIZE, SHARD = 256, 5_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("coco", help="folder with annotations, train2014 and val2014")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of both tables")
    args = parser.parse_args()
    chosen = json.loads(Path(__file__).with_name("coco256_images.json").read_text("utf-8"))
    make_tables(args.coco, chosen, args.out)


def make_tables(coco: str, chosen: dict[str, list[int]], out: Path) -> None:
    """Write both tables; `chosen` are the numbers of the images that coco256 takes from each split."""
    for folder in (out / "coco256", out / "coco_all"):
        if folder.exists():
            raise SystemExit(f"{folder} exists; remove it or give another --out")
    train, test = (open_records(f"coco:{coco}@{name}") for name in ("train2014", "val2014"))
    test = pick(test, chosen["test"])
    write(out / "coco256", {"train": pick(train, chosen["train"]), "test": test})
    write(out / "coco_all", {"train": train, "test": test})


def pick(records: RecordSet, numbers: list[int]) -> RecordSet:
    """The records of the images with these numbers, in this order."""
    at = {number_of(records.name_at(place)): place for place in range(len(records))}
    missing = [number for number in numbers if number not in at]
    if missing:
        raise SystemExit(f"{records.name} lacks {len(missing)} of {len(numbers)} images, such as {missing[0]}")
    return records.select(np.array([at[number] for number in numbers]))


def number_of(name: str) -> int:
    """COCO_val2014_000000000042.jpg is 42."""
    return int(Path(name).stem.rsplit("_", 1)[-1])


def write(folder: Path, splits: dict[str, RecordSet]) -> None:
    """A folder of Parquet files, complete or not there."""
    with replacing_folder(folder) as scratch, ProcessPoolExecutor() as pool:
        labels = next(iter(splits.values())).labels.names
        (scratch / "labels.json").write_text(json.dumps(labels), "utf-8")
        for split, records in splits.items():
            rows = list(track(make_rows(pool, split, records), f"{folder.name}, {split}", len(records)))
            for start in range(0, len(rows), SHARD):
                table = pa.Table.from_pylist(rows[start : start + SHARD])
                pq.write_table(table, scratch / f"{split}-{start:06}.parquet")


def make_rows(pool: ProcessPoolExecutor, split: str, records: RecordSet) -> Iterator[dict[str, Any]]:
    sources = [records[place].image for place in range(len(records))]
    for place, webp in enumerate(pool.map(squash, sources, chunksize=64)):
        record = records[place]
        name = f"{number_of(record.name):012}.webp"
        labels = [records.labels.names[label] for label in record.positive]
        yield {"image": {"bytes": webp, "path": name}, "labels": labels, "split": split}


def squash(source: Path | bytes) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(decode_image(source, size=(SIZE, SIZE))).save(stream, "webp", quality=90)
    return stream.getvalue()


if __name__ == "__main__":
    main()
