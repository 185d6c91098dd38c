import shutil
from pathlib import Path

import pytest
from run_process import SHORT, crash, read_run, when

from pivotpatch.training import fit


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What `SHORT` leaves where nothing stops it."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    fit(SHORT, folder)
    return read_run(folder)


@pytest.fixture(scope="session")
def crashed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crashed") / "run"
    with pytest.raises(ZeroDivisionError):
        fit(SHORT, folder, progress=when("train", 10, crash))
    return folder


@pytest.fixture
def crashed(crashed_run: Path, tmp_path: Path) -> Path:
    """A run that ended after step 10, saved at step 8."""
    shutil.copytree(crashed_run, tmp_path / "run")
    return tmp_path / "run"
