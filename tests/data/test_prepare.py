"""Downloads from a server that breaks in every way that matters, and archives of every kind of damage."""

import hashlib
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer
from made_archives import serve_voc, tar_bytes, zip_bytes
from made_records import noise

from pivotpatch.data.address import open_records
from pivotpatch.data.prepare import DatasetPlan, RemoteFile, download_file, prepare, unpack
from pivotpatch.errors import InputError


@pytest.fixture
def voc(file_server: FileServer) -> DatasetPlan:
    """A small VOC 2007 on the test server."""
    return serve_voc(file_server, file_server.url)


def test_archives_are_fetched_unpacked_and_counted(voc: DatasetPlan, tmp_path: Path, file_server: FileServer) -> None:
    root = tmp_path / "voc"
    counts = prepare(voc, root)
    assert counts == {f"voc:{root}/VOCdevkit@2007-trainval": 3, f"voc:{root}/VOCdevkit@2007-test": 2}
    record = open_records(f"voc:{root}/VOCdevkit@2007-test")[0]
    assert isinstance(record.image, Path)
    assert record.image.read_bytes() == noise(1, side=64)
    assert sorted(path.name for path in root.iterdir()) == ["VOCdevkit", "downloads"]
    file_server.server_close()  # what is complete is not fetched again
    for archive in (root / "downloads").iterdir():
        archive.unlink()
    assert prepare(voc, root) == counts


def test_only_what_is_missing_is_fetched(voc: DatasetPlan, tmp_path: Path, file_server: FileServer) -> None:
    served = file_server.files.pop("test.tar")
    with pytest.raises(InputError, match=r"test.tar: cannot be fetched .*404"):
        prepare(voc, tmp_path)
    file_server.files["test.tar"] = served
    file_server.asked.clear()
    prepare(voc, tmp_path)
    assert file_server.asked == ["bytes=0-"]
    (tmp_path / "VOCdevkit/VOC2007/JPEGImages/000001.jpg").unlink()
    with pytest.raises(InputError, match=r"matches 4 files where 5 belong; delete .*unpacked and run"):
        prepare(voc, tmp_path)
    (tmp_path / "downloads" / "test.tar.unpacked").unlink()
    assert list(prepare(voc, tmp_path).values()) == [3, 2]
    other = replace(voc, records={"voc:{root}/VOCdevkit@2007-test": (4_952, 5_000)})
    with pytest.raises(InputError, match=r"2007-test: holds 2 records where 4,952 or 5,000 belong; delete"):
        prepare(other, tmp_path)


def link(target: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.type, info.linkname = tarfile.SYMTYPE, target
        tar.addfile(info)
    return out.getvalue()


ESCAPES = ["../out.jpg", "ok/../../out.jpg", "/out.jpg", "/tmp/../out.jpg"]


@pytest.mark.parametrize("pack", [zip_bytes, tar_bytes])
@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_is_written_outside_the_folder(name: str, pack: Callable[..., bytes], tmp_path: Path) -> None:
    archive, folder = tmp_path / "archive", tmp_path / "deep" / "folder"
    archive.write_bytes(pack({"ok.jpg": b"", name: b"x"}))
    with suppress(InputError):
        unpack(archive, folder)
    outside = [path for path in tmp_path.rglob("*") if not path.is_relative_to(folder)]
    assert sorted(outside) == [archive, tmp_path / "deep"]
    assert not Path("/out.jpg").exists()


def spoil(content: bytes, *, at: int) -> bytes:
    return content[:at] + bytes(255 - byte for byte in content[at : at + 40]) + content[at + 40 :]


FILES = {"a.jpg": noise(0) * 20, "b.jpg": noise(1) * 20}
LIAR = zip_bytes({"zeros": bytes(10**6)}, zipfile.ZIP_DEFLATED)
DAMAGED = {
    "cut tar": tar_bytes(FILES)[:15_000],
    "cut zip": zip_bytes(FILES)[:15_000],
    "text": b"<html>please log in</html>" * 100,
    "zip that lies about a size": LIAR.replace((10**6).to_bytes(4, "little"), (1000).to_bytes(4, "little")),
    "lzma zip": spoil(zip_bytes(FILES, zipfile.ZIP_LZMA), at=44),
    "xz tar": spoil(lzma.compress(tar_bytes(FILES)), at=60),
    "link that leads out": link("../../etc"),
    "absolute link": link("/etc/passwd"),
    "1,000,000 bytes, more than 50 times its size": LIAR,
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_refused_archives_leave_nothing_behind(damage: str, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(DAMAGED[damage])
    message = damage if "times" in damage else r"archive: cannot be unpacked \(.+\); delete it if it is damaged"
    with pytest.raises(InputError, match=message):
        unpack(tmp_path / "archive", tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*"))


def test_unpacking_merges_into_folders_that_are_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "x").mkdir(parents=True)
    (out / "x" / "kept.jpg").write_bytes(b"kept")
    (out / "x" / "a.jpg").write_bytes(b"old")
    (out / ".unpacking-a.tar").mkdir()
    (out / ".unpacking-a.tar" / "half.jpg").write_bytes(b"half")
    (tmp_path / "a.tar").write_bytes(tar_bytes({"x/a.jpg": b"new", "y/b.jpg": b"b"}))
    unpack(tmp_path / "a.tar", out)
    held = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert held == {"x/kept.jpg": b"kept", "x/a.jpg": b"new", "y/b.jpg": b"b"}


CONTENT = np.random.default_rng(0).bytes(50_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


def fetch(server: FileServer, folder: Path, *, size: int | None = None, md5: str | None = None) -> Path:
    return download_file(RemoteFile(f"{server.url}/a.zip", size=size, md5=md5), folder)


@pytest.mark.parametrize("announced", [None, "abc", "", "-5"])  # a length that is no number is none
def test_whole_file_arrives(announced: str | None, file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", CONTENT).announced = announced
    told: list[tuple[str, int, int | None]] = []
    remote = RemoteFile(f"{file_server.url}/a.zip", len(CONTENT), MD5)
    path = download_file(remote, tmp_path / "new" / "folder", progress=lambda *step: told.append(step))
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert told[-2:] == [("fetch a.zip", len(CONTENT), len(CONTENT)), ("check a.zip", 0, None)]


@pytest.mark.parametrize("change", ["none", "no ranges", "shorter"])
def test_a_call_resumes_an_earlier_one_or_starts_over(file_server: FileServer, tmp_path: Path, change: str) -> None:
    served = file_server.serve("new/a.zip", CONTENT)
    file_server.moved["/a.zip"] = "/new/a.zip"
    served.cuts.append(20_000)
    with pytest.raises(InputError, match=r"cannot be fetched .*20,000 of .*; run the same command again"):
        fetch(file_server, tmp_path)
    file_server.asked.clear()
    served.ranges = change != "no ranges"
    served.content = CONTENT[:10_000] if change == "shorter" else CONTENT
    if change == "shorter":  # than what is there already
        with pytest.raises(InputError, match="416"):
            fetch(file_server, tmp_path)
    md5 = hashlib.md5(served.content).hexdigest()
    assert fetch(file_server, tmp_path, md5=md5).read_bytes() == served.content
    assert file_server.asked == ["bytes=20000-"] * 2 + ["bytes=0-"] * 2 * (change == "shorter")


@pytest.mark.parametrize(
    ("announced", "size", "message"),
    [(40_000, None, rf"has md5 .* where {MD5} is expected"), ("", 1_000, "bytes where 1,000 are expected")],
)
def test_what_is_not_as_published_is_removed(
    file_server: FileServer, tmp_path: Path, announced: int | str, size: int | None, message: str
) -> None:
    file_server.serve("a.zip", CONTENT).announced = announced
    with pytest.raises(InputError, match=f"{message}; delete it and run"):
        fetch(file_server, tmp_path, size=size, md5=MD5)
    assert not list(tmp_path.glob("a.zip*"))


@pytest.mark.parametrize(("url", "message"), [
    ("file:///etc/hostname", "is not a web address; give one that starts with http"),
    ("http://[bad/a.zip", "check the address"),
    ("http://127.0.0.1:1/a.zip", "Connection refused"),
])  # fmt: skip
def test_address_that_cannot_be_used_is_named(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^{url[:4]}[^\n]+{message}[^\n]*$"):
        download_file(RemoteFile(url), tmp_path)


def test_a_silent_server_times_out(file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pivotpatch.data.prepare._TIMEOUT", 0.1)
    file_server.serve("a.zip", CONTENT).pause = 0.6
    with pytest.raises(InputError, match=r"timed out"):
        fetch(file_server, tmp_path)
