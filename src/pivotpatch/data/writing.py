"""Write files whole or not at all, and say in words what a disk refuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pivotpatch.core.errors import InputError


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
def explain_disk_faults(folder: Path) -> Iterator[None]:
    """Turn what the system says of a file, or of `folder`, into a message for people."""
    try:
        yield
    except OSError as error:
        where = str(error.filename or folder)
        raise InputError(where, error.strerror or str(error), "choose a folder that can be written to") from error
