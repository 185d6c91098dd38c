"""Make a published data set ready for use: fetch its archives, unpack them safely, count what is there."""

import errno
import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from pivotpatch.data.address import open_records
from pivotpatch.data.download import Manifest, Progress, RemoteFile, download_file
from pivotpatch.errors import InputError
from pivotpatch.writing import explain_disk_faults

# Photographs hardly shrink in an archive and JSON shrinks about eightfold; a bomb grows a thousandfold.
_MOST_GROWTH = 50


@dataclass(frozen=True)
class DatasetPlan:
    """Where a data set comes from and how to tell that it is complete.

    Attributes:
        archives: its files, zip or tar, unpacked into the root one after the other.
        files: number of files that match each pattern below the root.
        records: numbers of records, any of which is right, behind each address; {root} stands for the root.
    """

    archives: tuple[RemoteFile, ...]
    files: Mapping[str, int]
    records: Mapping[str, tuple[int, ...]]


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
        # The pictures are those of release 1.0; objects.json lists fewer since release 1.2, without the doubles.
        records={"vg:{root}": (108_077, 108_249)},
    ),
}


def prepare(
    plan: DatasetPlan, root: Path, *, base_url: str | None = None, progress: Progress | None = None
) -> dict[str, int]:
    """Bring a data set into a folder; what is already there is not fetched or unpacked again.

    Archives are kept in `<root>/downloads`; copies that a person puts there are used like fetched ones.

    Args:
        plan: the data set.
        root: the folder, made if it is missing.
        base_url: a mirror that holds the archives in one folder, in place of the official servers.
        progress: told about every step.

    Returns:
        The number of records behind each address of the data set.
    """
    with explain_disk_faults(root):
        if any(_count_files(root, pattern) != count for pattern, count in plan.files.items()):
            downloads = root / "downloads"
            for remote in plan.archives:
                there = remote if base_url is None else remote.at(base_url)
                _bring(there, root, downloads=downloads, progress=progress)
            for pattern, count in plan.files.items():
                found = _count_files(root, pattern)
                if found != count:
                    todo = f"delete {Manifest(downloads).path} and run the same command again"
                    raise InputError(str(root), f"{pattern} matches {found:,} files where {count:,} belong", todo)
    return {template.format(root=root): _count_records(template, root, plan, progress) for template in plan.records}


def unpack(archive: Path, folder: Path, *, progress: Progress | None = None) -> None:
    """Unpack a zip or tar file into a folder: all of it, or nothing.

    Only plain files are taken. An archive with a name that leads out of the folder, a link, a device, or far more
    bytes than it could honestly hold is refused before anything is written; checksums inside it are verified.

    Args:
        archive: the file.
        folder: where its content belongs; files of the same name are replaced.
        progress: told about every file.
    """
    staging = folder / f".unpacking-{archive.name}"
    try:
        with explain_disk_faults(folder), _open_archive(archive) as members:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            total = _check_members(members, archive, staging)
            done = 0
            for member in members:
                target = staging.joinpath(*member.parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    file.writelines(_pieces(member, archive))
                done += member.size
                if progress:
                    progress(f"unpack {archive.name}", done, total)
            _merge(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _bring(remote: RemoteFile, root: Path, *, downloads: Path, progress: Progress | None) -> None:
    """Fetch and unpack one archive, unless that is done."""
    known = Manifest(downloads).get(remote.name)
    if known and known.unpacked:
        return
    path = download_file(remote, downloads, progress=progress)
    manifest = Manifest(downloads)
    known = manifest.get(remote.name)
    assert known is not None  # download_file has just written it
    try:
        unpack(path, root, progress=progress)
    except _DamagedArchiveError:
        # Its checksum must not stand against the sound copy that comes next.
        manifest.put(remote.name, replace(known, sha256=None))
        raise
    manifest.put(remote.name, replace(known, unpacked=True))


class _DamagedArchiveError(InputError):
    """An archive that cannot be read through to its end."""


class _Member(NamedTuple):
    """A file of an archive; `plain` is False for links, devices and the like."""

    name: str
    size: int
    plain: bool
    open: Callable[[], IO[bytes]]

    @property
    def parts(self) -> tuple[str, ...]:
        return PurePosixPath(self.name.replace("\\", "/")).parts


# OSError: see below. RuntimeError: encrypted, or packed by a method that is not known here. ValueError: offsets, names.
_DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError),
    *(EOFError, OSError, RuntimeError, ValueError),
)


@contextmanager
def _reading(archive: Path) -> Iterator[None]:
    """Tell damage of an archive from faults of the disk."""
    try:
        yield
    except _DAMAGE as error:
        # Packers raise OSError without a number; a wrong offset is answered with EINVAL. All else is the disk.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        why = str(error).strip().split("\n")[0] or type(error).__name__
        todo = "delete it and run the same command again"
        raise _DamagedArchiveError(str(archive), f"is damaged ({why})", todo) from None


@contextmanager
def _open_archive(path: Path) -> Iterator[list[_Member]]:
    """The files of an archive, while it is open; folders are left out, for files bring their own."""
    with ExitStack() as opened:
        with _reading(path):
            if zipfile.is_zipfile(path):
                held = opened.enter_context(zipfile.ZipFile(path))
                members = [
                    # The upper half holds the kind of file, where the archive comes from a system that has kinds.
                    _Member(
                        i.filename,
                        i.file_size,
                        stat.S_IFMT(i.external_attr >> 16) in (0, stat.S_IFREG),
                        partial(held.open, i),
                    )
                    for i in held.infolist()
                    if not i.is_dir()
                ]
            else:
                tar = opened.enter_context(tarfile.open(path))
                members = [
                    _Member(i.name, i.size, i.isreg(), partial(_open_tar_member, tar, i))
                    for i in tar.getmembers()
                    if not i.isdir()
                ]
        yield members


def _pieces(member: _Member, archive: Path) -> Iterator[bytes]:
    """The content of a file in an archive."""
    with _reading(archive), member.open() as source:
        while piece := source.read(1 << 20):
            yield piece


def _open_tar_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    source = tar.extractfile(member)
    assert source is not None  # None stands for folders and links, which never get here
    return source


def _check_members(members: list[_Member], archive: Path, folder: Path) -> int:
    """Refuse an archive that would do harm; the number of bytes it unpacks to."""
    todo = "do not use this archive; fetch it again from its official address"
    for member in members:
        if not member.plain:
            raise InputError(str(archive), f"{member.name!r} is a link or a device", todo)
        parts = member.parts
        if not parts or parts[0].startswith("/") or ".." in parts or ":" in parts[0]:
            raise InputError(str(archive), f"{member.name!r} leads out of the folder", todo)
    names = {member.parts for member in members}
    folders = {parts[:depth] for parts in names for depth in range(1, len(parts))}
    if len(names) < len(members) or names & folders:
        raise InputError(str(archive), "two of its files have the same place", todo)
    total, most = sum(member.size for member in members), _MOST_GROWTH * archive.stat().st_size
    if total > most:
        raise InputError(str(archive), f"it unpacks to {total:,} bytes, more than {_MOST_GROWTH} times its size", todo)
    free = shutil.disk_usage(folder).free
    if total > free:
        wrong = f"{archive.name} unpacks to {total:,} bytes and {free:,} are free"
        raise InputError(str(folder), wrong, "make room, or choose another folder")
    return total


def _merge(source: Path, target: Path) -> None:
    """Move a tree into another; whole folders at once where they are new."""
    if source.is_dir() and target.is_dir():
        for child in source.iterdir():
            _merge(child, target / child.name)
    else:
        source.replace(target)


def _count_files(root: Path, pattern: str) -> int:
    return sum(1 for _ in root.glob(pattern))


def _count_records(template: str, root: Path, plan: DatasetPlan, progress: Progress | None) -> int:
    address, accepted = template.format(root=root), plan.records[template]
    if progress:
        progress(f"count {address}", 0, None)
    found = len(open_records(address))
    if found not in accepted:
        wanted = " or ".join(f"{count:,}" for count in accepted)
        todo = f"delete {root} and prepare it again, or report it if the data set has changed"
        raise InputError(address, f"holds {found:,} records where {wanted} belong", todo)
    return found
