"""Write files and folders whole or not at all, and say in words what a disk refuses."""

import errno
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pivotpatch.errors import InputError

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_SYSTEM_CODE = re.compile(r"(?:os error|code:) (\d+)")


@contextmanager
def replacing(path: Path, *, through: Path | None = None) -> Iterator[Path]:
    """A temporary name to write to; it becomes `path` at the end, and vanishes where anything fails.

    Args:
        path: the file.
        through: a folder of the same disk for the temporary file, where several processes may write the same one: it
            has a name that nobody else has, and is on the disk before it becomes `path`.
    """
    written = path.with_name(f"{path.name}.tmp")
    if through is not None:
        written = hide(through / path.name)
    try:
        yield written
        if through is not None:
            flush(written)
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
    scratch = hide(folder)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in (*scratch.rglob("*"), scratch):  # else a rename could outrun what it names
            flush(path)
        _put_in_place(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    flush(folder.parent)


def hide(path: Path) -> Path:
    """A hidden name that nobody else has, in the same folder."""
    return path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")


def check_place(path: Path, suffixes: tuple[str, ...], what: str) -> None:
    """Refuse a name that a file of a kind cannot be written to, before the work that makes it."""
    if path.suffix.lower() not in suffixes or path.is_dir():
        wrong = "is a folder" if path.is_dir() else f"is no name for {what}"
        raise InputError(str(path), wrong, f"name a file that ends in {' or '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise InputError(str(path), f"there is no folder {path.parent}", "make it first")


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


@contextmanager
def holding(path: Path, *, shared: bool = False) -> Iterator[bool]:
    """Hold a lock file, alone or with all who share it; tells whether it could be had, and removes it at the end.

    A process that is killed leaves the file, but not the lock.
    """
    while True:
        with explain_disk_faults(path.parent):
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        held = _try_lock(lock, shared=shared)
        if not held or _is_open(path, lock):
            break
        os.close(lock)  # who had it before has removed it in this moment
    try:
        yield held
    finally:
        if held:
            _unlock(lock)
            if _try_lock(lock) and _is_open(path, lock):  # the last of those who share it
                path.unlink(missing_ok=True)
        os.close(lock)


def _try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file for this process, not for those it forks; False where another process has it.

    The system gives it back however a process ends. Windows and some network disks have no such locks; there, True.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.lockf(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True


def _unlock(descriptor: int) -> None:
    if sys.platform != "win32":
        import fcntl

        with suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_UN)


def _is_open(path: Path, descriptor: int) -> bool:
    """Whether a path still leads to an open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


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
