"""Downloads from a server on loopback that breaks in every way that matters."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer

from pivotpatch.data import prepare
from pivotpatch.data.prepare import RemoteFile, download_file
from pivotpatch.errors import InputError

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
def test_next_call_resumes_what_an_earlier_one_left_or_starts_over(
    file_server: FileServer, tmp_path: Path, change: str
) -> None:
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


def test_silent_server_runs_into_the_timeout(
    file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_TIMEOUT", 0.1)
    file_server.serve("a.zip", CONTENT).pause = 0.6
    with pytest.raises(InputError, match=r"timed out"):
        fetch(file_server, tmp_path)


def test_file_in_place_is_checked_not_fetched(file_server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "a.zip.part").write_bytes(CONTENT)
    fetch(file_server, tmp_path, size=len(CONTENT), md5=MD5)  # complete already
    fetch(file_server, tmp_path, md5=MD5)
    (tmp_path / "a.zip").write_bytes(b"short")
    with pytest.raises(InputError, match=r"has 5 bytes where 50,000 are expected; delete it"):
        fetch(file_server, tmp_path, size=50_000)
    assert file_server.asked == []
    assert (tmp_path / "a.zip").read_bytes() == b"short"
