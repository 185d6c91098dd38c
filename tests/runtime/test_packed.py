import io
import os
import resource
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_engines import Means
from run_process import write_pictures

from pivotpatch.errors import InputError
from pivotpatch.runtime import packed
from pivotpatch.runtime.bulk import tag_pictures
from pivotpatch.runtime.files import find_images
from pivotpatch.runtime.packed import find_sources
from pivotpatch.runtime.parts import Summary

COUNT, BROKEN = 100, (3, 50)
NAMES = [f"{place:04d}.png" for place in range(COUNT)]


@pytest.fixture
def here(here: Path) -> Path:
    write_pictures(Path("pictures"), COUNT, broken=BROKEN)
    return here


def read_images() -> list[bytes]:
    return [Path("pictures", name).read_bytes() for name in NAMES]


def tag(words: Sequence[str], out: str = "tags.parquet", **options: Any) -> tuple[list[Any], list[str], Summary]:
    """Labels and probabilities by row, the names of all rows, and the summary."""
    Path(out).unlink(missing_ok=True)
    summary = tag_pictures(Means(), find_sources(words, **options), Path(out), batch_size=7, threads=3)
    assert summary is not None
    rows = pq.read_table(out).to_pylist()
    return [(row["labels"], row["probs"]) for row in rows], [row["picture"] for row in rows], summary


def read_failures() -> list[str]:
    return Path("tags.parquet.failures.jsonl").read_text("utf-8").splitlines()


def write_tar(path: Path, start: int = 0, stop: int = COUNT) -> None:
    """A shard as WebDataset writes them: the image and what is known of it, one after the other."""
    with tarfile.open(path, "w") as tar:
        for place, content in enumerate(read_images()[start:stop], start):
            for name, each in ((NAMES[place], content), (f"._{NAMES[place]}", b""), (f"{place:04d}.json", b"{}")):
                member = tarfile.TarInfo(name)
                member.size = len(each)
                tar.addfile(member, io.BytesIO(each))


def write_table(path: str, kind: str) -> None:
    images = pa.array(read_images() if kind in ("bytes", "struct") else [f"pictures/{name}" for name in NAMES])
    if kind == "struct":
        images = pa.StructArray.from_arrays([images, pa.nulls(COUNT, pa.string())], ["bytes", "path"])
    column = "path" if kind == "path" else "image"
    if kind == "category":
        images = images.dictionary_encode()
    pq.write_table(pa.table({"id": range(COUNT), column: images}), path, row_group_size=33)


def test_shards_tables_lists_and_addresses_give_the_rows_of_a_folder(here: Path) -> None:
    expected, _, _ = tag(["pictures"])
    assert len(expected) == COUNT - 2
    Path("shards").mkdir()
    write_tar(Path("shards/0.tar"), 0, 40)
    write_tar(Path("shards/1.tar"), 40)
    for kind in ("bytes", "struct", "path", "category"):
        write_table(f"{kind}.parquet", kind)
    Path("names.txt").write_text("".join(f"pictures/{name}\n" for name in NAMES), "utf-8-sig")  # as Windows does
    memory = fsspec.filesystem("memory")
    memory.put("pictures", "/bucket/", recursive=True)
    memory.put("shards", "/bucket/", recursive=True)
    memory.put("struct.parquet", "/bucket/struct.parquet")
    memory.pipe("/bucket/pictures/0.txt", b"cat, dog")  # a caption, which a pattern passes over
    memory.pipe("/bucket/names.txt", "".join(f"memory://bucket/pictures/{name}\n" for name in NAMES).encode())
    kept = [name for place, name in enumerate(NAMES) if place not in BROKEN]
    for words, prefix in (
        (["shards/*.tar"], "shards/"),
        (["shards/0.tar", "shards/1.tar"], "shards/"),
        (["struct.parquet"], "struct.parquet#"),
        (["bytes.parquet"], "bytes.parquet#"),
        (["path.parquet"], "pictures/"),
        (["category.parquet"], "pictures/"),
        (["names.txt"], "pictures/"),
        (["memory://bucket/pictures"], "memory://"),
        (["memory://bucket/pictures/*"], "memory://"),
        (["memory://bucket/shards/*.tar"], "memory://"),
        (["memory://bucket/struct.parquet"], "memory://"),
        (["memory://bucket/names.txt"], "memory://bucket/pictures/"),
        ([f"file://{here}/pictures"], f"file://{here}/pictures/"),
    ):
        rows, names, summary = tag(words)
        assert rows == expected, words
        assert all(name.startswith(prefix) for name in names), words
        assert (summary.pictures, summary.failed) == (COUNT, 2)
        if "parquet#" not in names[0]:
            assert [name.rpartition("/")[2] for name in names] == kept
    memory.rm("/bucket", recursive=True)


def test_work_on_shards_goes_on_from_any_image(here: Path) -> None:
    expected, _, _ = tag(["pictures"])
    write_tar(Path("all.tar"))
    write_table("struct.parquet", "struct")
    for word in ("all.tar", "struct.parquet"):
        for stop in (1, 5, 9):
            batches = [False] * stop
            out = Path(f"{stop}.parquet")
            options: Any = {"batch_size": 7, "stopping": lambda left=batches: not left or left.pop()}
            assert tag_pictures(Means(), find_sources([word]), out, **options) is None
            rows, _, _ = tag([word], out.name)
            assert rows == expected
            out.unlink()


def test_damage_is_a_row_and_the_rest_is_tagged(here: Path) -> None:
    write_tar(Path("all.tar"))
    whole = Path("all.tar").read_bytes()
    at = whole.index(b"0060.png")
    damaged = whole[:at] + b"\xff" * 512 + whole[at + 512 :]
    Path("all.tar").write_bytes(damaged)
    _, names, summary = tag(["all.tar"])
    assert (len(names), summary.failed) == (58, 3)
    assert "all.tar: cannot be read to its end (" in read_failures()[-1]
    Path("cut.tar").write_bytes(whole[: at + 540])
    _, names, summary = tag(["cut.tar", "pictures"])
    assert (summary.tagged, summary.failed) == (58 + 98, 6)
    Path("none.tar").write_bytes(b"no shard" * 100)
    _, _, summary = tag(["none.tar", "pictures"])
    assert (summary.tagged, summary.failed) == (98, 3)

    write_table("bytes.parquet", "bytes")
    content = bytearray(Path("bytes.parquet").read_bytes())
    start = pq.ParquetFile("bytes.parquet").metadata.row_group(1).column(1).dictionary_page_offset
    content[start : start + 400] = b"\xff" * 400
    Path("bytes.parquet").write_bytes(content)
    _, _, summary = tag(["bytes.parquet"])
    assert (summary.pictures, summary.failed) == (COUNT, 33 + 1)
    Path("bytes.parquet").write_bytes(content[:1000])
    _, _, summary = tag(["bytes.parquet", "pictures"])
    assert (summary.tagged, summary.failed) == (98, 3)


def test_a_page_that_claims_gigabytes_gets_none(here: Path) -> None:
    write_table("bytes.parquet", "bytes")
    content = bytearray(Path("bytes.parquet").read_bytes())
    at = pq.ParquetFile("bytes.parquet").metadata.row_group(1).column(1).dictionary_page_offset
    assert content[at : at + 3 : 2] == b"\x15\x15"  # the kind of the page, then its size, in Thrift's compact form
    at += 3
    while content[at] & 0x80:
        at += 1
    at, end = at + 2, at + 2  # its compressed size
    while content[end] & 0x80:
        end += 1
    content[at : end + 1] = b"\xfe\xff\xff\xff\x0f"  # 2 GiB - 1
    Path("bytes.parquet").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, _, summary = tag(["bytes.parquet"])
    assert (summary.pictures, summary.failed >= 33) == (COUNT, True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_limits_and_missing_images_are_rows(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MAX_BYTES", 60)  # the images have about 80 bytes, those that are none 10
    write_tar(Path("all.tar"), 0, 5)
    Path("more.txt").write_text("memory://nowhere/a.png\nnowhere.png\npictures/0001.png\n\n")
    pq.write_table(pa.table({"jpg": pa.array([None, read_images()[0]], pa.binary())}), "few.parquet")
    _, names, summary = tag(["all.tar", "more.txt", "few.parquet"])
    assert (names, summary.failed) == (["pictures/0001.png"], 9)
    failures = read_failures()
    assert sum("has more than the limit of 60 bytes" in row for row in failures) == 5
    assert sum("there is no image in this row" in row for row in failures) == 1
    assert sum("cannot be read" in row for row in failures) == 2


def test_what_cannot_be_found_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"id": [1]}), "ids.parquet")
    for word, message in (
        ("nowhere.tar", "nowhere.tar: there is no such file"),
        ("*.tar", r"\*.tar: there is no image in it"),
        ("ids.parquet", "ids.parquet: has no column of images; call it one of image"),
        ("memory://nowhere/*.png", "there is no image in it"),
        ("nonsense://a", "nonsense://a: cannot be listed .*Protocol not known"),
    ):
        with pytest.raises(InputError, match=message):
            list(find_sources([word]))
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InputError, match=r"fsspec: is not installed; pip install .*\[remote\]"):
        find_sources(["s3://bucket/photos"])


def test_a_folder_that_cannot_be_listed_is_a_row(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("pictures/secret").mkdir()
    scan = os.scandir

    def refuse(path: Any = ".") -> Any:
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert list(find_images(["pictures"]))[-1] == "pictures/secret"
    _, names, summary = tag(["pictures"])
    assert (len(names), summary.failed) == (98, 3)
    assert read_failures()[-1].endswith('/pictures/secret: cannot be read (Permission denied); check the path"}')
    with pytest.raises(InputError, match="secret: cannot be read"):
        list(find_images(["pictures/secret"]))
