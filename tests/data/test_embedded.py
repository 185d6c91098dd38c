import multiprocessing
import os
import pickle
import shutil
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_records import encoded

from pivotpatch.data import table_files
from pivotpatch.data.table import read_table
from pivotpatch.data.table_files import EmbeddedStore
from pivotpatch.errors import InputError

HF_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


IMAGES = [encoded(level) for level in range(10)]


def write_shards(folder: Path, *, kind: str = "struct", **options: Any) -> None:
    """Ten images in two files of two row groups each, labelled by their level."""
    for shard in (0, 1):
        levels = range(5 * shard, 5 * shard + 5)
        if kind == "struct":
            values = [{"bytes": IMAGES[i], "path": f"{i}.png"} for i in levels]
            image = pa.array(values, HF_IMAGE)
        else:
            image = pa.array([IMAGES[i] for i in levels], pa.large_binary() if kind == "large" else pa.binary())
        table = pa.table({"image": image, "labels": [[str(i)] for i in levels]})
        pq.write_table(table, folder / f"train-{shard:05d}-of-00002.parquet", row_group_size=3, **options)


@pytest.mark.parametrize("kind", ["struct", "binary", "large"])
@pytest.mark.parametrize("options", [{}, {"compression": "none", "use_dictionary": False}, {"write_statistics": False}])
def test_images_come_back_in_any_order(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    write_shards(tmp_path, kind=kind, **options)
    records = read_table(str(tmp_path), "train")
    for index in (7, 0, 9, 2, 3, 7, 5, 1, 8, 4, 6):
        record = records[index]
        assert record.image == IMAGES[index]
        assert record.name == (
            f"{index}.png" if kind == "struct" else f"train-0000{index // 5}-of-00002.parquet#{index % 5 + 1}"
        )
        assert records.labels.names[record.positive[0]] == str(index)


def test_files_are_unpacked_when_they_are_used(tmp_path: Path, cache: Path) -> None:
    write_shards(tmp_path)
    records = pickle.loads(pickle.dumps(read_table(str(tmp_path), None)))
    assert not cache.exists()
    assert [records[i].image for i in (8, 9)] == IMAGES[8:]
    (unpacked,) = cache.iterdir()
    assert unpacked.name.startswith("train-00001-of-00002-")
    shutil.rmtree(cache)  # which may go at any time
    assert read_table(str(tmp_path), None)[4].image == IMAGES[4]
    assert records[7].image == IMAGES[7]
    shutil.rmtree(cache)
    table_files._map_images.cache_clear()
    (tmp_path / "train-00000-of-00002.parquet").unlink()
    with pytest.raises(InputError, match=r"train-00000-of-00002\.parquet: the file has changed since it was opened"):
        records[0]


def test_a_new_file_is_not_read_from_the_old_cache(tmp_path: Path) -> None:
    path, sizes = tmp_path / "t.parquet", set()
    for time, image in enumerate((b"first", b"other")):
        pq.write_table(pa.table({"image": [image], "labels": ["x"]}), path, write_statistics=False)
        os.utime(path, ns=(0, time))
        sizes.add(path.stat().st_size)
        assert read_table(str(path), None)[0].image == image
    assert len(sizes) == 1


def test_what_cannot_be_unpacked(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table({"image": [os.urandom(5000)], "labels": ["x"]})
    pq.write_table(table, path, compression="gzip", use_dictionary=False)  # gzip has a checksum
    content = path.read_bytes()
    path.write_bytes(content[:2000] + bytes(40) + content[2040:])
    message = r"unpacked: images of .*t\.parquet cannot be unpacked here .*; copy the file again .*PIVOTPATCH_CACHE"
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            read_table(str(path), None)[0]
        assert not [path for path in cache.glob("*") if path.is_file()]
        path.write_bytes(content)
        if cache.is_dir():
            cache.rmdir()
            cache.write_text("a file where the folder should be")


def test_paths_name_images_where_they_can(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    image = pa.array([{"bytes": IMAGES[i], "path": "image.png"} for i in range(2)], HF_IMAGE)
    pq.write_table(pa.table({"image": image, "labels": [["x"], ["x"]]}), path)
    assert [r.name for r in read_table(str(path), None)] == ["t.parquet#1", "t.parquet#2"]  # one name tells nothing
    pq.write_table(pa.table({"image": pa.array([b"", b"x", None], pa.binary()), "labels": ["x"] * 3}), path)
    assert [record.image for record in read_table(str(path), None)] == [b"", b"x", b""]


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_worker_processes(tmp_path: Path, cache: Path, start: str) -> None:
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip(f"{start} is not to be had here")
    write_shards(tmp_path)
    store = EmbeddedStore(sorted(tmp_path.glob("*.parquet")), "image.bytes")
    assert store.source(0) == IMAGES[0]  # so that a fork happens after a read
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(start)) as workers:
        assert list(workers.map(store.source, range(10))) == IMAGES


def test_threads_share_a_file(tmp_path: Path, cache: Path) -> None:
    contents = [os.urandom(200) for _ in range(4000)]
    pq.write_table(pa.table({"image": contents, "labels": ["x"] * 4000}), tmp_path / "t.parquet")
    images = read_table(str(tmp_path / "t.parquet"), None).images
    before = table_files._map_images.cache_info().misses
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(images.source, range(8))) == contents[:8]
    assert table_files._map_images.cache_info().misses == before + 1  # unpacked once, not by each anew
