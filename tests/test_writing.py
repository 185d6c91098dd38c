import errno
import os
from pathlib import Path

import pytest

from pivotpatch.errors import InputError
from pivotpatch.writing import explain_disk_faults, replacing, replacing_folder


def test_file_changes_only_at_the_end_and_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as written:
        assert written.parent == tmp_path  # a rename is only atomic within one file system
        written.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_fault_names_its_file_or_else_the_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught, explain_disk_faults(tmp_path):
        (tmp_path / "gone" / "a").write_text("x")
    assert caught.value.parts[:2] == (str(tmp_path / "gone" / "a"), os.strerror(errno.ENOENT))
    full = f"^{tmp_path}: No space left on device; free some space or choose another folder$"
    with pytest.raises(InputError, match=full), explain_disk_faults(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    foreign = "I/O error: No space left on device (os error 28)"
    with pytest.raises(InputError, match=full), explain_disk_faults(tmp_path, also=(KeyError,)):
        raise KeyError(foreign)
    with pytest.raises(KeyError, match="header too large"), explain_disk_faults(tmp_path, also=(KeyError,)):
        raise KeyError("header too large")


def read(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_folder_changes_only_at_the_end_and_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    for content in ("first", "second"):
        before = read(tmp_path)
        with replacing_folder(folder) as scratch:
            assert scratch.parent == folder.parent
            assert scratch.name.startswith(".run.")
            (scratch / "sub").mkdir()
            (scratch / "sub" / content).write_text(content)
            assert read(folder) == {key.removeprefix("deep/run/"): text for key, text in before.items()}
        assert read(tmp_path) == {f"deep/run/sub/{content}": content}
        assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_what_was_there_stays_where_writing_fails(fault: type[BaseException], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").write_text("old")
    (tmp_path / "a.json").write_text("old")

    def fail_halfway(written: Path) -> None:
        written.write_text("half")
        raise fault

    with pytest.raises(fault), replacing(tmp_path / "a.json") as written:
        fail_halfway(written)
    with pytest.raises(fault), replacing_folder(tmp_path / "run") as scratch:
        fail_halfway(scratch / "a")
    with pytest.raises(FileNotFoundError), replacing_folder(tmp_path / "run") as scratch:
        scratch.rmdir()  # the new one cannot take its place
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "a.json"):
        pass
    assert read(tmp_path) == {"run/a": "old", "a.json": "old"}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_left_aside_by_a_crash_gives_way_and_a_link_stays_a_link(tmp_path: Path) -> None:
    for name in ("disk", "disk.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("old")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with replacing_folder(tmp_path / "run") as scratch:
        (scratch / "a").write_text("new")
    assert (tmp_path / "run").is_symlink()
    assert read(tmp_path / "disk") == {"a": "new"}
    assert not (tmp_path / "disk.old").exists()
