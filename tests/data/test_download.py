import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_server import FileServer

from pivotpatch.data.download import RemoteFile, download_file
from pivotpatch.errors import InputError

CONTENT = np.random.default_rng(0).bytes(50_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


def fetch(
    server: FileServer, folder: Path, *, size: int | None = None, md5: str | None = None, attempts: int = 3
) -> Path:
    remote = RemoteFile(f"{server.url}/a.zip", size=size, md5=md5)
    return download_file(remote, folder, timeout=5, attempts=attempts, backoff=0.001)


def entry(folder: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((folder / "downloads.json").read_text())["a.zip"]
    return held


def test_whole_file_arrives_and_is_recorded(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", CONTENT)
    path = fetch(file_server, tmp_path / "new" / "folder", size=len(CONTENT), md5=MD5)
    assert path.read_bytes() == CONTENT
    assert not path.with_name("a.zip.part").exists()
    assert entry(path.parent)["sha256"] == hashlib.sha256(CONTENT).hexdigest()


def test_progress_counts_every_byte_of_fetching_and_checking(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", CONTENT)
    told: list[tuple[str, int, int | None]] = []
    download_file(RemoteFile(f"{file_server.url}/a.zip"), tmp_path, progress=lambda *step: told.append(step))
    size = len(CONTENT)
    assert [step for step in told if step[1] == size] == [("fetch a.zip", size, size), ("check a.zip", size, size)]


def test_cut_connection_goes_on_where_it_stopped(file_server: FileServer, tmp_path: Path) -> None:
    served = file_server.serve("a.zip", CONTENT)
    served.cuts.extend([10_000, 5_000])
    assert fetch(file_server, tmp_path, md5=MD5).read_bytes() == CONTENT
    assert file_server.asked == [None, "bytes=10000-", "bytes=15000-"]


def test_tries_that_bring_bytes_do_not_count_as_failures(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", CONTENT).cuts.extend([4_000] * 12)
    assert fetch(file_server, tmp_path, attempts=2).read_bytes() == CONTENT
    assert len(file_server.asked) == 13


def test_next_call_resumes_what_an_earlier_one_left(file_server: FileServer, tmp_path: Path) -> None:
    served = file_server.serve("a.zip", CONTENT)
    served.cuts.extend([20_000, 0, 0])
    with pytest.raises(InputError, match=r"broke \(closed after 20,000 of 50,000 bytes\) with 20,000 bytes.*again"):
        fetch(file_server, tmp_path)
    assert (tmp_path / "a.zip.part").read_bytes() == CONTENT[:20_000]
    file_server.asked.clear()
    assert fetch(file_server, tmp_path, md5=MD5).read_bytes() == CONTENT
    assert file_server.asked == ["bytes=20000-"]


@pytest.mark.parametrize("change", ["etag", "no ranges", "no validator"])
def test_starts_over_where_bytes_cannot_be_joined(file_server: FileServer, tmp_path: Path, change: str) -> None:
    served = file_server.serve("a.zip", b"x" * 50_000)
    served.etag = None if change == "no validator" else '"old"'
    served.cuts.extend([20_000, 0, 0])
    with pytest.raises(InputError, match=r"broke"):
        fetch(file_server, tmp_path)
    served.content, served.ranges = CONTENT, change != "no ranges"
    if change == "etag":
        served.etag = '"new"'
    assert fetch(file_server, tmp_path, md5=MD5).read_bytes() == CONTENT


def test_moved_file_is_followed_and_resumed(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("new/a.zip", CONTENT).cuts.append(20_000)
    file_server.moved["/a.zip"] = "/new/a.zip"
    assert fetch(file_server, tmp_path, md5=MD5).read_bytes() == CONTENT
    assert file_server.asked == [None, None, "bytes=20000-", "bytes=20000-"]


def test_bytes_of_two_servers_are_not_joined(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", b"x" * 50_000).cuts.extend([20_000, 0, 0])
    with pytest.raises(InputError, match=r"broke"):
        fetch(file_server, tmp_path)
    file_server.serve("mirror/a.zip", CONTENT)
    remote = RemoteFile(f"{file_server.url}/a.zip", md5=MD5).at(f"{file_server.url}/mirror")
    assert download_file(remote, tmp_path).read_bytes() == CONTENT


def test_weak_etag_is_not_trusted_for_resuming(file_server: FileServer, tmp_path: Path) -> None:
    served = file_server.serve("a.zip", CONTENT)
    served.etag = 'W/"weak"'
    served.cuts.append(20_000)
    assert fetch(file_server, tmp_path).read_bytes() == CONTENT
    assert file_server.asked == [None, None]


def test_partial_file_longer_than_the_servers_is_dropped(file_server: FileServer, tmp_path: Path) -> None:
    served = file_server.serve("a.zip", CONTENT)
    served.cuts.extend([20_000, 0, 0])
    with pytest.raises(InputError, match=r"broke"):
        fetch(file_server, tmp_path)
    served.content = CONTENT[:10_000]
    assert fetch(file_server, tmp_path).read_bytes() == CONTENT[:10_000]


def test_complete_partial_file_needs_only_its_check(file_server: FileServer, tmp_path: Path) -> None:
    served = file_server.serve("a.zip", CONTENT)
    (tmp_path / "a.zip.part").write_bytes(CONTENT)
    fetch(file_server, tmp_path, size=len(CONTENT), md5=MD5)
    assert file_server.asked == []
    (tmp_path / "a.zip").rename(tmp_path / "a.zip.part")
    (tmp_path / "downloads.json").write_text(
        json.dumps({"a.zip": {"url": f"{file_server.url}/a.zip", "validator": served.etag}})
    )
    assert fetch(file_server, tmp_path, md5=MD5).read_bytes() == CONTENT
    assert file_server.asked == ["bytes=50000-"]


def test_announced_length_that_is_too_long_is_not_believed(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", CONTENT).announced = 60_000
    assert fetch(file_server, tmp_path, md5=MD5).read_bytes() == CONTENT


def test_announced_length_that_is_too_short_fails_the_checksum(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", CONTENT).announced = 40_000
    with pytest.raises(InputError, match=rf"has md5 .* where {MD5} is published; it was removed"):
        fetch(file_server, tmp_path, md5=MD5)
    assert not (tmp_path / "a.zip.part").exists()
    assert not (tmp_path / "a.zip").exists()


def test_length_other_than_published_is_refused_before_the_body(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", CONTENT)
    with pytest.raises(InputError, match=r"offers 50,000 bytes where 70,000 are published"):
        fetch(file_server, tmp_path, size=70_000)
    assert not (tmp_path / "a.zip.part").exists()


def test_file_that_has_no_room_is_refused(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", CONTENT).announced = 10**18
    with pytest.raises(InputError, match=r"1,000,000,000,000,000,000 bytes are still to come and .* are free"):
        fetch(file_server, tmp_path)


def test_missing_file_is_final_and_a_busy_server_is_not(file_server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a.zip: the server answered 404 Not Found; check the address"):
        fetch(file_server, tmp_path)
    assert len(file_server.asked) == 1
    file_server.serve("a.zip", CONTENT).status.extend([503, 429])
    assert fetch(file_server, tmp_path).read_bytes() == CONTENT


def test_answer_without_a_length_ends_at_the_published_one(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", bytes(50_000_000)).announced = ""
    told: list[int] = []
    remote = RemoteFile(f"{file_server.url}/a.zip", size=1_000)
    with pytest.raises(
        InputError, match=r"a.zip: the server sends more than the 1,000 bytes that are published; check"
    ):
        download_file(remote, tmp_path, progress=lambda what, done, total: told.append(done))
    assert max(told, default=0) <= 1_000
    assert not (tmp_path / "a.zip.part").exists()


@pytest.mark.parametrize("announced", ["abc", "", "-5", "9" * 5_000])
def test_length_that_is_no_number_is_no_length(announced: str, file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", CONTENT).announced = announced
    assert fetch(file_server, tmp_path, md5=MD5).read_bytes() == CONTENT


def test_part_that_nobody_asked_for_is_refused(file_server: FileServer, tmp_path: Path) -> None:
    served = file_server.serve("a.zip", CONTENT)
    served.odd_range = "bytes 100-49999/50000"
    with pytest.raises(InputError, match=r"the server sent another range, 'bytes 100-49999/50000'\) with 0 bytes"):
        fetch(file_server, tmp_path)
    served.odd_range = None
    assert fetch(file_server, tmp_path, md5=MD5).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "url", ["http://[bad/a.zip", "http://127.0.0.1:1/ü/a.zip", f"http://{'x' * 64}.invalid/a.zip", "http://a b/a.zip"]
)
def test_address_that_cannot_be_used_is_named(url: str, file_server: FileServer, tmp_path: Path) -> None:
    message = r"^http://[^\n]+: it is, or leads to, an address that cannot be used \([^\n]+\); check the address[^\n]+$"
    with pytest.raises(InputError, match=message):
        download_file(RemoteFile(url), tmp_path)
    if "[bad" in url:
        file_server.moved["/a.zip"] = url
        with pytest.raises(InputError, match=message):
            fetch(file_server, tmp_path)
        assert file_server.asked == [None]


def test_what_a_server_says_stays_on_one_line(file_server: FileServer, tmp_path: Path) -> None:
    file_server.moved["/a.zip"] = "/a.zip"
    with pytest.raises(InputError, match=r"^[^\n]+ answered 301 The HTTP server .* infinite loop\. The last [^\n]+$"):
        fetch(file_server, tmp_path)
    file_server.moved.clear()
    file_server.reasons["/a.zip"] = "Gone\x1b[2J\x07away"
    with pytest.raises(InputError, match=r"the server answered 410 Gone \[2J away; check"):
        fetch(file_server, tmp_path)


def test_nobody_listening_is_told_with_the_reason(file_server: FileServer, tmp_path: Path) -> None:
    file_server.server_close()
    with pytest.raises(InputError, match=r"Connection refused.* with 0 bytes fetched"):
        fetch(file_server, tmp_path)


def test_silent_server_runs_into_the_timeout(file_server: FileServer, tmp_path: Path) -> None:
    file_server.serve("a.zip", CONTENT).pause = 0.6
    with pytest.raises(InputError, match=r"timed out"):
        download_file(RemoteFile(f"{file_server.url}/a.zip"), tmp_path, timeout=0.1, attempts=1)


def test_file_in_place_is_checked_not_fetched(file_server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(CONTENT)
    fetch(file_server, tmp_path, md5=MD5)
    (tmp_path / "a.zip").write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(
        InputError, match=r"has sha256 .* where an earlier download had .*; delete it .*delete its entry"
    ):
        fetch(file_server, tmp_path)
    (tmp_path / "a.zip").write_bytes(b"short")
    with pytest.raises(InputError, match=r"has 5 bytes where 50,000 are published; delete it"):
        fetch(file_server, tmp_path, size=50_000)
    assert file_server.asked == []
    assert (tmp_path / "a.zip").read_bytes() == b"short"


def test_second_download_must_equal_the_first(file_server: FileServer, tmp_path: Path) -> None:
    served = file_server.serve("a.zip", CONTENT)
    fetch(file_server, tmp_path).unlink()
    served.content = b"other"
    with pytest.raises(InputError, match=r"where an earlier download had .* it was removed"):
        fetch(file_server, tmp_path)
    served.content = CONTENT
    assert fetch(file_server, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://host/a.zip", "a.zip"])
def test_only_web_addresses(url: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a web address; give one that starts with http"):
        download_file(RemoteFile(url), tmp_path)


def test_mirror_holds_the_file_under_its_own_name() -> None:
    there = RemoteFile("http://far.example/deep/down/a.zip", size=3, md5="x").at("http://near.example/all/")
    assert there == RemoteFile("http://near.example/all/a.zip", size=3, md5="x")


@pytest.mark.parametrize("damage", ["{", "[]", '{"a.zip": {"who": 1}}', '{"a.zip": 1}'])
def test_damaged_manifest_is_named(damage: str, file_server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "downloads.json").write_text(damage)
    with pytest.raises(InputError, match=r"downloads.json: is damaged .*; delete it and run again"):
        fetch(file_server, tmp_path)


def test_folder_that_cannot_be_made_is_named(file_server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(InputError, match=r"taken: .*; choose a folder that can be written to"):
        fetch(file_server, tmp_path / "taken")


def test_interrupt_keeps_the_part_and_the_next_call_resumes(file_server: FileServer, tmp_path: Path) -> None:
    served = file_server.serve("a.zip", CONTENT)
    served.pause = 0.02
    script = (
        "import sys; from pathlib import Path\n"
        "from pivotpatch.data.download import RemoteFile, download_file\n"
        "download_file(RemoteFile(sys.argv[1]), Path(sys.argv[2]), progress=lambda *_: print('on', flush=True))\n"
    )
    arguments = [sys.executable, "-c", script, f"{file_server.url}/a.zip", str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)
    assert process.returncode == -signal.SIGINT
    kept = (tmp_path / "a.zip.part").stat().st_size
    assert 0 < kept < len(CONTENT)
    served.pause = 0.0
    file_server.asked.clear()
    assert fetch(file_server, tmp_path, md5=MD5).read_bytes() == CONTENT
    assert file_server.asked == [f"bytes={kept}-"]
