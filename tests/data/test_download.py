"""Downloads from a server on loopback that breaks in every way that matters."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_server import FileServer

from pivotpatch.data import download
from pivotpatch.data.download import RemoteFile, download_file
from pivotpatch.errors import InputError

CONTENT = np.random.default_rng(0).bytes(50_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_ATTEMPTS", 3)
    monkeypatch.setattr(download, "_BACKOFF", 0.001)


def fetch(server: FileServer, folder: Path, *, size: int | None = None, md5: str | None = None) -> Path:
    return download_file(RemoteFile(f"{server.url}/a.zip", size=size, md5=md5), folder)


def test_whole_file_arrives_and_is_recorded(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", CONTENT)
    told: list[tuple[str, int, int | None]] = []
    remote = RemoteFile(f"{file_server.url}/a.zip", len(CONTENT), MD5)
    path = download_file(remote, tmp_path / "new" / "folder", progress=lambda *step: told.append(step))
    assert path.read_bytes() == CONTENT
    assert sorted(each.name for each in path.parent.iterdir()) == ["a.zip", "downloads.json"]
    held: dict[str, Any] = json.loads((path.parent / "downloads.json").read_text())
    assert held["a.zip"]["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    assert told[-2:] == [("fetch a.zip", len(CONTENT), len(CONTENT)), ("check a.zip", 0, None)]


def test_cut_connection_goes_on_where_it_stopped(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("new/a.zip", CONTENT).cuts.extend([10_000, 5_000, 4_000, 4_000])  # more breaks than attempts
    file_server.moved["/a.zip"] = "/new/a.zip"
    assert fetch(file_server, tmp_path, md5=MD5).read_bytes() == CONTENT
    asked = [None, "bytes=10000-", "bytes=15000-", "bytes=19000-", "bytes=23000-"]
    assert file_server.asked == [each for each in asked for _ in range(2)]


def leave_part(server: FileServer, folder: Path, content: bytes = CONTENT, etag: str | None = '"first"') -> None:
    """Break off a download after 20,000 bytes."""
    served = server.serve("a.zip", content)
    served.etag = etag
    served.cuts.extend([20_000, 0, 0])
    with pytest.raises(InputError, match=r"broke \(.*\) with [\d,]+ bytes fetched; run the same command again"):
        fetch(server, folder)
    server.asked.clear()


def test_next_call_resumes_what_an_earlier_one_left(file_server: FileServer, tmp_path: Path) -> None:
    leave_part(file_server, tmp_path)
    assert fetch(file_server, tmp_path, md5=MD5).read_bytes() == CONTENT
    assert file_server.asked == ["bytes=20000-"]


@pytest.mark.parametrize("change", ["etag", "no ranges", "no validator", "weak etag", "shorter", "mirror", "odd range"])
def test_starts_over_where_bytes_cannot_be_joined(file_server: FileServer, tmp_path: Path, change: str) -> None:
    etag = {"no validator": None, "weak etag": 'W/"weak"'}.get(change, '"old"')
    leave_part(file_server, tmp_path, b"x" * 50_000, etag)
    content = CONTENT[:10_000] if change == "shorter" else CONTENT
    served = file_server.serve("mirror/a.zip" if change == "mirror" else "a.zip", content)
    served.etag = '"new"' if change == "etag" else etag
    served.ranges = change != "no ranges"
    if change == "odd range":
        served.ranges, served.odd_range = False, "bytes 100-49999/50000"
        with pytest.raises(InputError, match=r"the server sent another range"):
            fetch(file_server, tmp_path)
        served.odd_range = None
    base = f"{file_server.url}/mirror/" if change == "mirror" else file_server.url
    remote = RemoteFile("http://far.example/deep/a.zip", md5=hashlib.md5(content).hexdigest()).at(base)
    assert download_file(remote, tmp_path).read_bytes() == content


def test_length_other_than_published_is_refused(file_server: FileServer, tmp_path: Path) -> None:
    served = file_server.serve("a.zip", CONTENT)
    with pytest.raises(InputError, match=r"offers 50,000 bytes where 70,000 are published"):
        fetch(file_server, tmp_path, size=70_000)
    served.announced = ""
    with pytest.raises(InputError, match=r"a.zip: the server sends more than the 1,000 bytes that are published"):
        fetch(file_server, tmp_path, size=1_000)
    assert not list(tmp_path.glob("a.zip*"))


@pytest.mark.parametrize("announced", ["abc", "", "-5", "9" * 5_000])
def test_length_that_is_no_number_is_no_length(announced: str, file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", CONTENT).announced = announced
    assert fetch(file_server, tmp_path, md5=MD5).read_bytes() == CONTENT


def test_wrong_checksum_removes_the_part(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", CONTENT).announced = 40_000
    with pytest.raises(InputError, match=rf"has md5 .* where {MD5} is expected; delete it and run"):
        fetch(file_server, tmp_path, md5=MD5)
    assert not list(tmp_path.glob("a.zip*"))


def test_missing_file_is_final_and_a_busy_server_is_not(file_server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a.zip: the server answered 404 Not Found; check the address"):
        fetch(file_server, tmp_path)
    assert len(file_server.asked) == 1
    file_server.serve("a.zip", CONTENT).status.extend([503, 429])
    assert fetch(file_server, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///etc/hostname", "is not a web address; give one that starts with http"),
        ("http://[bad/a.zip", "an address that cannot be used"),
        ("http://127.0.0.1:1/ü/a.zip", "an address that cannot be used"),
        ("http://a b/a.zip", "an address that cannot be used"),
        ("http://127.0.0.1:1/a.zip", "Connection refused.* with 0 bytes fetched"),
    ],
)
def test_address_that_cannot_be_used_is_named(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^{url[:4]}[^\n]+{message}[^\n]*$"):
        download_file(RemoteFile(url), tmp_path)


def test_silent_server_runs_into_the_timeout(
    file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_TIMEOUT", 0.1)
    monkeypatch.setattr(download, "_ATTEMPTS", 1)
    file_server.serve("a.zip", CONTENT).pause = 0.6
    with pytest.raises(InputError, match=r"timed out"):
        fetch(file_server, tmp_path)


def test_file_in_place_is_checked_not_fetched(file_server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "a.zip.part").write_bytes(CONTENT)
    fetch(file_server, tmp_path, size=len(CONTENT), md5=MD5)  # complete already
    fetch(file_server, tmp_path, md5=MD5)
    (tmp_path / "a.zip").write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(InputError, match=r"has sha256 .* where .* is expected; delete it .*delete its entry in"):
        fetch(file_server, tmp_path)
    (tmp_path / "a.zip").write_bytes(b"short")
    with pytest.raises(InputError, match=r"has length 5 where 50000 is expected; delete it"):
        fetch(file_server, tmp_path, size=50_000)
    assert file_server.asked == []
    assert (tmp_path / "a.zip").read_bytes() == b"short"


@pytest.mark.parametrize("damage", ["{", "[]", '{"a.zip": 1}'])
def test_damaged_manifest_is_named(damage: str, file_server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "downloads.json").write_text(damage)
    with pytest.raises(InputError, match=r"downloads.json: is damaged .*; delete it and run again"):
        fetch(file_server, tmp_path)


def test_folder_that_cannot_be_made_is_named(file_server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(InputError, match=r"taken: .*; choose a folder that can be written to"):
        fetch(file_server, tmp_path / "taken")
