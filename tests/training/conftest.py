import shutil
from pathlib import Path

import pytest
from run_process import SHORT, crash, when

from pivotpatch.training.loop import fit


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
