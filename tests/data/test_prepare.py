import bz2
import io
import lzma
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer
from PIL import Image

from pivotpatch.data.address import open_records
from pivotpatch.data.download import RemoteFile
from pivotpatch.data.prepare import PLANS, DatasetPlan, prepare, unpack
from pivotpatch.errors import InputError


def jpeg(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def tar_bytes(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def zip_bytes(files: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as held:
        for name, content in files.items():
            held.writestr(name, content)
    return out.getvalue()


def voc_tar(part: str, names: list[str]) -> bytes:
    """An archive as VOC 2007 publishes it, with one picture of a cat a name."""
    top = "VOCdevkit/VOC2007"
    xml = "<annotation><object><name>cat</name><difficult>0</difficult></object></annotation>"
    files = {f"{top}/ImageSets/Main/{part}.txt": "\n".join(names).encode()}
    for name in names:
        files[f"{top}/JPEGImages/{name}.jpg"] = jpeg(int(name))
        files[f"{top}/Annotations/{name}.xml"] = xml.encode()
    return tar_bytes(files)


@pytest.fixture
def voc(file_server: FileServer) -> DatasetPlan:
    """A small VOC 2007 on the test server."""
    file_server.serve("trainval.tar", voc_tar("trainval", ["000005", "000007", "000009"]))
    file_server.serve("test.tar", voc_tar("test", ["000001", "000002"]))
    return DatasetPlan(
        (RemoteFile(f"{file_server.url}/trainval.tar"), RemoteFile(f"{file_server.url}/test.tar")),
        files={"VOCdevkit/VOC2007/JPEGImages/*.jpg": 5},
        records={"voc:{root}/VOCdevkit@2007-trainval": (3,), "voc:{root}/VOCdevkit@2007-test": (1, 2)},
    )


def test_archives_are_fetched_unpacked_and_counted(voc: DatasetPlan, tmp_path: Path) -> None:
    root = tmp_path / "voc"
    counts = prepare(voc, root)
    assert counts == {f"voc:{root}/VOCdevkit@2007-trainval": 3, f"voc:{root}/VOCdevkit@2007-test": 2}
    record = open_records(f"voc:{root}/VOCdevkit@2007-test")[0]
    assert isinstance(record.image, Path)
    assert record.image.read_bytes() == jpeg(1)
    assert sorted(path.name for path in root.iterdir()) == ["VOCdevkit", "downloads"]


def test_what_is_complete_is_not_fetched_again(voc: DatasetPlan, tmp_path: Path, file_server: FileServer) -> None:
    counts = prepare(voc, tmp_path)
    file_server.server_close()
    for archive in (tmp_path / "downloads").iterdir():
        archive.unlink()
    assert prepare(voc, tmp_path) == counts


def test_second_run_goes_on_where_the_first_broke(voc: DatasetPlan, tmp_path: Path, file_server: FileServer) -> None:
    served = file_server.files.pop("test.tar")
    with pytest.raises(InputError, match=r"test.tar: the server answered 404"):
        prepare(voc, tmp_path)
    file_server.files["test.tar"] = served
    file_server.asked.clear()
    prepare(voc, tmp_path)
    assert file_server.asked == [None]


def test_mirror_and_archives_put_there_by_hand(voc: DatasetPlan, tmp_path: Path, file_server: FileServer) -> None:
    far = DatasetPlan(
        tuple(RemoteFile(f"http://far.invalid/{remote.name}") for remote in voc.archives), voc.files, voc.records
    )
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "trainval.tar").write_bytes(file_server.files["trainval.tar"].content)
    assert list(prepare(far, tmp_path, base_url=file_server.url).values()) == [3, 2]
    assert len(file_server.asked) == 1


def test_wrong_counts_are_errors_with_a_way_out(voc: DatasetPlan, tmp_path: Path) -> None:
    more = DatasetPlan(voc.archives, {"VOCdevkit/VOC2007/JPEGImages/*.jpg": 9_963}, voc.records)
    with pytest.raises(InputError, match=r"JPEGImages/\*.jpg matches 5 files where 9,963 belong; delete .*downloads"):
        prepare(more, tmp_path)
    other = DatasetPlan(voc.archives, voc.files, {"voc:{root}/VOCdevkit@2007-test": (4_952, 5_000)})
    with pytest.raises(InputError, match=r"2007-test: holds 2 records where 4,952 or 5,000 belong; delete"):
        prepare(other, tmp_path)


def test_deleting_the_manifest_mends_lost_pictures(voc: DatasetPlan, tmp_path: Path) -> None:
    prepare(voc, tmp_path)
    (tmp_path / "VOCdevkit/VOC2007/JPEGImages/000001.jpg").unlink()
    with pytest.raises(InputError, match=r"matches 4 files where 5 belong"):
        prepare(voc, tmp_path)
    (tmp_path / "downloads" / "downloads.json").unlink()
    assert list(prepare(voc, tmp_path).values()) == [3, 2]


def test_damaged_zip_is_found_and_a_sound_copy_accepted(tmp_path: Path, file_server: FileServer) -> None:
    sound = zip_bytes({"pictures/a.jpg": jpeg(0), "pictures/b.jpg": jpeg(1)})
    served = file_server.serve("a.zip", sound.replace(jpeg(1), jpeg(1)[:-3] + b"???"))
    plan = DatasetPlan((RemoteFile(f"{file_server.url}/a.zip"),), {"pictures/*.jpg": 2}, {})
    with pytest.raises(InputError, match=r"a.zip: is damaged \(Bad CRC-32 for file 'pictures/b.jpg'\); delete it"):
        prepare(plan, tmp_path)
    assert not (tmp_path / "pictures").exists()
    (tmp_path / "downloads" / "a.zip").unlink()
    served.content = sound
    assert prepare(plan, tmp_path) == {}
    assert (tmp_path / "pictures" / "b.jpg").read_bytes() == jpeg(1)


def link(kind: bytes, target: str = "", name: str = "a.jpg") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, target
        tar.addfile(info)
    return out.getvalue()


def zip_link() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as held:
        info = zipfile.ZipInfo("a.jpg")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        held.writestr(info, "/etc/passwd")
    return out.getvalue()


ESCAPES = ["../out.jpg", "ok/../../out.jpg", "/out.jpg", "..\\out.jpg", "C:\\out.jpg", "\\\\host\\share\\out.jpg"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(zip_bytes({"ok.jpg": b"", name: b"x"}), "leads out of the folder") for name in ESCAPES]
    + [(tar_bytes({"ok.jpg": b"", name: b"x"}), "leads out of the folder") for name in ESCAPES]
    + [
        (link(tarfile.SYMTYPE, "../../etc"), "is a link or a device"),
        (link(tarfile.SYMTYPE, "ok.jpg"), "is a link or a device"),
        (link(tarfile.LNKTYPE, "/etc/passwd"), "is a link or a device"),
        (link(tarfile.CHRTYPE), "is a link or a device"),
        (link(tarfile.BLKTYPE), "is a link or a device"),
        (link(tarfile.FIFOTYPE), "is a link or a device"),
        (zip_link(), "is a link or a device"),
    ],
)
def test_archives_that_reach_out_are_refused_whole(content: bytes, message: str, tmp_path: Path) -> None:
    archive, folder = tmp_path / "archive", tmp_path / "deep" / "folder"
    archive.write_bytes(content)
    with pytest.raises(InputError, match=f"{message}; do not use this archive"):
        unpack(archive, folder)
    assert sorted(tmp_path.rglob("*")) == [archive, tmp_path / "deep", folder]


def test_bomb_is_refused_by_its_size(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as held:
        held.writestr("zeros", bytes(10**6))
    with pytest.raises(InputError, match=r"unpacks to 1,000,000 bytes, more than 50 times its size"):
        unpack(tmp_path / "bomb.zip", tmp_path / "out")


def test_zip_that_lies_about_its_size_does_not_unpack(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as held:
        held.writestr("zeros", bytes(10**6))
    told = out.getvalue().replace((10**6).to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    (tmp_path / "liar.zip").write_bytes(told)
    with pytest.raises(InputError, match=r"is damaged \(Bad CRC-32"):
        unpack(tmp_path / "liar.zip", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def move_end(content: bytes) -> bytes:
    """Let the directory of a zip file say that its first file lies beyond the archive's beginning."""
    moved, at = bytearray(content), content.index(b"PK\x01\x02")
    moved[at + 42 : at + 46] = (2**31).to_bytes(4, "little")
    return bytes(moved)


def lock(content: bytes) -> bytes:
    """Set the flag "encrypted" in every header of a zip file."""
    locked = bytearray(content)
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = -1
        while (at := locked.find(mark, at + 1)) >= 0:
            locked[at + flags] |= 1
    return bytes(locked)


def spoil(content: bytes, *, at: int) -> bytes:
    return content[:at] + bytes(255 - byte for byte in content[at : at + 40]) + content[at + 40 :]


@pytest.mark.parametrize(
    "damage",
    ["cut tar", "cut zip", "empty", "text", "locked zip", "lzma zip", "bz2 zip", "zip offset", "xz tar", "bz2 tar"],
)
def test_damaged_archives_leave_nothing_behind(damage: str, tmp_path: Path) -> None:
    files = {"a.jpg": jpeg(0) * 20, "b.jpg": jpeg(1) * 20}
    content = {
        "cut tar": tar_bytes(files)[:15_000],
        "cut zip": zip_bytes(files)[:15_000],
        "empty": b"",
        "text": b"<html>please log in</html>" * 100,
        "locked zip": lock(zip_bytes(files)),
        "lzma zip": spoil(zip_bytes(files, zipfile.ZIP_LZMA), at=44),
        "bz2 zip": spoil(zip_bytes(files, zipfile.ZIP_BZIP2), at=44),
        "zip offset": move_end(zip_bytes(files)),
        "xz tar": spoil(lzma.compress(tar_bytes(files)), at=60),
        "bz2 tar": spoil(bz2.compress(tar_bytes(files)), at=60),
    }[damage]
    (tmp_path / "archive").write_bytes(content)
    with pytest.raises(InputError, match=r"archive: is damaged \(.+\); delete it and run the same command again"):
        unpack(tmp_path / "archive", tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*"))


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("x/a", "x/./a"), ("x/a", "x\\a")])
@pytest.mark.parametrize("pack", [zip_bytes, tar_bytes])
def test_files_with_the_same_place_are_refused(
    pack: Callable[[dict[str, bytes]], bytes], names: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "archive").write_bytes(pack(dict.fromkeys(names, b"x")))
    with pytest.raises(InputError, match=r"archive: two of its files have the same place; do not use this archive"):
        unpack(tmp_path / "archive", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_root_that_cannot_be_is_named(voc: DatasetPlan, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x+ \.\.\. x{50,}: File name too long; choose a folder"):
        prepare(voc, tmp_path / ("x" * 300))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file.*; choose a folder that can be written to"):
        prepare(voc, tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to the superuser")
def test_root_below_a_locked_folder_is_named(voc: DatasetPlan, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    with pytest.raises(InputError, match=r"locked.*: Permission denied; choose a folder that can be written to"):
        prepare(voc, locked / "root")


def test_pictures_without_their_annotations_are_not_complete(
    voc: DatasetPlan, tmp_path: Path, file_server: FileServer
) -> None:
    patterns = [pattern for pattern in PLANS["voc2007"].files if "*" not in pattern]
    plan = replace(voc, files={**dict.fromkeys(patterns, 1), **voc.files})
    prepare(plan, tmp_path)
    shutil.rmtree(tmp_path / "downloads")
    shutil.rmtree(tmp_path / "VOCdevkit" / "VOC2007" / "ImageSets")
    file_server.asked.clear()
    assert list(prepare(plan, tmp_path).values()) == [3, 2]
    assert len(file_server.asked) == 2


def test_interrupted_unpacking_leaves_nothing_and_old_staging_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes({"x/a.jpg": jpeg(0), "x/b.jpg": jpeg(1)}))

    def interrupt(what: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        unpack(tmp_path / "a.tar", out, progress=interrupt)
    assert list(out.iterdir()) == []
    (out / ".unpacking-a.tar").mkdir()
    (out / ".unpacking-a.tar" / "half.jpg").write_bytes(b"half")
    unpack(tmp_path / "a.tar", out)
    assert [path.relative_to(out).as_posix() for path in sorted(out.rglob("*"))] == ["x", "x/a.jpg", "x/b.jpg"]


def test_unpacking_merges_into_folders_that_are_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "x").mkdir(parents=True)
    (out / "x" / "kept.jpg").write_bytes(b"kept")
    (out / "x" / "a.jpg").write_bytes(b"old")
    (tmp_path / "a.tar").write_bytes(tar_bytes({"x/a.jpg": b"new", "y/b.jpg": b"b"}))
    told: list[tuple[str, int, int | None]] = []
    unpack(tmp_path / "a.tar", out, progress=lambda *step: told.append(step))
    held = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*.jpg")}
    assert held == {"x/kept.jpg": b"kept", "x/a.jpg": b"new", "y/b.jpg": b"b"}
    assert told == [("unpack a.tar", 3, 4), ("unpack a.tar", 4, 4)]


def test_archive_that_would_replace_a_folder_by_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out" / "x" / "y").mkdir(parents=True)
    (tmp_path / "a.tar").write_bytes(tar_bytes({"x/y": b"a file"}))
    with pytest.raises(InputError, match=r"[Ii]s a directory"):
        unpack(tmp_path / "a.tar", tmp_path / "out")


def test_official_plans_agree_with_themselves() -> None:
    for plan in PLANS.values():
        assert len({remote.name for remote in plan.archives}) == len(plan.archives)
        # Images without annotation may be left out, never the other way round.
        pictures = sum(count for pattern, count in plan.files.items() if pattern.endswith(".jpg"))
        assert sum(max(counts) for counts in plan.records.values()) <= pictures
        assert any(not pattern.endswith(".jpg") for pattern in plan.files)
