import errno
import os
from pathlib import Path

import pytest

from pivotpatch.core.errors import InputError
from pivotpatch.data.writing import explain_disk_faults, replacing


def test_file_changes_only_at_the_end_and_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as written:
        assert written.parent == tmp_path  # a rename is only atomic within one file system
        written.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError, ValueError])
def test_old_file_stays_where_writing_fails(fault: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail_halfway(written: Path) -> None:
        written.write_text("half")
        raise fault

    with pytest.raises(fault), replacing(path) as written:
        fail_halfway(written)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_written_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_text() == "old"


def test_fault_of_a_file_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught, explain_disk_faults(tmp_path):
        (tmp_path / "gone" / "a").write_text("x")
    where, wrong, todo = caught.value.parts
    assert (where, wrong) == (str(tmp_path / "gone" / "a"), os.strerror(errno.ENOENT))
    assert todo == "choose a folder that can be written to"


def test_fault_without_a_file_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught, explain_disk_faults(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.parts[:2] == (str(tmp_path), "No space left on device")
    with pytest.raises(InputError, match="odd fault"), explain_disk_faults(tmp_path):
        raise OSError("odd fault")


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="^mine: is wrong; mend it$"), explain_disk_faults(tmp_path):
        raise InputError("mine", "is wrong", "mend it")
