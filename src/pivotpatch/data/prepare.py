"""Make a published data set ready for use: download its archives, unpack them safely, count what is there."""

import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from pivotpatch import __version__
from pivotpatch.data.address import open_records
from pivotpatch.errors import InputError, explaining
from pivotpatch.process import Progress, ignore
from pivotpatch.writing import explain_disk_faults

_CHUNK = 1 << 20
_TIMEOUT = 30.0  # seconds without an answer before the connection counts as broken
_FAULTS = (http.client.HTTPException, OSError, ValueError)
# Photographs hardly shrink in an archive and JSON shrinks about eightfold; a bomb grows a thousandfold.
_MOST_GROWTH = 50


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


@dataclass(frozen=True)
class DatasetPlan:
    """Where a data set comes from and how to tell that it is complete."""

    archives: tuple[RemoteFile, ...]  # zip or tar, unpacked into the root one after the other
    files: Mapping[str, int]  # how many match each pattern below the root
    records: Mapping[str, tuple[int, ...]]  # numbers, any of which is right, behind each address with its {root}


_COCO = "http://images.cocodataset.org"
_VOC = "http://host.robots.ox.ac.uk/pascal/VOC/voc2007"
_VG = "https://cs.stanford.edu/people/rak248/VG_100K_2"

PLANS: Mapping[str, DatasetPlan] = {
    "coco": DatasetPlan(
        (
            RemoteFile(
                f"{_COCO}/annotations/annotations_trainval2014.zip", 252_872_794, "0a379cfc70b0e71301e0f377548639bd"
            ),
            RemoteFile(f"{_COCO}/zips/train2014.zip", 13_510_573_713, "0da8c0bd3d6becc4dcb32757491aca88"),
            RemoteFile(f"{_COCO}/zips/val2014.zip", 6_645_013_297, "a3d79f5ed8d289b7a7554ce06a5782b3"),
        ),
        files={"annotations/instances_*2014.json": 2, "train2014/*.jpg": 82_783, "val2014/*.jpg": 40_504},
        # Images without an annotation do not count.
        records={"coco:{root}@train2014": (82_081,), "coco:{root}@val2014": (40_137,)},
    ),
    "voc2007": DatasetPlan(
        (
            RemoteFile(f"{_VOC}/VOCtrainval_06-Nov-2007.tar", 460_032_000, "c52e279531787c972589f7e41ab4ae64"),
            RemoteFile(f"{_VOC}/VOCtest_06-Nov-2007.tar", 451_020_800, "b6e924de25625d8de591ea690078ad9f"),
        ),
        files={
            "VOCdevkit/VOC2007/ImageSets/Main/trainval.txt": 1,
            "VOCdevkit/VOC2007/ImageSets/Main/test.txt": 1,
            "VOCdevkit/VOC2007/JPEGImages/*.jpg": 9_963,
        },
        records={"voc:{root}/VOCdevkit@2007-trainval": (5_011,), "voc:{root}/VOCdevkit@2007-test": (4_952,)},
    ),
    "vg256": DatasetPlan(
        (
            RemoteFile(
                "https://homes.cs.washington.edu/~ranjay/visualgenome/data/dataset/objects.json.zip", 55_323_929
            ),
            RemoteFile(f"{_VG}/images.zip", 9_731_705_982),
            RemoteFile(f"{_VG}/images2.zip", 5_471_658_058),
        ),
        files={"objects.json": 1, "VG_100K*/*.jpg": 108_249},
        # The images are those of release 1.0; objects.json lists fewer since release 1.2, without the doubles.
        records={"vg:{root}": (108_077, 108_249)},
    ),
}


def prepare(
    plan: DatasetPlan, root: Path, *, base_url: str | None = None, progress: Progress = ignore
) -> dict[str, int]:
    """Bring a data set into a folder; what is already there is not downloaded or unpacked again.

    Archives are kept in `<root>/downloads`; copies that a person puts there are used like downloaded ones.

    Args:
        plan: the data set.
        root: the folder, made if it is missing.
        base_url: a mirror that holds the archives in one folder, in place of the official servers.
        progress: told about every step.

    Returns:
        The number of records behind each address of the data set.
    """
    downloads = root / "downloads"
    with explain_disk_faults(root):
        if _find_missing(plan, root):
            for archive in plan.archives:
                unpacked = downloads / f"{archive.name}.unpacked"
                if not unpacked.exists():
                    url = f"{base_url.rstrip('/')}/{archive.name}" if base_url else archive.url
                    path = download_file(replace(archive, url=url), downloads, progress=progress)
                    progress(f"unpack {archive.name}", 0, None)
                    unpack(path, root)
                    unpacked.touch()
            if missing := _find_missing(plan, root):
                raise InputError(str(root), missing, f"delete {downloads}/*.unpacked and run the same command again")
    counts = {}
    for template, accepted in plan.records.items():
        address = template.format(root=root)
        progress(f"count {address}", 0, None)
        counts[address] = len(open_records(address))
        if counts[address] not in accepted:
            wrong = f"holds {counts[address]:,} records where {' or '.join(f'{each:,}' for each in accepted)} belong"
            todo = f"delete {root} and prepare it again, or report it if the data set has changed"
            raise InputError(address, wrong, todo)
    return counts


def _find_missing(plan: DatasetPlan, root: Path) -> str | None:
    """Which files are not as many as they should be, in words."""
    for pattern, count in plan.files.items():
        found = sum(1 for _ in root.glob(pattern))
        if found != count:
            return f"{pattern} matches {found:,} files where {count:,} belong"
    return None


def download_file(remote: RemoteFile, folder: Path, *, progress: Progress = ignore) -> Path:
    """Download a file into a folder, or check the one that is already there, by its published length and MD5.

    Bytes are gathered in `<name>.part`, from which the next call goes on.
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
            todo = "run the same command again to go on from there; if that does not help, check the address"
            with explaining(remote.url, "cannot be fetched to its end", todo, of=_FAULTS):
                _fetch(remote, part, progress)
        _check(part, remote, progress)
        part.replace(target)
    return target


def _measure(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _fetch(remote: RemoteFile, part: Path, progress: Progress) -> None:
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
        while (remote.size is None or done <= remote.size) and (piece := answer.read1(_CHUNK)):
            done += file.write(piece)
            progress(f"fetch {remote.name}", done, total)
    if total is not None and done < total:
        raise ConnectionError(f"closed after {done:,} of {total:,} bytes")


def _check(path: Path, remote: RemoteFile, progress: Progress) -> None:
    """Compare a complete file with what is published of it; a partial file that fails is removed."""
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


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip or tar file into a folder: all of it, or nothing; files of the same name are replaced.

    Nothing is written outside the folder, whatever names and links the archive holds. One that claims to hold far more
    bytes than it honestly could is refused; checksums inside it are verified.
    """
    staging = folder / f".unpacking-{archive.name}"
    shutil.rmtree(staging, ignore_errors=True)
    damaged = explaining(str(archive), "cannot be unpacked", "delete it if it is damaged, and run the same again")
    with ExitStack() as done, damaged:
        done.callback(shutil.rmtree, staging, ignore_errors=True)
        staging.mkdir(parents=True)
        if zipfile.is_zipfile(archive):
            zipped = done.enter_context(zipfile.ZipFile(archive))
            _check_growth(archive, sum(member.file_size for member in zipped.infolist()))
            zipped.extractall(staging)  # noqa: S202 - takes drives, roots and .. out of names, and knows no links
        else:
            tar = done.enter_context(tarfile.open(archive))
            _check_growth(archive, sum(member.size for member in tar))
            tar.extractall(staging, filter="data")  # refuses what leads out of the folder, and devices
        # Moves each file, and makes the folders that are not there yet.
        shutil.copytree(staging, folder, copy_function=os.replace, dirs_exist_ok=True)


def _check_growth(archive: Path, total: int) -> None:
    if total > _MOST_GROWTH * archive.stat().st_size:
        wrong = f"it unpacks to {total:,} bytes, more than {_MOST_GROWTH} times its size"
        raise InputError(str(archive), wrong, "fetch it again from its official address")
