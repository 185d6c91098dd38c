"""Fetch large files over HTTP: a broken download goes on where it stopped, and what arrives is checked."""

import hashlib
import http.client
import json
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pivotpatch import __version__
from pivotpatch.errors import InputError
from pivotpatch.writing import explain_disk_faults, replacing

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how many bytes are done, and of how many (None where nobody knows)."""

MANIFEST = "downloads.json"
_CHUNK = 1 << 20
_NETWORK_FAULTS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


@dataclass(frozen=True)
class RemoteFile:
    """A file that a server offers.

    Attributes:
        url: its address, http or https.
        size: its published length in bytes.
        md5: its published checksum.
    """

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


@dataclass(frozen=True)
class Download:
    """What the manifest remembers of one file.

    Attributes:
        url: where it came from.
        validator: the server's ETag or date for these very bytes; a broken download may only go on under the same.
        sha256: checksum of the complete file, so that a later copy can be compared.
        unpacked: whether the archive's content is in place.
    """

    url: str
    validator: str | None = None
    sha256: str | None = None
    unpacked: bool = False


class Manifest:
    """The file `downloads.json` of a folder: one `Download` a name."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / MANIFEST
        self._held: dict[str, Download] = {}
        if self.path.exists():
            try:
                self._held = {name: Download(**entry) for name, entry in json.loads(self.path.read_text()).items()}
            except (ValueError, TypeError, AttributeError) as error:
                raise InputError(str(self.path), f"is damaged ({error})", "delete it and run again") from None

    def get(self, name: str) -> Download | None:
        """What is known of a file, or None."""
        return self._held.get(name)

    def put(self, name: str, entry: Download) -> None:
        """Remember a file; the manifest on disk is replaced as a whole."""
        self._held[name] = entry
        with replacing(self.path) as written:
            written.write_text(json.dumps({name: asdict(held) for name, held in self._held.items()}, indent=2) + "\n")


def download_file(
    remote: RemoteFile,
    folder: Path,
    *,
    timeout: float = 30.0,
    attempts: int = 5,
    backoff: float = 1.0,
    progress: Progress | None = None,
) -> Path:
    """Fetch a file into a folder, or check the one that is already there.

    Bytes are gathered in `<name>.part`; whatever ends the download, the next call goes on from there if the
    server still has the same file. The complete file is compared with its published length and checksum, and
    with the checksum that `downloads.json` holds from an earlier time.

    Args:
        remote: the file.
        folder: where to put it; made if it is missing.
        timeout: seconds without an answer before the connection counts as broken.
        attempts: tries in a row that bring no new byte before giving up.
        backoff: seconds before the second try; doubled from try to try.
        progress: told about every piece.

    Returns:
        The path of the complete, checked file.
    """
    if not remote.url.startswith(("http://", "https://")):
        raise InputError(remote.url, "is not a web address", "give one that starts with http:// or https://")
    target, part = folder / remote.name, folder / f"{remote.name}.part"
    with explain_disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        manifest = Manifest(folder)
        if target.exists():
            _check(target, remote, manifest=manifest, progress=progress)
            return target
        furthest, failures = -1, 0
        while True:
            try:
                _fetch(remote, part, manifest=manifest, timeout=timeout, progress=progress)
                break
            except _NETWORK_FAULTS as error:
                if isinstance(error, urllib.error.HTTPError):
                    _refuse_final_answer(error)
                reached = part.stat().st_size if part.exists() else 0
                failures = 1 if reached > furthest else failures + 1
                furthest = max(furthest, reached)
                if failures >= attempts:
                    wrong = f"the connection broke ({_reason(error)}) with {reached:,} bytes fetched"
                    raise InputError(remote.url, wrong, "run the same command again to go on from there") from None
                time.sleep(backoff * 2 ** (failures - 1))
        _check(part, remote, manifest=manifest, progress=progress)
        part.replace(target)
    return target


class _Span(NamedTuple):
    """Which bytes an answer brings: from `start` to the file's end `total`."""

    start: int
    total: int | None


def _fetch(remote: RemoteFile, part: Path, *, manifest: Manifest, timeout: float, progress: Progress | None) -> None:
    """One connection: append to the partial file what it lacks, or begin again where it cannot be continued."""
    known = manifest.get(remote.name)
    have = part.stat().st_size if part.exists() else 0
    if have == remote.size:
        return
    headers, wanted = {"User-Agent": f"pivotpatch/{__version__}"}, 0
    if have and known and known.validator and known.url == remote.url:
        headers |= {"Range": f"bytes={have}-", "If-Range": known.validator}
        wanted = have
    try:
        request = urllib.request.Request(remote.url, headers=headers)  # noqa: S310 - http(s) only, see download_file
        answer = urllib.request.urlopen(request, timeout=timeout)  # noqa: S310 - as above
    except (ValueError, http.client.InvalidURL) as error:  # of this address, or of one that it leads to
        wrong = f"it is, or leads to, an address that cannot be used ({_reason(error)})"
        raise InputError(_one_line(remote.url), wrong, "check the address, or use another mirror") from None
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        with error:
            if error.headers.get("Content-Range") == f"bytes */{have}":
                return
            part.unlink()
            raise ConnectionError("the partial file is longer than the server's") from None
    with answer:
        span = _span(answer, part, wanted=wanted)
        _check_promise(span, remote, part.parent)
        if span.start == 0:
            sha256 = known.sha256 if known else None
            manifest.put(remote.name, Download(remote.url, _validator(answer.headers), sha256))
        with part.open("ab" if span.start else "wb") as file:
            done = span.start
            for piece in _pieces(answer):
                file.write(piece)
                done += len(piece)
                if remote.size is not None and done > remote.size:
                    part.unlink()
                    wrong = f"the server sends more than the {remote.size:,} bytes that are published"
                    raise InputError(remote.url, wrong, "check the address, or use another mirror")
                if progress:
                    progress(f"fetch {remote.name}", done, span.total)
    if span.total is not None and done < span.total:
        raise ConnectionError(f"closed after {done:,} of {span.total:,} bytes")


def _pieces(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """The body; any fault of reading it is the network's, so that it is not taken for one of the disk."""
    while True:
        try:
            piece = answer.read1(_CHUNK)  # not read(): what came before a break must not be lost
        except OSError as error:
            raise ConnectionError(_reason(error)) from error
        if not piece:
            return
        yield piece


def _span(answer: http.client.HTTPResponse, part: Path, *, wanted: int) -> _Span:
    """Which bytes come; a server that sends a part must begin where it was asked to."""
    if answer.status == http.HTTPStatus.PARTIAL_CONTENT:
        found = re.fullmatch(r"bytes (\d{1,19})-\d+/(\d{1,19})", answer.headers.get("Content-Range", ""))
        if not found or int(found[1]) != wanted:
            part.unlink(missing_ok=True)
            raise ConnectionError(f"the server sent another range, {answer.headers.get('Content-Range')!r}")
        return _Span(int(found[1]), int(found[2]))
    length = answer.headers.get("Content-Length") or ""
    return _Span(0, int(length) if re.fullmatch(r"[0-9]{1,19}", length) else None)


def _validator(headers: http.client.HTTPMessage) -> str | None:
    """The strong ETag, else the date; a weak ETag does not promise the same bytes."""
    etag = headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")


def _check_promise(span: _Span, remote: RemoteFile, folder: Path) -> None:
    """Refuse before gigabytes are fetched what is the wrong file, or has no room."""
    if span.total is None:
        return
    if remote.size is not None and span.total != remote.size:
        wrong = f"the server offers {span.total:,} bytes where {remote.size:,} are published"
        raise InputError(remote.url, wrong, "check the address, or fetch the file from another mirror")
    free, needed = shutil.disk_usage(folder).free, span.total - span.start
    if needed > free:
        wrong = f"{needed:,} bytes are still to come and {free:,} are free"
        raise InputError(str(folder), wrong, "make room, or choose another folder")


def _check(path: Path, remote: RemoteFile, *, manifest: Manifest, progress: Progress | None) -> None:
    """Compare a complete file with all that is known of it; a partial file that fails is removed."""
    known = manifest.get(remote.name) or Download(remote.url)
    size, hint = path.stat().st_size, ""
    if remote.size not in (None, size):
        fault = f"has {size:,} bytes where {remote.size:,} are published"
    else:
        sums = _hash_file(path, progress=progress)
        if remote.md5 not in (None, sums.md5):
            fault = f"has md5 {sums.md5} where {remote.md5} is published"
        elif known.sha256 not in (None, sums.sha256):
            fault = f"has sha256 {sums.sha256} where an earlier download had {known.sha256}"
            hint = f"; if the new file is the right one, delete its entry in {manifest.path} first"
        else:
            manifest.put(remote.name, replace(known, sha256=sums.sha256))
            return
    todo = "delete it and run the same command again"
    if path.suffix == ".part":
        path.unlink()
        todo = "it was removed; run the same command again, or use another mirror"
    raise InputError(str(path), fault, todo + hint)


class _Checksums(NamedTuple):
    md5: str
    sha256: str


def _hash_file(path: Path, *, progress: Progress | None) -> _Checksums:
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    size, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            md5.update(piece)
            sha256.update(piece)
            done += len(piece)
            if progress:
                progress(f"check {path.name.removesuffix('.part')}", done, size)
    return _Checksums(md5.hexdigest(), sha256.hexdigest())


def _refuse_final_answer(error: urllib.error.HTTPError) -> None:
    """Say at once what no second try will mend: the answer that there is no such file, or none for us."""
    error.close()
    if error.code < 500 and error.code not in (408, 429):
        wrong = f"the server answered {error.code} {_reason(error)}"
        raise InputError(_one_line(str(error.url)), wrong, "check the address, or use another mirror") from None


def _reason(error: Exception) -> str:
    """The fault itself: urllib wraps it once more."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return _one_line(str(inner)) or type(inner).__name__


def _one_line(text: str) -> str:
    """What a server says, short and without the signs that would steer a terminal."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text[:200]).split())
