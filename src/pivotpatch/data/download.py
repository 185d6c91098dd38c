"""Download large files over HTTP: resume after a break, check what arrived."""

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pivotpatch import __version__
from pivotpatch.errors import InputError, quote_fault
from pivotpatch.writing import explain_disk_faults

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how many bytes are done, and of how many (None where unknown)."""

_CHUNK = 1 << 20
_TIMEOUT = 30.0  # seconds without an answer before the connection counts as broken
_FAULTS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ValueError)


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


def download_file(remote: RemoteFile, folder: Path, *, progress: Progress | None = None) -> Path:
    """Download a file into a folder, or check the one that is already there.

    Bytes are gathered in `<name>.part`, from which the next call goes on. The complete file is compared with its
    published length and MD5.

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
        if _measure(part) != remote.size:
            try:
                _fetch(remote, part, progress)
            except _FAULTS as error:
                wrong = f"cannot be fetched ({quote_fault(error)}) beyond {_measure(part):,} bytes"
                todo = "run the same command again to go on from there; if that does not help, check the address"
                raise InputError(remote.url, wrong, todo) from None
        _check(part, remote, progress)
        part.replace(target)
    return target


def _measure(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _fetch(remote: RemoteFile, part: Path, progress: Progress | None) -> None:
    """One connection: append what the partial file lacks, or begin again where the server cannot go on."""
    headers = {"User-Agent": f"pivotpatch/{__version__}", "Range": f"bytes={_measure(part)}-"}
    request = urllib.request.Request(remote.url, headers=headers)  # noqa: S310 - http(s) only, see download_file
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT)  # noqa: S310 - as above
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink(missing_ok=True)  # longer than the server's file
        raise
    with answer, part.open("ab" if answer.status == http.HTTPStatus.PARTIAL_CONTENT else "wb") as file:
        done = file.tell()
        total = remote.size if answer.length is None else done + answer.length
        while (remote.size is None or done <= remote.size) and (piece := _read_piece(answer)):
            done += file.write(piece)
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
    """Compare a complete file with what is published of it; a partial file that fails is removed."""
    if progress:
        progress(f"check {remote.name}", 0, None)
    wrong = None
    if remote.size not in (None, path.stat().st_size):
        wrong = f"has {path.stat().st_size:,} bytes where {remote.size:,} are expected"
    elif remote.md5 is not None:
        with path.open("rb") as file:
            md5 = hashlib.file_digest(file, "md5").hexdigest()
        wrong = None if md5 == remote.md5 else f"has md5 {md5} where {remote.md5} is expected"
    if wrong is not None:
        if path.suffix == ".part":
            path.unlink()
        raise InputError(str(path), wrong, "delete it and run the same command again")
