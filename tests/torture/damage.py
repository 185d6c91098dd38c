"""Valid files with damage: each gives an answer or one clear line, in 10 s and 2 GB; nothing else is raised."""

import faulthandler
import gzip
import io
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from made_archives import tar_bytes, zip_bytes
from PIL import Image

from pivotpatch.errors import InputError

SECONDS, BYTES = 10, 2 << 30
GOLDEN = Path(__file__).parents[1] / "golden" / "kept"
_NUMBERS = (b"0", b"-1", b"1e999", b"NaN", b"99999999999999999999", b"null", b'""', b"[]", b"\xff\xfe", b"2147483647")


def run(folder: Path, *, long: bool, seed: int) -> tuple[dict[str, object], list[str]]:
    """Damage files of every kind in processes that may die; what is found is left in the folder `TORTURE_KEPT`."""
    wanted = int(os.environ.get("DAMAGED", 100_000 if long else 2_000))
    files = {name: kind.write() for name, kind in KINDS.items()}
    found, counts, at, last, since = list[str](), Counter[str](), 0, "", 0.0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torture.damage", "pivotpatch.inference.engine", "pivotpatch.data.table"])

    def note(kind: str, number: int, result: str) -> None:
        found.append(f"{kind}, seed {seed}, number {number}: {result}")
        if kept := os.environ.get("TORTURE_KEPT"):
            name, content = damage(files[kind], seed, number)
            Path(kept, f"{seed}-{number}-{name}").write_bytes(content)

    while at < wanted:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_try_many, args=(files, range(at, wanted), seed, there))
        process.start()
        there.close()
        try:
            while True:
                kind, number, result = here.recv()
                if result == "begun":
                    at, last, since = number + 1, kind, time.monotonic()
                    continue
                counts[f"{kind} {result.partition(':')[0]}"] += 1
                if result not in ("answered", "refused"):
                    note(kind, number, result)
        except EOFError:
            process.join()
        if process.exitcode:
            seconds = time.monotonic() - since
            note(last, at - 1, f"the process ended with {process.exitcode} after {seconds:.1f} s")
    return {"damaged": wanted, **dict(sorted(counts.items()))}, found


def damage(files: list[tuple[str, bytes]], seed: int, number: int) -> tuple[str, bytes]:
    """The name and content of a file with the damage of that number."""
    draw = random.Random(f"{seed} {number}")
    name, content = draw.choice(files)
    return name, mutate(content, draw)


def _try_many(files: dict[str, list[tuple[str, bytes]]], numbers: range, seed: int, told: Connection) -> None:
    kinds = [name for name, kind in KINDS.items() for _ in range(kind.turns)]
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)  # libraries in C say what they think
    os.dup2(devnull, 2)
    warnings.simplefilter("ignore")
    for number in numbers:
        kind = kinds[number % len(kinds)]
        name, content = damage(files[kind], seed, number)
        told.send((kind, number, "begun"))
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        told.send((kind, number, _try_one(kind, name, content)))
        faulthandler.cancel_dump_traceback_later()
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > BYTES:
            told.send((kind, number, f"memory above {BYTES:,} bytes"))
            return


def _try_one(kind: str, name: str, content: bytes) -> str:
    shutil.rmtree("tried", ignore_errors=True)
    Path("tried").mkdir()
    Path("tried", name).write_bytes(content)
    try:
        finite = bool(np.isfinite(KINDS[kind].read(Path("tried", name))).all())
    except InputError as error:
        return "refused" if "\n" not in str(error) and len(str(error)) < 1000 else f"long message: {error}"
    except Exception as error:
        return f"raised: {type(error).__name__}: {str(error)[:300]!r}"
    return "answered" if finite else "answered NaN"


def mutate(content: bytes, draw: random.Random) -> bytes:
    """A file with some damage."""
    data = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 4, 16])):
        at = draw.randrange(max(len(data), 1))
        at = at if draw.random() < 0.5 else at % 256  # headers tell most
        length = draw.choice([1, 1, 2, 4, 8, 64, 1024])
        how = draw.randrange(8)
        if how == 0:
            data[at : at + 1] = bytes([draw.randrange(256)])
        elif how == 1:
            data[at : at + length] = draw.choice([b"\x00", b"\xff", b"\x7f", b"\x80"]) * length
        elif how == 2:
            del data[at : at + length]
        elif how == 3:
            data[at:at] = draw.randbytes(length)
        elif how == 4 and len(data) > 1:
            del data[draw.randrange(1, len(data)) :]
        elif how == 5:
            data[at:at] = data[at : at + length] * draw.choice([1, 2, 100])
        elif how == 6:
            data[at : at + length] = data[-length:]
        else:  # a number in a text
            places = [found.span() for found in re.finditer(rb"\d+(\.\d+)?", bytes(data[:4096]))]
            if places:
                start, end = draw.choice(places)
                data[start:end] = draw.choice(_NUMBERS)
    return bytes(data)


def _write_images() -> list[tuple[str, bytes]]:
    """An image of every format that Pillow writes, in several modes; what is not read is to be refused."""
    Image.init()
    if "HEIF" not in Image.SAVE:
        try:
            import pillow_heif

            pillow_heif.register_heif_opener()
        except ImportError:
            pass
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    files: list[tuple[str, bytes]] = []
    for name in sorted(Image.SAVE):
        for mode in ("RGB", "L", "P", "RGBA", "CMYK", "I;16", "1"):
            for options in ({}, {"compression": "tiff_lzw"}, {"progressive": True, "interlace": 1}):
                stream = io.BytesIO()
                try:
                    Image.fromarray(pixels).convert(mode).save(stream, name, **options)
                except Exception:
                    continue
                if not any(stream.getvalue() == held for _, held in files):
                    files.append((f"image.{name.lower()}", stream.getvalue()))
    return files


def _write_tables() -> list[tuple[str, bytes]]:
    rows = {"image": [f"{place}.png" for place in range(20)], "labels": ["cat|dog", "cat", ""] * 6 + ["cup"] * 2}
    table = pa.table(rows | {"split": ["train", "val"] * 10})
    streams = [io.BytesIO() for _ in range(2)]
    pa.csv.write_csv(table, streams[0])
    pq.write_table(table, streams[1])
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    wide = "image,cat,dog\n" + "".join(f"{place}.png,{place % 2},{-1 if place == 3 else 1}\n" for place in range(20))
    return [
        ("table.csv", streams[0].getvalue()),
        ("table.parquet", streams[1].getvalue()),
        ("table.jsonl", lines.encode()),
        ("table.csv", wide.encode()),
    ]


def _write_json() -> list[tuple[str, bytes]]:
    images = [{"id": place, "file_name": f"{place}.jpg", "width": 9, "height": 9} for place in range(9)]
    boxes = [{"id": place, "image_id": place, "category_id": place % 2 + 1, "bbox": [0, 0, 3, 3]} for place in range(9)]
    kinds = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    return [("coco.json", json.dumps({"images": images, "annotations": boxes, "categories": kinds}).encode())]


def _write_toml() -> list[tuple[str, bytes]]:
    tags = 'allow = ["cat", "dog"]\nalways = ["tagged"]\nat_most = 3\nlanguage = "de"\n[rename]\ncat = "animal|cat"\n'
    return [("config.toml", (GOLDEN / "run" / "config.toml").read_bytes()), ("tags.toml", tags.encode())]


def _take(*names: str) -> list[tuple[str, bytes]]:
    return [((GOLDEN / name).name, (GOLDEN / name).read_bytes()) for name in names]


def _write_archives() -> list[tuple[str, bytes]]:
    images = [path.read_bytes() for path in sorted((GOLDEN / "images").glob("*.png"))[:6]]
    files = {f"{place}.png": content for place, content in enumerate(images)}
    stream = io.BytesIO()
    pq.write_table(pa.table({"image": images}), stream, row_group_size=3)
    return [
        ("shard.tar", tar_bytes(files)),
        ("set.tar.gz", gzip.compress(tar_bytes(files), mtime=0)),
        ("set.zip", zip_bytes(files, zipfile.ZIP_DEFLATED)),
        ("images.parquet", stream.getvalue()),
    ]


def _write_onnx() -> list[tuple[str, bytes]]:
    from pivotpatch.cli.main import main

    assert main(["export", str(GOLDEN / "checkpoint"), "--out", "small.onnx"]) == 0
    return [("small.onnx", Path("small.onnx").read_bytes())]


def _read_image(path: Path) -> Any:
    from pivotpatch.runtime.decoding import decode_image

    return decode_image(path, size=(32, 32)).astype(float)


def _read_records(path: Path) -> Any:
    from pivotpatch.data.address import open_records

    records = open_records(f"coco:{path}" if path.suffix == ".json" else f"table:{path}")
    return [float(label) for place in range(min(len(records), 3)) for label in records[place].positive]


def _read_toml(path: Path) -> Any:
    from pivotpatch.runtime.prediction import Tag
    from pivotpatch.runtime.tag_names import TagRules
    from pivotpatch.training.config import load_config

    if path.name == "tags.toml":
        return [tag.prob for tag in TagRules.read(path, ["cat", "dog"]).apply([Tag("cat", 0.5, 0.5, 0.5)])]
    return float(load_config(path).optimiser.lr)


def _read_scores(path: Path) -> Any:
    from pivotpatch.inference.score_file import read_scores

    return read_scores(path).own_probs().numpy()


def _read_archive(path: Path) -> Any:
    from made_engines import Means

    from pivotpatch.data.prepare import unpack
    from pivotpatch.runtime.bulk import tag_pictures
    from pivotpatch.runtime.packed import find_sources

    if path.name.startswith("set"):
        unpack(path, Path("tried/unpacked"))
        return 0.0
    summary = tag_pictures(Means(), find_sources([str(path)]), Path("tried/tags.jsonl"))
    assert summary is not None
    rows = [json.loads(line) for line in Path("tried/tags.jsonl").read_text("utf-8").splitlines()]
    return [prob for row in rows for prob in row["probs"]]


def _read_model(path: Path) -> Any:
    from pivotpatch.runtime.predictor import Predictor

    if path.suffix != ".onnx":
        for name in ("model.json", "model.safetensors"):
            if name != path.name:
                shutil.copy(GOLDEN / "checkpoint" / name, path.parent)
    predictor = Predictor.load(path if path.suffix == ".onnx" else path.parent, device="cpu")
    return predictor(np.zeros((40, 40, 3), np.uint8)).probs


class Kind(NamedTuple):
    """Files of a kind: how often their turn comes, valid ones by name, and what reads one."""

    turns: int
    write: Callable[[], list[tuple[str, bytes]]]
    read: Callable[[Path], Any]


KINDS = {
    "image": Kind(12, _write_images, _read_image),
    "table": Kind(4, _write_tables, _read_records),
    "json": Kind(3, _write_json, _read_records),
    "toml": Kind(3, _write_toml, _read_toml),
    "scores": Kind(3, lambda: _take("scores.parquet", "baseline.parquet"), _read_scores),
    "archive": Kind(3, _write_archives, _read_archive),
    "checkpoint": Kind(1, lambda: _take("checkpoint/model.json", "checkpoint/model.safetensors"), _read_model),
    "onnx": Kind(1, _write_onnx, _read_model),
}
