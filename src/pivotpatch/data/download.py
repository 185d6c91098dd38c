"""Download large files over HTTP: resume after a break, check what arrived."""

import hashlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pivotpatch import __version__
from pivotpatch.errors import InputError, quote_fault
from pivotpatch.writing import explain_disk_faults, replacing

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how many bytes are done, and of how many (None where unknown)."""

MANIFEST = "downloads.json"
_CHUNK = 1 << 20
_TIMEOUT = 30.0  # seconds without an answer before the connection counts as broken
_ATTEMPTS = 5  # tries in a row that bring no new byte
_BACKOFF = 1.0  # seconds before the second try, doubled from try to try
_NETWORK_FAULTS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)
_CHECK_ADDRESS = "check the address, or use another mirror"


@dataclass(frozen=True)
class RemoteFile:
    """A file that a server offers: its http(s) address, and its length in bytes and MD5 where published."""

    url: str
    size: int | None = None
    md5: str | None = None

    @property
    def name(self) -> str:
        """The last part of the address, which names the file on disk."""
        return self.url.rpartition("/")[2]

    def at(self, base_url: str) -> "RemoteFile":
        """The same file at a mirror that holds all files in one folder."""
        return replace(self, url=f"{base_url.rstrip('/')}/{self.name}")


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """What `downloads.json` remembers of each file: url, validator (ETag or date), sha256, unpacked."""
    path = folder / MANIFEST
    try:
        return {name: dict(entry) for name, entry in json.loads(path.read_text()).items()} if path.exists() else {}
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(str(path), f"is damaged ({error})", "delete it and run again") from None


def remember(folder: Path, name: str, **facts: str | bool | None) -> None:
    """Add facts about a file to `downloads.json`, which is replaced as a whole."""
    manifest = read_manifest(folder)
    manifest[name] = manifest.get(name, {}) | facts
    with replacing(folder / MANIFEST) as written:
        written.write_text(json.dumps(manifest, indent=2) + "\n")


def download_file(remote: RemoteFile, folder: Path, *, progress: Progress | None = None) -> Path:
    """Download a file into a folder, or check the one that is already there.

    Bytes are gathered in `<name>.part`; the next call goes on from there if the server still has the same file. The
    complete file is compared with its published length and MD5, and with the SHA-256 of an earlier download.

    Returns:
        The path of the complete, checked file.
    """
    if not remote.url.startswith(("http://", "https://")):
        raise InputError(remote.url, "is not a web address", "give one that starts with http:// or https://")
    target, part = folder / remote.name, folder / f"{remote.name}.part"
    with explain_disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists():
            _check(target, remote, progress)
            return target
        furthest, failures = -1, 0
        while True:
            try:
                _fetch(remote, part, progress)
                break
            except _NETWORK_FAULTS as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                    if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                        part.unlink(missing_ok=True)  # longer than the server's file
                    elif error.code < 500 and error.code not in (408, 429):  # no second try will mend it
                        wrong = f"the server answered {error.code} {error.reason}"
                        raise InputError(remote.url, wrong, _CHECK_ADDRESS) from None
                reached = part.stat().st_size if part.exists() else 0
                failures = 1 if reached > furthest else failures + 1
                furthest = max(furthest, reached)
                if failures >= _ATTEMPTS:
                    wrong = f"the connection broke ({quote_fault(error)}) with {reached:,} bytes fetched"
                    raise InputError(remote.url, wrong, "run the same command again to go on from there") from None
                time.sleep(_BACKOFF * 2 ** (failures - 1))
        _check(part, remote, progress)
        part.replace(target)
    return target


def _fetch(remote: RemoteFile, part: Path, progress: Progress | None) -> None:
    """One connection: append what the partial file lacks, or begin again where the server cannot go on."""
    known = read_manifest(part.parent).get(remote.name, {})
    done = part.stat().st_size if part.exists() else 0
    if done == remote.size:
        return
    headers = {"User-Agent": f"pivotpatch/{__version__}"}
    if done and known.get("validator") and known.get("url") == remote.url:
        headers |= {"Range": f"bytes={done}-", "If-Range": known["validator"]}
    try:
        request = urllib.request.Request(remote.url, headers=headers)  # noqa: S310 - http(s) only, see download_file
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT)  # noqa: S310 - as above
    except (ValueError, http.client.InvalidURL) as error:
        wrong = f"it is, or leads to, an address that cannot be used ({quote_fault(error)})"
        raise InputError(remote.url, wrong, _CHECK_ADDRESS) from None
    with answer:
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            done = 0
            etag = answer.headers.get("ETag", "W/")  # a weak one does not promise the same bytes
            validator = answer.headers.get("Last-Modified") if etag.startswith("W/") else etag
            remember(part.parent, remote.name, url=remote.url, validator=validator)
        elif "Range" not in headers or not answer.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            part.unlink(missing_ok=True)
            raise ConnectionError("the server sent another range than it was asked for")
        total = None if answer.length is None else done + answer.length
        if total is not None and remote.size not in (None, total):
            wrong = f"the server offers {total:,} bytes where {remote.size:,} are published"
            raise InputError(remote.url, wrong, _CHECK_ADDRESS)
        with part.open("ab" if done else "wb") as file:
            while piece := _read_piece(answer):
                done += len(piece)
                if remote.size is not None and done > remote.size:
                    part.unlink()
                    wrong = f"the server sends more than the {remote.size:,} bytes that are published"
                    raise InputError(remote.url, wrong, _CHECK_ADDRESS)
                file.write(piece)
                if progress:
                    progress(f"fetch {remote.name}", done, total)
    if total is not None and done < total:
        raise ConnectionError(f"closed after {done:,} of {total:,} bytes")


def _read_piece(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read1(_CHUNK)  # not read(): what came before a break must not be lost
    except OSError as error:
        raise ConnectionError(str(error)) from error  # a fault of the network, not of the disk


def _check(path: Path, remote: RemoteFile, progress: Progress | None) -> None:
    """Compare a complete file with all that is known of it; a partial file that fails is removed."""
    if progress:
        progress(f"check {remote.name}", 0, None)
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            md5.update(piece)
            sha256.update(piece)
    earlier = read_manifest(path.parent).get(remote.name, {}).get("sha256")
    for kind, found, wanted in (
        ("length", path.stat().st_size, remote.size),
        ("md5", md5.hexdigest(), remote.md5),
        ("sha256", sha256.hexdigest(), earlier),
    ):
        if wanted not in (None, found):
            if path.suffix == ".part":
                path.unlink()
            todo = "delete it and run the same command again"
            if kind == "sha256":
                todo += f"; if it is the right file, delete its entry in {path.parent / MANIFEST} instead"
            raise InputError(str(path), f"has {kind} {found} where {wanted} is expected", todo)
    remember(path.parent, remote.name, sha256=sha256.hexdigest())
