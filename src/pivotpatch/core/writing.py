"""Write files and folders whole or not at all, and say in words what a disk refuses."""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pivotpatch.core.errors import InputError

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_SYSTEM_CODE = re.compile(r"(?:os error|code:) (\d+)")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; it becomes `path` at the end, and vanishes where anything fails."""
    written = path.with_name(f"{path.name}.tmp")
    try:
        yield written
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill; it becomes `folder` once all of it is on the disk, and vanishes where anything fails.

    What was there stays until then. Folders cannot be swapped in one portable step: a crash between the two
    renames leaves the old one beside as `<folder>.old`. Whatever has that name gives way.
    """
    folder = folder.resolve()
    scratch = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in (*scratch.rglob("*"), scratch):  # else a rename could outrun what it names
            flush(path)
        _put_in_place(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    flush(folder.parent)


@contextmanager
def explain_disk_faults(folder: Path, *, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn what the system says of a file, or of `folder`, into a message for people.

    Args:
        folder: where the caller writes.
        also: errors of other libraries, taken for one of the system where their text holds its number
            (`os error 28`); else they pass unchanged.
    """
    try:
        yield
    except OSError as error:
        raise _explain(error, folder) from error
    except also as error:
        code = _SYSTEM_CODE.search(str(error))
        if code is None:
            raise
        raise _explain(OSError(int(code[1]), os.strerror(int(code[1]))), folder) from error


def _explain(fault: OSError, folder: Path) -> InputError:
    where = str(fault.filename or folder)
    if fault.errno is not None and fault.errno in _FULL:
        return InputError(where, os.strerror(fault.errno), "free some space or choose another folder")
    return InputError(where, fault.strerror or str(fault), "choose a folder that can be written to")


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(scratch: Path, folder: Path) -> None:
    """Rename a complete folder to its final name; an old one steps aside first and is then removed."""
    if not folder.exists():
        scratch.rename(folder)
        return
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    try:
        scratch.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)  # the new one is in place; the next to come removes what is left
